"""Functions that `amp` can't rewrite, and what to give it instead."""

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax

from ._dtypes import DType
from ._errors import RULE_CLOSES_OVER, place_of


def computes_later(fn: Any) -> str | None:
    """The kind of a callable that returns before it computes; `None` for others."""
    codes = (fn, type(fn).__call__)
    kinds = {
        "a generator": (inspect.isgeneratorfunction, inspect.isasyncgenfunction),
        "an async function": (inspect.iscoroutinefunction,),
    }
    for kind, tests in kinds.items():
        if any(test(code) for test in tests for code in codes):
            return kind
    return None


def refuse_what_cannot_be_rewritten(fn: Any) -> None:
    """Raises for callables whose computation can't be traced by a call."""
    if (kind := computes_later(fn)) is not None:
        raise TypeError(
            f"`fn` is {kind}, {_named(fn)}: it returns before it computes, so that "
            "there is nothing to rewrite. Wrap the function that computes one item "
            "or step, and call that within."
        )
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered):
        raise TypeError(
            f"`fn` is a {type(fn).__name__} program, which can't be traced any more. "
            "Give the function that it was made of, under `jax.jit` or not."
        )
    if isinstance(fn, type):
        raise TypeError(
            f"`fn` is the class {fn.__name__!r}, which makes objects. Wrap what is "
            "called with arrays: an instance, a method, or the loss that calls it."
        )


def refuse_unbound(fn: Any, wrapper: str = "amp") -> None:
    """Raises for models of Linen and Haiku that have no parameters yet."""
    if isinstance(fn, type):  # is refused as a class
        return
    functions = jax.tree.leaves(getattr(fn, "apply", None))
    if hasattr(fn, "init") and len(functions) > 1 and all(map(callable, functions)):
        raise TypeError(
            f"`fn` is a {type(fn).__name__}, whose `apply` holds {len(functions)} "
            "functions. Wrap the loss that calls them, or one of them: "
            f"`{wrapper}(fn.apply[0])(params, rng, x)`, if `apply` is a tuple."
        )
    applies = hasattr(fn, "init") and callable(getattr(fn, "apply", None))
    is_bound = callable(fn) and not (
        getattr(fn, "scope", fn) is None and getattr(fn, "parent", fn) is None
    )
    if applies and not is_bound:
        raise TypeError(
            f"`fn` is a {type(fn).__name__} without parameters. Wrap the loss that "
            f"calls its `apply`, or that: `{wrapper}(model.apply)(params, x)`."
        )


