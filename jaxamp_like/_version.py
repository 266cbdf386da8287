"""The version of the package, which stands in `pyproject.toml` and nowhere else."""

import functools
import tomllib
from importlib.metadata import PackageNotFoundError, version as installed_version
from pathlib import Path

NAME = "jaxamp_like"


@functools.cache
def version() -> str:
    """The version in `pyproject.toml` of a clone, else that which was installed.

    A clone comes first: it may be on PYTHONPATH while another version is installed, or
    have a newer version than when it was installed by `pip install -e`. A copy of the
    package's folder alone knows neither; "0+unknown" is what PEP 440 allows for it."""
    file = Path(__file__).parents[1] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == NAME:
            return project["version"]
    try:
        return installed_version(NAME)
    except PackageNotFoundError:
        return "0+unknown"
