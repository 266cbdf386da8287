"""Where float16 is not what the user wants, and what to say then."""

import jax
import jax.numpy as jnp

from .._dtypes import DType
from .._jax import source_line
from .._policies.dictionary import AMP_STOP, REWRITTEN
from .._primitives import CONTRACTIONS
from .._structural import Step

_DECIDED = {*AMP_STOP, REWRITTEN}


def report_of_float16_by_hand(compute_dtype: DType, steps: list[Step]) -> str | None:
    """What to say where bfloat16 is asked for and all contractions are float16.

    Nothing is said if float16 is asked for, nor if only some contractions are float16:
    then the author mixed dtypes on purpose."""
    if compute_dtype != jnp.bfloat16:
        return None
    contractions = [
        step.eqn
        for step in steps
        if step.eqn.primitive.name in CONTRACTIONS and _DECIDED.isdisjoint(step.scope)
    ]
    if not contractions or not all(
        x.aval.dtype == jnp.float16 for eqn in contractions for x in eqn.invars[:2]
    ):
        return None
    return (
        "All contractions of the function are float16 as written, the first in "
        f"{source_line(contractions[0])}, and stay so: bfloat16 changes nothing, and "
        "in float16 a loss wants a scale. Leave the dtypes of layers (`dtype=`, "
        "`param_dtype=`, Keras' policy) at float32, for `amp` to lower."
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


def _is_lowered(step: Step) -> bool:
    return step.is_compute and any(
        read == jnp.float16 != atom.aval.dtype
        for read, atom in zip(step.decision.reads, step.eqn.invars, strict=True)
    )
