"""What is measured: a function, and the points at which it is measured."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._amp import compute_dtype_of
from .._dtypes import in_words, is_float
from .._errors import explaining_arguments, warn_or_raise
from .._jax import is_array
from .._parameters import as_argnums
from .._reports.call import FlatCall, flat_call
from .._rules.user_rules import short
from .budget import Budget, as_budget

Flat = Callable[..., list[Any]]


class Point(NamedTuple):
    """Where a function is measured: a batch, at parameters that are moved a little.

    Each point has a `number` of its own, since one batch may be part of two points."""

    number: int
    batch: int
    arrays: tuple[Any, ...]
    seed: int
    spread: float
    held_out: bool

    @property
    def name(self) -> str:
        moved = ", parameters moved" * (self.held_out and self.spread > 0)
        return f"{'held-out ' * self.held_out}batch {self.batch}{moved}"


class Results(NamedTuple):
    """What a pass gives: floating and other results, and gradients."""

    outs: list[Any]
    grads: list[Any]


@dataclass(frozen=True)
class MeasuredFunction:
    """A function of arrays, with what is measured of it.

    Args:
        call: the function, taken apart by its first batch.
        has_loss: whether its first result is a floating scalar.
        budget: what is allowed, which says whether gradients are measured.
        loss_scale: what the loss is multiplied by before the backward pass."""

    call: FlatCall
    has_loss: bool
    budget: Budget
    loss_scale: float

    @property
    def differentiates(self) -> bool:
        return self.budget.needs_gradients

    def moved(self, seed: Any, spread: Any, arrays: Sequence[Any]) -> list[Any]:
        """`arrays`, with the parameters among them moved a little; see `Point`."""
        live = set(self.call.active)
        return [
            _moved(x, seed + i, spread) if i in live else x
            for i, x in enumerate(arrays)
        ]

    def program(self, mix: Callable[[Flat], Flat]) -> Callable[..., Results]:
        """A function from arrays to the results and gradients of `mix(fn)`."""
        fn, live = mix(self.call.fn), self.call.active

        def program(arrays):
            if not self.differentiates:
                return Results(fn(*arrays), [])

            def loss(some):
                outs = fn(*self.call.replaced(arrays, some))
                return outs[0] * self.loss_scale, outs

            grads, outs = jax.grad(loss, has_aux=True)([arrays[i] for i in live])
            return Results(outs, [g / self.loss_scale for g in grads])

        return program

    def names(self, results: Results) -> list[str]:
        """What each floating array among the results is called in messages."""
        floats = [i for i, x in enumerate(results.outs) if is_float(x.dtype)]
        outs = [f"result {i}" for i in floats]
        if self.has_loss:
            outs[0] = "the loss"
        if not self.differentiates:
            return outs
        return outs + [
            f"the gradient of {self.call.names[i]}" for i in self.call.active
        ]


def _moved(x: Any, seed: Any, spread: Any) -> Any:
    """`x` with each of its numbers changed by about the share `spread`.

    The changes come from multiples of the golden ratio, whose fractional parts spread
    evenly. Good random numbers take longer to compile and draw than many a pass."""
    turns = lax.iota(jnp.uint32, x.size) * jnp.uint32(2654435769)
    turns = (turns + seed * jnp.uint32(2246822519)).reshape(x.shape)
    noise = (turns >> 8).astype(jnp.float32) * 2.0**-23 - 1
    return (x * (1 + spread * math.sqrt(3) * noise)).astype(x.dtype)


def warn_of_changed_places(batches: list[Any], argnums: int | Sequence[int]) -> None:
    """Warns where the argument that holds parameters is the one that batches change."""
    if argnums != 0 or len(batches) < 2 or not is_array(batches[0][0]):
        return
    kept = [
        i
        for i, first in enumerate(batches[0])
        if all(len(batch) > i and batch[i] is first for batch in batches)
        and sum(map(is_array, jax.tree.leaves(first))) > 1
    ]
    if kept and 0 not in kept:
        warn_or_raise(
            "`calibrate` takes the gradient by argument 0, an array that is another "
            f"object in each batch, while argument {kept[0]} is the same in all: if "
            f"that holds the parameters, write `argnums={kept[0]}`.",
            strict=False,
        )


def measured_function(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    argnums: int | Sequence[int],
    loss_scale: float,
    budget: float | Budget,
) -> MeasuredFunction:
    """The `MeasuredFunction` of a function, for arguments like `args`.

    Raises:
        TypeError: `fn` is not callable, or `budget` is no budget.
        ValueError: `argnums` doesn't fit; or gradients are to be measured, but the
            first result is no loss, or the parameters hold no floats."""
    if not callable(fn):
        raise TypeError(
            f"`fn` must be callable, but got {type(fn).__name__}. Write "
            "`calibrate(fn, batches, ...)`, where `fn(*batch)` is the loss."
        )
    if compute_dtype_of(fn) is not None:
        raise TypeError(
            "`fn` is what `amp` has made: its contractions are low already, and there "
            "is nothing to decide. Give the function as it is written."
        )
    numbers = as_argnums(argnums)
    if not all(-len(args) <= i < len(args) for i in numbers):
        raise ValueError(
            f"`argnums` is {argnums}, but a batch has {len(args)} arguments. It says "
            "which of them are parameters: 0 in `(params, x, y)`."
        )
    places = [range(len(args))[i] for i in numbers]
    call = flat_call(fn, args, {}, places, getattr(fn, "__name__", type(fn).__name__))
    with explaining_arguments(
        fn,
        args,
        f"`fn(*batch)` can't be called: {{why}}. The first batch has {len(args)} "
        "items, and a batch is all arguments of `fn`, parameters included: "
        "`[(params, x, y), ...]`.",
    ):
        with _noting_batch(args):
            outs = jax.eval_shape(call.fn, *call.arrays)
    has_loss = bool(outs) and outs[0].shape == () and is_float(outs[0].dtype)
    subject = MeasuredFunction(call, has_loss, as_budget(budget, has_loss), loss_scale)
    if subject.differentiates and not has_loss:
        raise ValueError(
            "`budget` limits gradients, but the first result of `fn` is no floating "
            "scalar. Give a loss, or limit results: `Budget(outputs=0.01)`."
        )
    if subject.differentiates and not call.active:
        raise ValueError(
            f"`budget` limits gradients, but argument {argnums} of `fn` holds no "
            "floating arrays to differentiate by. Say by `argnums` which one does."
        )
    return subject


@contextmanager
def _noting_batch(args: tuple[Any, ...]) -> Iterator[None]:
    """Adds to an error of a function what it was called with.

    Parameters that were left out are missed only where the function reads them."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "`calibrate` called `fn(*batch)` with the first batch, which is "
            f"{short(jax.tree.map(_kind, args))}. A batch is all arguments of `fn`, "
            "parameters included: `[(params, x, y), ...]`."
        )
        raise


