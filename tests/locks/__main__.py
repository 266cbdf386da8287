from . import MODELS, certificate_of, path_of

for name in MODELS:
    print(certificate_of(name).save(path_of(name)))
