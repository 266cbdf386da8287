"""The versions that a report names."""

from importlib.metadata import PackageNotFoundError, version

from .._version import NAME, version as own_version


def versions() -> dict[str, str]:
    """The versions of the packages behind a report, as far as they are installed."""
    return {NAME: own_version()} | {name: _version(name) for name in ("jax", "jaxlib")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # run from a clone, by PYTHONPATH
        return "(not installed)"
