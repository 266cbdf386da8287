"""Marks gradients as those of a scaled loss.

An optimizer must refuse gradients of an unscaled loss, but their values don't tell
whether the loss was scaled. So each gradient is marked in the structure of its tree.
There `jax.jit`, `jax.lax.scan`, `jax.tree.map` and the states of frameworks keep the
mark, and it can be checked while a step is traced.

Whether all gradients are finite is decided where they are unscaled, and kept in their
values: if one is not finite, all become NaN. The optimizer itself could not tell, since
it may be given only some of them (`optax.masked`), or the finite number that clipping
has made of an infinity."""

import functools
import sys
from collections.abc import Callable
from itertools import islice
from traceback import walk_stack
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .._errors import refuse_arithmetic
from .agree import AxisName


class Verdict(NamedTuple):
    """Whether all gradients of a step are finite.

    Args:
        finite: that.
        axis_name: the axes that agreed on it.
        scale: what the loss was multiplied by."""

    finite: Array
    axis_name: AxisName
    scale: Any


_OF_ARRAYS = ("shape", "dtype", "ndim", "size")  # loggers read them; nothing is lost
_INSTEAD = (
    "Write `jax.tree.map(lambda g: ..., grads)`, which keeps the mark for `update`. To "
    "map over gradients and another tree, mark that as well: `total = jax.tree.map("
    "lambda p: jaxamp_like.scaling.Unscaled(jnp.zeros_like(p)), params)`. Or read the "
    "array: `grads.value`, or `grads[...]` of a variable of NNX."
)


class _Explaining(type):
    """A class whose `repr` makes JAX's errors say what to do.

    A transform may map over gradients and another tree, such as parameters or a state.
    That the two trees differ is only noticed by JAX, whose error shows the class."""

    def __repr__(cls) -> str:
        return (
            f"<class 'jaxamp_like.scaling.{cls.__name__}'> (a gradient of a "
            "`loss_scale_optimizer`, for its own `tx.update`; a transform that keeps a "
            "state of gradients, or reads parameters beside them, sees plain arrays "
            "within it: put it within `loss_scale_optimizer(...)`; for plain arrays, "
            "to compare, `jax.tree.map(lambda g: g.value, grads, is_leaf=lambda g: "
            "isinstance(g, Unscaled))`)"
        )


@jax.tree_util.register_pytree_with_keys_class
class Unscaled(metaclass=_Explaining):
    """Marks a true gradient of a loss that was scaled to compute it.

    `value_and_grad` of a `loss_scale_optimizer` returns a tree of these in the place of
    the arrays, and its `update` takes no others. You may mark gradients that you have
    made or put together yourself, and so say that none of them has underflown:
    `jax.tree.map(Unscaled, grads)`.

    It is a pytree of one leaf; functions of `jax.numpy` and NumPy read it as an array.
    Of an array's attributes it has `shape`, `dtype`, `ndim` and `size`.

    Args:
        value: the gradient. Where `value_and_grad` or `unscale_grads` have made it, it
            is NaN if any number in any gradient of that step was not finite.

    >>> import jax.numpy as jnp
    >>> grads = {"w": Unscaled(jnp.ones(2))}
    >>> jax.tree.map(lambda g: 0.5 * g, grads)
    {'w': Unscaled([0.5 0.5])}
    >>> float(jnp.sum(grads["w"]))
    2.0
    """

    __slots__ = ("_raw", "_value", "_verdict")
    __array_priority__: float = 1000.0  # NumPy's arrays leave arithmetic to this class

    def __init__(self, value: Any):
        self._value = value
        # Only this very object knows the array before it was made NaN, and the verdict.
        # An object that `jax.tree.map` or a jitted function returns is another one.
        self._raw = value
        self._verdict: Verdict | None = None

    @property
    def value(self) -> Any:
        """The gradient."""
        return self._value

    def __jax_array__(self) -> Array:
        _refuse_as_updates()
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ARRAYS:
            return getattr(self.value, name)
        hint = f" {_INSTEAD}" * hasattr(jax.Array, name)
        raise AttributeError(f"'Unscaled' object has no attribute {name!r}.{hint}")

    def __getitem__(self, index: Any) -> Any:
        # `variable[...]` reads what a variable of NNX holds.
        return self.value if index is Ellipsis else _refuse(self)

    def __repr__(self) -> str:
        return f"Unscaled({self.value})"

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> "Unscaled":
        return cls(*leaves)


