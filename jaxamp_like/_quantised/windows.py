"""Convolutions that are products of matrices, written as such.

Where windows don't overlap, a convolution multiplies each of them with one matrix. So
does one with a kernel of a single position, whatever its strides; one that cuts an
image into patches; and one whose kernel is as large as its input, as the gradient of a
kernel of a single position is. What it reads of its input is a slice, reshaped."""

from typing import Any, NamedTuple

import jax
from jax import lax

from .._jax import raw, trace
from .._rules import Site
from .axes import Axes
from .blocks import BlockRounding

CONVOLUTION = "conv_general_dilated"


class Windows(NamedTuple):
    """How a convolution is made as a `dot_general`.

    Args:
        limits: where the slice of the input ends that is read.
        strides: of that slice.
        split: the shape of the slice, with two axes for each axis that windows of
            several numbers lie along: of windows, and within them.
        kernel: the shape of the kernel without spatial axes of length 1.
        numbers: the `dimension_numbers` of the `dot_general`.
        order: which axis of its result each axis of the convolution's result is."""

    limits: tuple[int, ...]
    strides: tuple[int, ...]
    split: tuple[int, ...]
    kernel: tuple[int, ...]
    numbers: Any
    order: tuple[int, ...]

    def operands(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """The operands of the `dot_general`."""
        read = lax.slice(lhs, [0] * lhs.ndim, self.limits, self.strides)
        return read.reshape(self.split), rhs.reshape(self.kernel)

    def result(self, made: Any) -> Any:
        """The convolution's result, from that of the `dot_general`."""
        return made.transpose(self.order)

    def axes_of_result(self, axes: Axes) -> Axes:
        """Axes of the result of the `dot_general` as those of the convolution's."""
        summed, batch = (tuple(map(self.order.index, some)) for some in axes[::2])
        kept = tuple((self.order.index(axis), to) for axis, to in axes.kept)
        return Axes(summed, kept, batch)


def windows_of(site: Site) -> Windows | str:
    """How a convolution is made as a `dot_general`, or why it is none."""
    params, (lhs, rhs) = site.params, (aval.shape for aval in site.avals[:2])
    spec = params["dimension_numbers"]
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return "a convolution in groups is no product of two matrices"
    if not all(isinstance(d, int) for d in (*lhs, *rhs)):
        return "a convolution with lengths that are not known"
    if any(pair != (0, 0) for pair in map(tuple, params["padding"])):
        return "a convolution that pads its input is no product of two matrices"
    if any(d != 1 for d in params["lhs_dilation"]):
        return "a convolution of an input with holes is no product of two matrices"
    limits, strides = [*lhs], [1] * len(lhs)
    lengths: list[tuple[int, ...]] = [(d,) for d in lhs]
    for axis, of_kernel, stride, dilation in zip(
        spec.lhs_spec[2:],
        spec.rhs_spec[2:],
        params["window_strides"],
        params["rhs_dilation"],
        strict=True,
    ):
        length = rhs[of_kernel]
        count = (lhs[axis] - dilation * (length - 1) - 1) // stride + 1
        if length == 1 and count > 0:
            limits[axis], strides[axis] = (count - 1) * stride + 1, stride
            lengths[axis] = (count,)
        elif count > 0 and dilation == 1 and (stride == length or count == 1):
            limits[axis] = count * length
            lengths[axis] = count, length
        else:
            return "a convolution with windows that overlap or have gaps is no product"
    first = [sum(map(len, lengths[:axis])) for axis in range(len(lhs))]
    # Of the kernel, each summed axis that is kept, in order, with that of the input.
    beside = dict(zip(spec.rhs_spec[1:], spec.lhs_spec[1:], strict=True))
    out_features, features, *_ = spec.rhs_spec
    kept = [
        axis
        for axis in range(len(rhs))
        if axis in (out_features, features) or len(lengths[beside[axis]]) == 2
    ]
    contracted = [
        (first[beside[axis]] + len(lengths[beside[axis]]) - 1, place)
        for place, axis in enumerate(kept)
        if axis != out_features
    ]
    left, right = map(tuple, zip(*contracted, strict=True))
    # The result has examples and windows in the order of the input, then features.
    free = sorted(axis for axis in range(len(lhs)) if axis != spec.lhs_spec[1])
    placed = {
        out: free.index(axis)
        for axis, out in zip(spec.lhs_spec, spec.out_spec, strict=True)
        if axis in free
    }
    placed[spec.out_spec[1]] = len(free)
    return Windows(
        tuple(limits),
        tuple(strides),
        tuple(d for some in lengths for d in some),
        tuple(rhs[axis] for axis in kept),
        ((left, right), ((), ())),
        tuple(placed[axis] for axis in range(len(lhs))),
    )


def site_of_product(site: Site, windows: Windows) -> Site:
    """The site of the `dot_general` that a convolution is made as."""
    precision, wider = (
        site.params[name] for name in ("precision", "preferred_element_type")
    )

    def product(lhs, rhs):
        both = windows.operands(lhs, rhs)
        return lax.dot_general(
            *both, windows.numbers, precision=precision, preferred_element_type=wider
        )

    # By shapes alone: over which devices of a `shard_map` operands vary is no matter.
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in site.avals]
    *_, eqn = raw(trace(product, avals)).eqns
    return site._replace(
        primitive=eqn.primitive,
        params=eqn.params,
        avals=tuple(atom.aval for atom in eqn.invars),
        out_avals=tuple(v.aval for v in eqn.outvars),
    )


class InWindows(NamedTuple):
    """How an operand of a convolution is rounded, which is made as a `dot_general`.

    Args:
        how: the rounding of the operand of that.
        windows: how it is made.
        side: which operand it is.
        batches: how many axes of batches come before its own."""

    how: BlockRounding
    windows: Windows
    side: int
    batches: int = 0

    def along(self, axes: Axes) -> "InWindows":
        del axes  # a convolution has no others
        return self

    def batched(self, ndim: int) -> "InWindows":
        del ndim
        return self._replace(batches=self.batches + 1)

    def __call__(self, x: Any) -> "Restored":
        made = self._restored
        for _ in range(self.batches):
            made = jax.vmap(made)
        return Restored(made(x))

    def _restored(self, x: Any) -> Any:
        if self.side == 1:
            numbers = self.how(x.reshape(self.windows.kernel)).restored()
            return numbers.reshape(x.shape)
        limits, strides = self.windows.limits, self.windows.strides
        read = tuple(slice(0, *pair) for pair in zip(limits, strides, strict=True))
        numbers = self.how(x[read].reshape(self.windows.split)).restored()
        return x.astype("float32").at[read].set(numbers.reshape(x[read].shape))


class Restored(NamedTuple):
    """Numbers that were rounded, in float32."""

    numbers: Any

    def restored(self) -> Any:
        return self.numbers
