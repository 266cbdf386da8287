"""Where 16 bits are not those that the user wants, and what to say then."""

import jax
import jax.numpy as jnp

from .._dtypes import DType
from .._jax import source_line
from .._policies.dictionary import AMP_STOP, REWRITTEN
from .._primitives import CONTRACTIONS
from .._structural import Step

_DECIDED = {*AMP_STOP, REWRITTEN}


def report_of_16_bits_by_hand(compute_dtype: DType, steps: list[Step]) -> str | None:
    """What to say where all contractions are in the other 16-bit dtype as written.

    Nothing is said if only some contractions are: then the author mixed dtypes on
    purpose."""
    other = {jnp.bfloat16: jnp.float16, jnp.float16: jnp.bfloat16}
    other = {jnp.dtype(k): jnp.dtype(v) for k, v in other.items()}.get(compute_dtype)
    contractions = [
        step
        for step in steps
        if step.eqn.primitive.name in CONTRACTIONS and _DECIDED.isdisjoint(step.scope)
    ]
    if other is None or not contractions:
        return None
    if not all(_stays_in(other, step) for step in contractions):
        return None
    why = (
        ", and in float16 a loss wants a scale"
        if other == jnp.float16
        else ", since what the author made 16 bits wide stays as it is"
    )
    return (
        f"All contractions of the function are {other.name} as written, the first in "
        f"{source_line(contractions[0].eqn)}, and stay so: {compute_dtype.name} "
        f"changes nothing{why}. Leave the dtypes of layers (`dtype=`, `param_dtype=`, "
        "Keras' policy) at float32, for `amp` to lower."
    )


def report_of_float16_on_tpus(steps: list[Step]) -> str | None:
    """What to say where contractions are lowered to float16 and JAX runs on a TPU."""
    first = next((step for step in steps if _is_lowered(step)), None)
    if first is None or jax.default_backend() != "tpu":
        return None
    return (
        "JAX runs on a TPU, whose matrix units multiply bfloat16. In float16, as in "
        f"{source_line(first.eqn)}, contractions are no faster, and a loss wants a "
        "scale. Ask for `compute_dtype='bfloat16'`."
    )


def _stays_in(dtype: DType, step: Step) -> bool:
    """Whether a contraction that is to be lowered reads `dtype` and keeps it."""
    pairs = zip(step.eqn.invars[:2], step.decision.reads, strict=False)
    stays = all(atom.aval.dtype == dtype == (read or dtype) for atom, read in pairs)
    return step.is_compute and step.decision.eight_bits is None and stays


def _is_lowered(step: Step) -> bool:
    return step.is_compute and any(
        read == jnp.float16 != atom.aval.dtype
        for read, atom in zip(step.decision.reads, step.eqn.invars, strict=True)
    )