class Decorator(functools.partial):
    """A decorator that raises if it is used as a context manager, as autocast is."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`amp` is no context manager: it rewrites a function, forward and backward "
            "pass together. Write `mixed = amp(loss_fn)` and call that. Within, `with "
            "amp_stop():` keeps a block as written."
        )

    def __exit__(self, *_: Any) -> None: ...


def report_of_amp_twice(inner: DType, outer: DType) -> str:
    """The message if `amp` is given a function that it made, with another dtype."""
    return (
        f"`fn` is what `amp` has made already, and goes on computing in {inner.name}: "
        f"{outer.name} changes nothing in it. (A float16 loss also wants a loss scale, "
        "which `enable_amp` gives by the dtype that it is told.) Use `amp` or "
        "`enable_amp` once, on the function as written."
    )


def report_of_amp_stopped(fn: Any) -> str:
    """The message where a function that `amp` has made is called within `amp_stop`."""
    return (
        f"`amp_stop` stands around {place_of(fn)}, which `amp` has wrapped, and does "
        "not reach into it. Put `amp_stop` inside of that function, around what is to "
        "be kept as written, or call the function without `amp`."
    )


FLOAT16_BY_DEFAULT = (
    "`amp` computes in float16, since nothing says a dtype, and is differentiated "
    "without a loss scale: gradients below 6e-8 become zero. Write `amp(fn, "
    "compute_dtype='bfloat16')`, which needs no scale, or take `enable_amp`, whose "
    "optimizer scales the loss. If you scale it by hand, say `compute_dtype='float16'`."
)


def report_of_hidden_parameters(fn: Any) -> str:
    """The message for a callable pytree, which `amp` turns into a plain function."""
    return (
        f"`fn` is a {type(fn).__name__}, a pytree that holds arrays, and `amp` gives a "
        "function: transforms find nothing in it to differentiate by. Wrap the loss "
        "that calls it, `amp(loss)(model, x)`. (Models of Equinox and NNX stay models.)"
    )


_GENERATORS = (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)


def is_lazy(x: Any) -> bool:
    """Whether `x` only computes when it is read."""
    return isinstance(x, _GENERATORS + (map, filter, zip))


def refuse_lazy_results(fn: Any, outs: list[Any]) -> None:
    """Raises for results that would compute outside of `amp`."""
    if (len(outs) == 1 and inspect.isroutine(outs[0])) or _is_jitted(outs):
        name = getattr(fn, "__name__", "jit")
        raise TypeError(
            f"{_named(fn)} returns a function, which computes when it is called: "
            f"outside of `amp`, as it is written. Write `{name}(amp(fn))`, not "
            f"`amp({name})(fn)`; of a function that makes functions, mix what it makes."
        )
    for x in filter(is_lazy, outs):
        raise TypeError(
            f"{_named(fn)} returns a {type(x).__name__}, which computes when it is "
            "read: outside of `amp`. Return arrays: a list or a tuple of them, or "
            "`jnp.stack` of them."
        )


def refuse_what_cannot_be_stopped(fn: Any) -> None:
    """Raises for what is no function, or only computes after `amp_stop` is left."""
    if not callable(fn):
        raise TypeError(
            f"`amp_stop` takes a function, or nothing, but got {type(fn).__name__}. "
            "Use `@amp_stop` or `with amp_stop():`."
        )
    refuse_unbound(fn, "amp_stop")
    if (kind := computes_later(fn)) is not None:
        raise TypeError(
            f"`amp_stop` was given {kind}, {_named(fn)}: it returns before it "
            "computes, outside of `amp_stop`. Write `with amp_stop():` in it, around "
            "what it computes."
        )
    if isinstance(fn, type):
        raise TypeError(
            f"`amp_stop` was given the class {fn.__name__!r}, whose methods run when "
            "it has made an object, outside of `amp_stop`. Write `@amp_stop` above its "
            "methods, such as `__call__`."
        )


def _is_jitted(outs: list[Any]) -> bool:
    return len(outs) == 1 and isinstance(outs[0], _JITTED)


_JITTED = type(jax.jit(lambda: None))


@contextmanager
def _nothing() -> Iterator[None]:
    yield


_LATER = (*_GENERATORS, map, type(_nothing()))


def refuse_results_of_later(fn: Any, out: Any) -> None:
    """Raises for a result that would compute after `amp_stop` has been left."""
    leaves = jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, _LATER))
    for x in leaves:
        if isinstance(x, _LATER):
            raise TypeError(
                f"{_named(fn)} under `amp_stop` returns a {type(x).__name__}, which "
                "runs later, outside of `amp_stop`. Return arrays, or write `with "
                "amp_stop():` around what computes them."
            )


def _named(fn: Any) -> str:
    name = getattr(fn, "__qualname__", None)
    return f"`{name if isinstance(name, str) else type(fn).__name__}`"


_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

_NOTE = """\
`amp` traces the function, under `jax.jit` or not: the values of arrays aren't known
while it runs. Instead of `if x > 0:` write `jnp.where(x > 0, a, b)` or `jax.lax.cond`;
instead of `float(x)`, `x.item()` or `np.asarray(x)` inside, return `x` and convert the
result outside of `amp`. A number that must be known inside is given as a Python number,
which `amp` leaves as it is."""


_SCOPED_IN_NNX = """\
If the model was given to `scope_modules` within a transform of NNX (`nnx.grad`,
`nnx.value_and_grad`, `nnx.jit`): NNX lets no node change its class there. Scope it
once, where it is made, or around the transform: `amp(step)`, where `step(model, x)`
begins with `model = scope_modules(model)` and takes the gradient after it."""


_OF_INTEGERS = "grad requires real- or complex-valued inputs"
_INTEGERS = """\
Parameters that are trained are floating-point: `jnp.asarray(w, jnp.float32)`. Where
integers stand beside them, `equinox.filter_grad` differentiates by the others alone, as
`value_and_grad` of the optimizer of `enable_amp` does."""


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@contextmanager
def explaining_tracing() -> Iterator[None]:
    """Adds a note to JAX's errors, once, that says what they mean within `amp`."""
    try:
        yield
    except _CONCRETE as error:
        if _NOTE not in _notes(error):
            error.add_note(_NOTE)
        raise
    except jax.errors.UnexpectedTracerError as error:
        if RULE_CLOSES_OVER not in _notes(error):
            error.add_note(RULE_CLOSES_OVER)
        raise
    except TypeError as error:  # from `jax.grad` inside of the function
        if str(error).startswith(_OF_INTEGERS) and _INTEGERS not in _notes(error):
            error.add_note(_INTEGERS)
        raise
    except ValueError as error:  # from Flax, whose message only names two classes
        if "Expected a node of type" in str(error):
            error.add_note(_SCOPED_IN_NNX)
        raise