def as_batches(batches: Any, argument: str) -> list[tuple[Any, ...]]:
    """Batches as tuples of arguments.

    Raises:
        TypeError: a batch is no tuple.
        ValueError: there is none."""
    if not isinstance(batches, Iterable) or isinstance(batches, str | dict):
        raise TypeError(
            f"`{argument}` must be a list of tuples, the arguments of `fn`, but got "
            f"{type(batches).__name__}. For example: `[(params, x, y), ...]`."
        )
    found = list(batches)
    for i, batch in enumerate(found):
        if not isinstance(batch, tuple):
            raise TypeError(
                f"Each of `{argument}` must be a tuple of the arguments of `fn`, but "
                f"number {i} is a {type(batch).__name__}. Write `[(params, batch) for "
                "batch in data]`."
            )
    if not found:
        raise ValueError(
            f"`{argument}` is empty: without data nothing can be measured. Give two "
            "batches or more, of which the last half is held out to check the result."
        )
    return found


def points_of(
    call: FlatCall,
    batches: Sequence[tuple[Any, ...]],
    held_out: Sequence[tuple[Any, ...]],
    perturbation: float,
    seed: int,
) -> tuple[list[Point], list[Point]]:
    """The points to measure at, and the points to check at.

    The first batch is measured at the parameters as given, and the others at moved
    parameters. Each held-out batch is checked at the parameters as given, and the first
    of them at moved parameters too.

    Raises:
        ValueError: batches differ in structure, shapes or dtypes."""
    first = _shape(batches[0])
    points: list[Point] = []
    checks: list[Point] = []
    for number, batch in enumerate((*batches, *held_out)):
        if (shape := _shape(batch)) != first:
            raise ValueError(
                f"Batch {number} differs from the first one: {_unlike(shape, first)}. "
                "One program is compiled for all, so drop it or pad it."
            )
        start = (seed + 7919 * number) % 2**32
        arrays = flat_call(call.fn, batch, {}, (), "").arrays if number else call.arrays
        is_held_out = number >= len(batches)
        moved = Point(number, number, arrays, start, perturbation, is_held_out)
        given = moved._replace(spread=0.0)
        if is_held_out:
            checks.append(points[0] if batch is batches[0] else given)
        else:
            points.append(moved if number else given)
        if is_held_out and perturbation and len(checks) == 1:
            checks.append(moved._replace(number=len(batches) + len(held_out)))
    return points, checks


def _shape(batch: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The structure of a batch, and the dtype and shape of each of its leaves."""
    leaves, tree = jax.tree.flatten(batch)
    return tree, list(map(_kind, leaves))


def _unlike(shape: tuple[Any, list[Any]], first: tuple[Any, list[Any]]) -> str:
    if shape[0] != first[0]:
        return f"its structure is {shape[0]}, not {first[0]}"
    pairs = zip(shape[1], first[1], strict=True)
    mine, its = next((a, b) for a, b in pairs if a != b)
    return f"it has {mine} where that one has {its}"


def _kind(leaf: Any) -> Any:
    return in_words(leaf) if is_array(leaf) else leaf