_NO_ARRAY = (
    "A gradient of a `loss_scale_optimizer` is marked as one, and is no array to "
    f"compute with.\n{_INSTEAD}"
)


def _refuse(self: Unscaled, *_: Any) -> Any:
    raise TypeError(_NO_ARRAY)


refuse_arithmetic(Unscaled, _NO_ARRAY)
for _name in "len iter eq ne lt le gt ge bool int float complex format".split():
    setattr(Unscaled, f"__{_name}__", _refuse)


def _is_marked(x: Any) -> bool:
    return isinstance(x, Unscaled)


def _nan(dtype: Any) -> np.ndarray:
    return np.array(np.nan, dtype)


def _nan_for_finite(dtype: Any) -> np.ndarray:
    """The NaN that replaces finite numbers; its lowest bit differs from other NaNs.

    To arithmetic it is like any NaN. It can't be told from others if the format has
    only one NaN, or if a backend loses the bit (bfloat16 by way of float32)."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return _nan(dtype)
    other = (_nan(dtype).view(f"u{dtype.itemsize}") | 1).view(dtype)
    return other if np.isnan(other) else _nan(dtype)


def were_finite(x: Array) -> Array:
    """Which numbers of a gradient were finite, and are NaN since others were not."""
    other = _nan_for_finite(x.dtype)
    if other.tobytes() == _nan(x.dtype).tobytes():
        return jnp.zeros(x.shape, bool)
    unsigned = np.dtype(f"u{other.itemsize}")
    return lax.bitcast_convert_type(x, unsigned) == other.view(unsigned)


@functools.partial(jax.jit, inline=True)
def _spoilt_unless(finite: Array, g: Array) -> Array:
    """`g`, or NaN in its place, in one go: `jax_debug_nans` looks at each operation."""
    spoilt = jnp.where(jnp.isfinite(g), _nan_for_finite(g.dtype), _nan(g.dtype))
    return jnp.where(finite, g, spoilt)


def marked(grads: Any, verdict: Verdict | None) -> Any:
    """A tree whose gradients are marked, and all NaN if one of them is not finite."""

    def mark(g: Any) -> Any:
        if not eqx.is_inexact_array(g):
            return g
        if verdict is None:
            return Unscaled(g)
        one = Unscaled(_spoilt_unless(verdict.finite, g))
        one._raw, one._verdict = g, verdict
        return one

    return jax.tree.map(mark, grads)


def unmarked(grads: Any) -> Any:
    """The gradients without their marks."""
    return _replaced(grads, lambda g: g.value)


def _replaced(grads: Any, by: Callable[[Unscaled], Any]) -> Any:
    """A tree of gradients in which `by` has replaced those that are marked."""
    return jax.tree.map(
        lambda g: by(g) if _is_marked(g) else g, grads, is_leaf=_is_marked
    )


def read(grads: Any, axis_name: AxisName) -> tuple[Any, Array | None]:
    """The gradients without their marks, and whether all are finite, if it is known.

    It is known if gradients come straight from one `value_and_grad`. They are then
    returned as they were computed, without NaN in the place of finite numbers: since
    the verdict is known, nobody needs to find it from the values."""
    verdicts = {id(one): one for one in _verdicts(grads)}
    verdict = next(iter(verdicts.values()), None)
    if len(verdicts) > 1 or verdict is None or verdict.axis_name != axis_name:
        return unmarked(grads), None
    return _replaced(grads, lambda g: g._raw), verdict.finite


def _verdicts(grads: Any) -> list[Verdict | None]:
    leaves = jax.tree.leaves(grads, is_leaf=_is_marked)
    return [g._verdict for g in leaves if _is_marked(g)]


def scales_of(grads: Any) -> list[Any]:
    """The scales that losses had whose gradients these are, as far as it is known."""
    return [one.scale for one in _verdicts(grads) if one is not None]


def _named(grads: Any, are: Callable[[Any], bool]) -> str:
    """The paths of the first three gradients for which `are` holds; "" if none."""
    leaves = jax.tree_util.tree_leaves_with_path(grads, is_leaf=_is_marked)
    paths = [jax.tree_util.keystr(path) for path, g in leaves if are(g)]
    return ", ".join(f"`grads{path}`" for path in paths[:3])


def refuse_other_results(grads: Any) -> None:
    """Raises for the pair that `value_and_grad` returns, or for nothing."""
    is_pair = type(grads) is tuple and len(grads) == 2 and not _has_marks(grads[0])
    values = jax.tree.leaves(grads[0]) if is_pair else []
    is_pair = any(map(eqx.is_inexact_array_like, values)) and _has_marks(grads[1])
    if is_pair or grads is None:
        raise TypeError(
            f"`grads`, the first argument of `update`, was given "
            f"{'a pair' if is_pair else 'None'}.\n`tx.value_and_grad(loss_fn, "
            "opt_state)(...)` returns `(loss, grads)`: give the gradients alone, "
            "`tx.update(grads, opt_state, params)`."
        )


def _has_marks(grads: Any) -> bool:
    return bool(_named(grads, _is_marked))


def _refuse_as_updates() -> None:
    """Raises where the parameters would be changed by gradients as they are."""
    for frame, _ in islice(walk_stack(sys._getframe(2)), _DEPTH_OF_APPLY):
        module = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "apply_updates" and module.startswith("optax."):
            # What a user has made of gradients, or `optax.masked` leaves out, may be
            # updates: it is another object than `value_and_grad` returned.
            leaves = jax.tree.leaves(frame.f_locals.get("updates"), is_leaf=_is_marked)
            if not all(_is_marked(g) and g._verdict is not None for g in leaves):
                return
            raise TypeError(
                "`apply_updates` was given gradients of `tx.value_and_grad`, and would "
                "add them to the parameters. The optimizer of `enable_amp` or "
                "`loss_scale_optimizer` makes updates of them first: `updates, "
                "opt_state = tx.update(grads, opt_state, params)`. If they are meant "
                "as updates, make some of them: `jax.tree.map(lambda g: -rate * g, "
                "grads)`."
            )


_DEPTH_OF_APPLY = 30  # frames of JAX between `apply_updates` and the gradient


def refuse_unmarked(grads: Any) -> None:
    """Raises for gradients that do not say that they come from a scaled loss."""
    if eqx.is_inexact_array(grads) and grads.ndim == 0:
        raise TypeError(
            "`update` was given one number. If it is the loss, give the gradients: "
            "`loss, grads = tx.value_and_grad(loss_fn, opt_state)(...)`, then "
            "`tx.update(grads, opt_state, params)`. If it is a gradient, take it so, "
            "and not from `jax.value_and_grad`, which scales no loss."
        )
    if named := _named(grads, eqx.is_inexact_array):
        raise TypeError(
            "Take gradients from `tx.value_and_grad(loss_fn, opt_state)(...)`, in the "
            "place of `jax.value_and_grad(loss_fn)(...)`: `update` of a "
            f"`loss_scale_optimizer` was given some ({named}) without a mark that they "
            "come from a scaled loss. Those of `jax.value_and_grad` may have become "
            "zero in float16, and `dynamic_scale_value_and_grad` has a scale of its "
            "own, for an optimizer that scales nothing.\nBy "
            "hand, scale by `scale_loss(loss, opt_state)` and unscale by "
            "`unscale_grads(grads, opt_state)`. What you have put together yourself, "
            "mark by `jax.tree.map(Unscaled, grads)`. If a transform around it has "
            "lost the marks, as `optax.flatten` does, put that within: "
            "`loss_scale_optimizer(optax.flatten(...))`."
        )


def refuse_marked(grads: Any) -> None:
    """Raises for gradients that would be divided by the scale a second time."""
    if named := _named(grads, _is_marked):
        raise TypeError(
            f"These gradients ({named}) are unscaled already: `tx.value_and_grad` and "
            "`tx.grad` give back true gradients.\nGive them to `tx.update` as they "
            "are. `unscale_grads` is for gradients of what `scale_loss` has scaled."
        )
