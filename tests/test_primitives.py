"""Every primitive of the installed JAX is classified, and on purpose."""

import importlib
import pkgutil
import sys

import jax.extend.core.primitives as exported
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from jaxamp_like._policies.classes import CLASSES
from jaxamp_like._policies.presets.common import ByRange
from jaxamp_like._primitives import FIXED
from jaxamp_like._rules import Rule
from jaxamp_like._structural import STRUCTURAL

pytestmark = pytest.mark.quick

PUBLIC = """jax.custom_batching jax.custom_derivatives jax.export jax.ffi jax.image
    jax.lax jax.nn jax.numpy jax.ops jax.random jax.scipy.fft jax.scipy.linalg
    jax.scipy.signal jax.scipy.sparse.linalg jax.scipy.special jax.scipy.stats
    equinox equinox.internal"""

# What is defined in these packages occurs in the jaxprs of kernels only, and a kernel
# is opaque: the equation that calls it is bound as it stands. Those that call one are
# defined there too; they occur in everybody's jaxprs, so they must have a class.
KERNEL_LANGUAGES = {"pallas", "mosaic", "mosaic_gpu", "triton", "thunky"}
CALLS_OF_KERNELS = """pallas_call tpu_custom_call mpmd_map core_map run_scoped fusible
    ffi_call"""


def is_kernel_language(module: str) -> bool:
    return not KERNEL_LANGUAGES.isdisjoint(module.split("."))


def found_primitives() -> dict[str, set[str]]:
    """The modules that each primitive is an attribute of, by its name."""
    for name in PUBLIC.split():
        importlib.import_module(name)
    experimental = importlib.import_module("jax.experimental")
    for module in pkgutil.iter_modules(experimental.__path__, "jax.experimental."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # needs a package that is not installed
            continue
    found: dict[str, set[str]] = {}
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] in ("jax", "equinox") and not is_kernel_language(path):
            for value in list(vars(module).values()):
                if isinstance(value, Primitive):
                    found.setdefault(value.name, set()).add(path)
    return found


def test_every_primitive_is_classified():
    found = found_primitives()
    assert {"dot_general", "scan", "random_bits", "bcoo_todense"} <= found.keys()
    assert found.keys() >= {
        p.name for p in vars(exported).values() if isinstance(p, Primitive)
    }
    unknown = {
        name: sorted(paths)
        for name, paths in sorted(found.items())
        if name not in CLASSES and name not in STRUCTURAL
    }
    assert not unknown, f"neither in the table nor in `_structural`: {unknown}"


def test_what_calls_a_kernel_is_opaque():
    assert FIXED.issuperset(CALLS_OF_KERNELS.split())


def test_no_rule_is_given_to_what_is_rewritten_inside():
    # A solver has a policy of its own.
    assert CLASSES.keys() & STRUCTURAL.keys() <= {"custom_linear_solve"}


def test_no_rule_goes_by_the_name_of_a_dtype():
    assert not any(isinstance(rule, ByRange) for rule in CLASSES.values())
    assert all(isinstance(rule, Rule) for rule in CLASSES.values())
    assert all(not CLASSES[name].is_compute for name in FIXED)


# The numerical reasons of doubtful rows, measured: what an op does to its input once
# that is rounded, over the values that it meets in practice.


def low_error(op, x: np.ndarray, exact: np.ndarray, dtype: str):
    """Largest relative error of the finite results, and the share that is lost.

    Lost is what became infinite, or nothing."""
    low = op(jnp.asarray(x, jnp.float32).astype(dtype))
    assert low.dtype == dtype
    actual = np.asarray(low.astype(jnp.float32)).astype(np.float64)
    lost = ~np.isfinite(actual) | (actual == 0)
    return np.max(np.abs(actual / exact - 1)[~lost], initial=0), np.mean(lost)


LOGARITHMIC = np.logspace(-8, 2, 20001)  # variances, gradients, activations

DOUBTFUL = {
    # op, inputs, the same in float64, allowed error in roundings of eps/2
    "square": (jnp.square, np.logspace(-6, 3, 20001), np.square, 3),
    "cube": (
        lambda x: lax.integer_pow(x, 3),
        np.logspace(-4, 3, 20001),
        lambda x: x**3,
        6,
    ),
    "sqrt": (jnp.sqrt, LOGARITHMIC, np.sqrt, 2),
    "rsqrt": (lax.rsqrt, LOGARITHMIC, lambda x: x**-0.5, 2),
    "quotient": (lambda x: 1 / x, np.logspace(-7, 3, 20001), np.reciprocal, 3),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_range_not_resolution(name):
    """float16 loses ordinary values where bfloat16 only rounds."""
    op, x, exact, half_eps = DOUBTFUL[name]
    error, lost = low_error(op, x, exact(x), "bfloat16")
    assert lost == 0
    assert error <= half_eps * float(jnp.finfo("bfloat16").eps) / 2 * 1.02
    _, lost = low_error(op, x, exact(x), "float16")
    assert lost > 0.04


def test_logistic():
    """Absolutely exact in bfloat16, but its logarithm needs what float16 loses."""
    x = np.linspace(-30, 30, 20001)
    for dtype in ("float16", "bfloat16"):
        low = lax.logistic(jnp.asarray(x, jnp.float32).astype(dtype))
        error = np.abs(np.asarray(low.astype(jnp.float32)) - 1 / (1 + np.exp(-x)))
        assert error.max() < float(jnp.finfo(dtype).eps)
        lost = np.mean(np.asarray(low == 0))
        assert lost > 0.1 if dtype == "float16" else lost == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["exp", "erf_inv", "sin", "rem"])
def test_magnification(name, dtype):
    """These turn the rounding of an input into more than ten times as much."""
    op, x = {
        "exp": (jnp.exp, np.linspace(5, 11, 20001)),
        "erf_inv": (lax.erf_inv, 1 - np.logspace(-6, -1, 20001)),
        "sin": (jnp.sin, np.linspace(100, 1000, 20001)),
        "rem": (lambda x: lax.rem(x, jnp.ones_like(x)), np.linspace(1, 100, 20001)),
    }[name]
    x = np.asarray(x, np.float32)
    exact = np.asarray(op(jnp.asarray(x)))
    rounded = np.asarray(op(jnp.asarray(x).astype(dtype).astype(jnp.float32)))
    error = np.abs(rounded - exact)
    if name == "exp":
        error = error / exact
    worst = np.max(error)  # infinite for erf_inv
    assert worst > (5 if name == "exp" else 10) * float(jnp.finfo(dtype).eps) / 2
