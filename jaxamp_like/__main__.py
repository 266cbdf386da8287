"""`python -m jaxamp_like`: converts, explains and inspects from a shell."""

from ._convert.cli import main

if __name__ == "__main__":
    main()
