"""The errors and warnings of the package, and warnings that are given once."""

import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


class AmpError(Exception):
    """A function can't be rewritten as the policy says; the message says what to do."""


class AmpWarning(UserWarning):
    """Something was left in the author's dtypes that the user may expect to be low."""


def _folder(file: str | None) -> str:
    return f"{Path(str(file)).parent}{os.sep}"


_OURS, _JAX = _folder(__file__), _folder(jax.__file__)
# The folders that neither hold the user's own code nor that of other libraries.
OURS_AND_JAX = _OURS, _JAX


class _HidingFrames:
    """Frames of this package are left out of the traceback of an error.

    A context, and a decorator. An error of the user's function then shows the user's
    own lines, and an error of this package ends in the line of the user that it is
    about. JAX does the same with its frames, and has a setting for it, which holds for
    this package too: JAX_TRACEBACK_FILTERING=off shows them all.

    It needs nothing private: since Python 3.11, a `with` block that an error leaves
    raises it again with the traceback that the error has then."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        mode = jax.config.jax_traceback_filtering  # pyright: ignore
        if isinstance(error, Exception) and mode != "off":
            seen = set[int]()
            while error is not None and id(error) not in seen:
                seen.add(id(error))
                error.__traceback__ = _without_our_frames(error)
                hides = error.__suppress_context__
                error = error.__cause__ or (None if hides else error.__context__)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def hiding(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self:
                return function(*args, **kwargs)

        return hiding


hiding_frames = _HidingFrames()
# The kinds of errors that this package raises with a message for the user.
_TOLD = AmpError, TypeError, ValueError, AttributeError, ImportError, OSError


def _without_our_frames(error: BaseException) -> types.TracebackType | None:
    """The traceback of an error without our frames, unless the fault is ours.

    It is ours if the innermost frame is, and the error is none that is told to users,
    or if JAX raises an error where no code of the user stands between."""
    entries: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    outside = [file for file in files if not file.startswith(_JAX)]
    if outside and outside[-1].startswith(_OURS):
        if files[-1] != outside[-1] or not isinstance(error, _TOLD):
            return error.__traceback__
    made: types.TracebackType | None = None
    for entry, file in zip(reversed(entries), reversed(files), strict=True):
        if not file.startswith(_OURS):
            where = entry.tb_frame, entry.tb_lasti, entry.tb_lineno
            made = types.TracebackType(made, *where)
    return made


# Libraries whose frames stand between the user's line and a warning about it.
_BETWEEN = (
    "contextlib functools jax equinox optax flax haiku keras diffrax optimistix lineax"
).split()


def _stack_level() -> int:
    """The stack level of the innermost line that is the user's own.

    Where there is none, of the innermost that is neither ours nor JAX's."""
    between = (_OURS, *_places(tuple(name for name in _BETWEEN if name in sys.modules)))
    return _level_outside(between) or _level_outside(OURS_AND_JAX) or 2


@functools.cache
def _places(names: tuple[str, ...]) -> tuple[str, ...]:
    """The folder of each package, and the file of each module that is none."""
    modules = [sys.modules[name] for name in names]
    files = [str(getattr(module, "__file__", None)) for module in modules]
    return tuple(
        _folder(file) if hasattr(module, "__path__") else file
        for module, file in zip(modules, files, strict=True)
    )


def _level_outside(places: tuple[str, ...]) -> int | None:
    """The level, as of the code that warns, of the first frame outside of `places`."""
    frame, level = sys._getframe(3), 2
    while frame is not None and frame.f_code.co_filename.startswith(places):
        frame, level = frame.f_back, level + 1
    return level if frame is not None else None


def calling_library(*libraries: types.ModuleType) -> str | None:
    """Which of some libraries calls into the module that asks.

    `None` if other code does: the user's, or that of another library."""
    frame = sys._getframe(1)
    inner = frame.f_code.co_filename, __file__  # where `hiding_frames` stands around it
    while frame is not None and frame.f_code.co_filename in inner:
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    names = (x.__name__ for x in libraries if file.startswith(_folder(x.__file__)))
    return next(names, None)


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul".split()
_UNARY = "neg pos abs".split()


def refuse_arithmetic(cls: type, message: str) -> None:
    """Lets operators on objects of a class raise a `TypeError` with a message."""

    def refuse(self: Any, *_: Any) -> NoReturn:
        raise TypeError(message)

    for name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_UNARY):
        setattr(cls, f"__{name}__", refuse)


def length_of_state(state: Any, library: str | None, optimizer: str) -> int:
    """The length of a state of an optimizer, unless a library asks for it.

    Optax counts the states of a chain, which it then takes `state` for."""
    if library is not None:
        raise TypeError(
            f"An optimizer of Optax was given a {type(state).__name__}, which is the "
            f"state of another one: of what {optimizer} made. Call `update` of that: "
            "`updates, opt_state = tx.update(grads, opt_state, params)`."
        )
    return tuple.__len__(state)


def how_to_install(package: str, extra: str) -> str:
    """What to run where a package of an extra is missing, on an index or in a clone."""
    return (
        f"Run `pip install {package}`. All of the extra {extra!r} comes with `pip "
        f"install 'jaxamp_like[{extra}]'`, or in a clone of the repository with `pip "
        f"install -e '.[{extra}]'`."
    )


_seen: set[Hashable] = set()


