"""What a command line names by MODULE:FACTORY, and whose fault it is if that fails."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._errors import OURS_AND_JAX, why_not_called
from .._frameworks.modules import holds_parameters
from .._suggestions import did_you_mean


class WrongTarget(Exception):
    """The command line names a module or a factory that is not there, or no tuple."""


def made(target: str, form: str, least: int) -> tuple[Any, ...]:
    """The tuple that a factory makes, or that stands in its place.

    Args:
        target: MODULE:FACTORY.
        form: what the tuple holds, for the message if it is none.
        least: how many items it has at least.
    Raises:
        WrongTarget: there is no such module, no such factory, or it gives no tuple.
        Exception: what the module or the factory raises."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise WrongTarget(f"Write MODULE:FACTORY, {_instead_of(target)}.")
    sys.path.insert(0, "")
    if "/" in module or module.startswith("."):
        raise WrongTarget(f"{module!r} is no module{_instead_of_module(module)}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise  # one that the module imports
        raise WrongTarget(
            f"There is no module {e.name!r}{_instead_of_module(module)}"
        ) from None
    factory: Any = found
    for part in name.split("."):
        if not hasattr(factory, part):
            raise WrongTarget(
                f"The module {module!r} ({getattr(found, '__file__', 'built in')}) has "
                f"no {name!r}.{_instead_of_name(part, vars(factory))}"
            )
        factory = getattr(factory, part)
    is_applied = hasattr(factory, "init") and hasattr(factory, "apply")  # Linen, Haiku
    if is_applied or holds_parameters(factory):
        params = "params" if is_applied else "None"
        shown = f", such as `def factory(): return {name}, {params}, x`"
        raise WrongTarget(
            f"{target} is a model ({type(factory).__name__}), not a function that "
            f"makes one. Write a function without arguments that returns {form}"
            f"{shown * (least > 1)}, and name that: `{module}:factory`."
        )
    try:
        given = factory() if callable(factory) else factory
    except TypeError:
        if not why_not_called(factory):
            raise
        raise WrongTarget(
            f"{target} needs arguments, {inspect.signature(factory)}. Give a function "
            f"without any, which returns {form}."
        ) from None
    if not isinstance(given, tuple | list) or len(given) < least:
        raise WrongTarget(f"{target} must give {form}, but gave {_kind(given)}.")
    return tuple(given)


def _kind(given: Any) -> str:
    is_short = isinstance(given, tuple | list)
    return type(given).__name__ + (f" of {len(given)}" if is_short else "")


def _instead_of(target: str) -> str:
    if target.endswith(".py"):
        return f"such as `{_dotted(target)}:digits`, but got {target!r}"
    return f"such as `models:digits`, but got {target!r}"


def _dotted(path: str) -> str:
    return path.removeprefix("./").removesuffix(".py").replace("/", ".")


def _instead_of_module(module: str) -> str:
    """The end of a message about a module that is not found."""
    if "/" in module or module.endswith(".py"):
        return (
            f". A module is named as in `import`, by dots and without .py: write "
            f"`{_dotted(module)}`, from the folder that it begins in."
        )
    names = [path.stem for path in Path().glob("*.py")]
    names += [path.parent.name for path in Path().glob("*/__init__.py")]
    if question := did_you_mean(module.partition(".")[0], names):
        return f".{question}"
    return f" in {Path().resolve()}: run from the folder that it is in."


def _instead_of_name(name: str, found: Iterable[str]) -> str:
    """The end of a message about a name that a module does not have."""
    public = [n for n in found if not n.startswith("_")]
    known = f" It has {', '.join(public[:12]) or 'no public names'}."
    return did_you_mean(name, public) or known


def users_traceback(error: BaseException) -> str | None:
    """The traceback of an error with the frames of the user's own code, and no others.

    It is `None` if there are none: the error is then one of the command line, whose
    message is enough. Frames of this package, of JAX, of the library that reads the
    command line and of Python's imports tell a user nothing about a factory that
    fails."""
    told = traceback.TracebackException.from_exception(error)
    files = [frame.filename for frame in told.stack]
    if isinstance(error, SyntaxError) and error.filename is not None:
        files.append(error.filename)
    if all(map(_is_hidden, files)):
        return None
    one, seen = told, set[int]()
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.stack[:] = [f for f in one.stack if not _is_hidden(f.filename)]
        one = one.__cause__ or one.__context__
    return "".join(told.format())


def _is_hidden(filename: str) -> bool:
    return filename.startswith((*OURS_AND_JAX, *_folders(), "<frozen ", "<string>"))


def _folders() -> list[str]:
    """Where the libraries lie that read the command line, and import modules."""
    found = map(sys.modules.get, ("typer", "click", "importlib"))
    files = [module.__file__ for module in found if module is not None]
    return [f"{Path(file).parent}{os.sep}" for file in files if file is not None]
