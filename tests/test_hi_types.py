"""Values of hi-types, which JAX lowers to several arrays, go through as they are."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp_like import amp, trace_numerics
from jaxamp_like._jax import to_classic

from .constructs import arrays
from .test_structure import contractions

hijax: Any = pytest.importorskip("jax.experimental.hijax")

if not hasattr(hijax, "HiType") or jax.__version_info__ < (0, 12):
    pytest.skip("this JAX has no loops over hi-types", allow_module_level=True)

# The two classes below can't be opened, which amp tells of.
pytestmark = pytest.mark.filterwarnings("ignore:.*can't be opened")


@dataclass
class Rows:
    """Numbers of 8 bits, with a scale for each row."""

    numbers: Any
    scales: Any


@dataclass(frozen=True)
class RowsType(hijax.HiType):
    shape: tuple[int, ...]

    def lo_ty(self):
        numbers = jax.core.ShapedArray(self.shape, jnp.dtype("int8"))
        return [numbers, jax.core.ShapedArray(self.shape[:1], jnp.dtype("float32"))]

    def lower_val(self, rows):
        return [rows.numbers, rows.scales]

    def raise_val(self, numbers, scales):
        return Rows(numbers, scales)

    def to_tangent_aval(self):
        return jax.core.ShapedArray(self.shape, jnp.dtype("float32"))


hijax.register_hitype(Rows, lambda rows: RowsType(rows.numbers.shape))


class Encode(hijax.HiPrim):
    def __init__(self, aval):
        self.in_avals, self.out_aval = (aval,), RowsType(aval.shape)
        self.params = {}
        super().__init__()

    def expand(self, x):
        scales = jnp.max(jnp.abs(x), 1) / 127
        return Rows(jnp.round(x / scales[:, None]).astype(jnp.int8), scales)


class Decode(hijax.HiPrim):
    def __init__(self, aval):
        self.in_avals = (aval,)
        self.out_aval = jax.core.ShapedArray(aval.shape, jnp.dtype("float32"))
        self.params = {}
        super().__init__()

    def expand(self, rows):
        return rows.numbers.astype(jnp.float32) * rows.scales[:, None]


def encode(x):
    return Encode(jax.typeof(x))(x)


def decode(rows):
    return Decode(jax.typeof(rows))(rows)


def step(rows, w):
    return encode(jnp.tanh(decode(rows) @ w))


def scan(x, w):
    return lax.scan(lambda rows, _: (step(rows, w), None), encode(x), length=3)[0]


PROGRAMS = {
    "result": lambda x, w: encode(x @ w),
    "inside": lambda x, w: decode(encode(x @ w)) @ w,
    "jit": lambda x, w: jax.jit(step)(encode(x), w),
    "scan": scan,
    "fori_loop": lambda x, w: lax.fori_loop(
        0, 3, lambda i, rows: step(rows, w), encode(x)
    ),
    "while_loop": lambda x, w: lax.while_loop(
        lambda both: both[0] < 3,
        lambda both: (both[0] + 1, step(both[1], w)),
        (0, encode(x)),
    )[1],
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: decode(scan(x, w)))(x),
}


def dense(value):
    rows = (value.numbers, value.scales) if isinstance(value, Rows) else None
    return value if rows is None else rows[0] * rows[1][:, None]


@pytest.mark.parametrize("is_jitted", (False, True))
@pytest.mark.parametrize("program", PROGRAMS)
def test_hi_types_go_through(program, is_jitted):
    x, w = arrays("x", "w")
    fn = PROGRAMS[program]
    mixed = amp(fn, compute_dtype="bfloat16")
    assert set(contractions(to_classic(jax.make_jaxpr(mixed)(x, w)))) == {"bfloat16"}
    expected, found = fn(x, w), (jax.jit(mixed) if is_jitted else mixed)(x, w)
    assert type(found) is type(expected) or isinstance(found, jax.Array)
    np.testing.assert_allclose(dense(found), dense(expected), atol=0.05)


@pytest.mark.parametrize("is_jitted", (False, True))
def test_arguments_of_hi_types(is_jitted):
    x, w = arrays("x", "w")
    rows = encode(x)
    mixed = amp(step, compute_dtype="bfloat16")
    found = (jax.jit(mixed) if is_jitted else mixed)(rows, w)
    assert isinstance(found, Rows)
    np.testing.assert_allclose(dense(found), dense(step(rows, w)), atol=0.05)


def test_numerics_of_hi_types_are_refused():
    with pytest.raises(NotImplementedError, match=r"hi-types.*Encode.*test_hi_types"):
        trace_numerics(scan, compute_dtype="bfloat16")(*arrays("x", "w"))