def warn_or_raise(message: str, strict: bool, once: Hashable = None) -> None:
    """Raises when `strict`, else warns the first time that this message comes up.

    If `once` is given, it warns only if nothing was said under an equal `once` yet."""
    if strict:
        raise AmpError(message)
    about = message if once is None else once
    if about not in _seen:
        _seen.add(about)
        warnings.warn(message, AmpWarning, _stack_level())


def place_of(fn: Callable[..., Any]) -> str:
    """The name of a function without its wrappers, and where it is written.

    Warnings about a whole function include this. Otherwise the messages for two
    functions could be equal, and the second one would not be given."""
    while isinstance(fn := inspect.unwrap(fn), functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None)
    if name == "__call__":  # of a model
        name = getattr(fn, "__qualname__", name).split(".")[-2:][0]
    is_named = isinstance(name, str)
    code = getattr(fn if is_named else type(fn).__call__, "__code__", None)
    where = (
        f" ({code.co_filename}:{code.co_firstlineno})" if inspect.iscode(code) else ""
    )
    return f"`{name if is_named else type(fn).__name__}`{where}"


_OF_JIT = "static_argnums static_argnames donate_argnums donate_argnames in_shardings"
# Arguments that newcomers give to the wrong function.
_OF_OTHERS = {
    "has_aux": "`has_aux` belongs to what takes the gradient: `jax.value_and_grad(fn, "
    "has_aux=True)`, or `tx.value_and_grad(loss_fn, opt_state, has_aux=True)`.",
    **{
        name: f"`{name}` belongs to `jax.jit`, which goes around."
        for name in (*_OF_JIT.split(), "out_shardings")
    },
    **{
        name: f"`{name}` belongs to `amp`: give `amp(fn, {name}=True, "
        "compute_dtype=...)`, of the same dtype."
        for name in ("lean", "strict")
    },
    **{
        name: "Arguments of the model are given to it within the function: `lambda "
        f"params, x: model.apply(params, x, {name}=...)`."
        for name in ("train", "training", "deterministic", "is_training")
    },
}

Hints = Callable[[Mapping[str, Any], tuple[Any, ...], dict[str, Any]], list[str]]
"""Makes sentences of advice from a function's parameters, args and kwargs."""


def explaining_misfits(
    name: str, hints: Hints
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: where arguments don't fit, the error says what to write instead.

    Args:
        name: what the function is called.
        hints: makes the sentences that the error ends with."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with hiding_frames:
                try:
                    return function(*args, **kwargs)
                except TypeError:
                    try:
                        signature.bind(*args, **kwargs)
                    except TypeError as e:
                        wrong = str(e)
                    else:
                        raise
                instead = hints(signature.parameters, args, kwargs)
                unknown = [k for k in kwargs if k not in signature.parameters]
                of_others = [_OF_OTHERS[k] for k in unknown if k in _OF_OTHERS]
                instead += dict.fromkeys(of_others)
                what = f"`{name}` can't be called so: {wrong}."
                raise TypeError(" ".join([what, *instead])) from None

        return checked

    return decorate


def why_not_called(
    fn: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    partially: bool = False,
) -> str:
    """Why a function can't be called with these arguments; "" if it can be.

    It is also "" of callables that don't tell their signature. `partially` says that
    other arguments may follow."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions in C have none
        return ""
    try:
        bind = signature.bind_partial if partially else signature.bind
        bind(*args, **(kwargs or {}))
    except TypeError as e:
        return str(e)
    return ""


@contextmanager
def explaining_arguments(fn: Any, args: Sequence[Any], message: str) -> Iterator[None]:
    """Raises another error if a function fails because it can't be called so.

    Args:
        fn: the function.
        args: what it is called with.
        message: of the error, in which `{why}` stands for the reason."""
    try:
        yield
    except TypeError as e:
        if not (why := why_not_called(fn, args)):
            raise
        raise TypeError(message.format(why=why)) from e


def showing_call(example: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: where arguments don't fit, the error shows a call that does."""
    return explaining_misfits(example.split("(")[0], lambda *_: [f"Write `{example}`."])


def listing_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A decorator: where arguments don't fit, the error names those that there are."""

    def hints(parameters: Mapping[str, Any], *_: Any) -> list[str]:
        names = ", ".join(f"`{name}`" for name in parameters)
        return [f"Its arguments are {names}, each given by its name."]

    return explaining_misfits(function.__name__, hints)(function)


def without_derivative(message: str) -> Callable[[Any], Any]:
    """An identity (of a pytree) that raises an `AmpError` when it is differentiated."""

    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    @identity.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise AmpError(message)

    return identity


RULE_CLOSES_OVER = """\
A value is read whose trace has ended. `amp` traces the function that it wraps, as
`jax.jit` does: return its values, and keep none of them in a dict or list. If you keep
none, a derivative rule (`jax.custom_vjp`, `jax.custom_jvp`) closes over a value of that
function, and JAX runs the rule when the function has returned. (`jax.grad(jax.jit(fn))`
fails as well.)
Pass the value as an argument of the function that has the rule; a solver with implicit
differentiation takes it as a parameter, such as jaxopt's `solver.run(init, w, x)` with
`fixed_point_fun(z, w, x)`. Or put `amp` around the derivative: `amp(jax.grad(fn))`."""


@contextmanager
def explaining_rules() -> Iterator[None]:
    """Raises an error with advice if a derivative rule reads values that are gone."""
    try:
        yield
    except Exception as e:
        # The second class is private.
        if type(e).__name__ not in ("UnexpectedTracerError", "CustomVJPException"):
            raise
        raise AmpError(RULE_CLOSES_OVER) from e
