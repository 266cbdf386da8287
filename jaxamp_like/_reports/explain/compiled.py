"""What XLA needs to run a program, by its own account."""

import warnings
from itertools import compress
from typing import Any

import jax

from ..._hlo.devices import placed
from ..._jax import Jaxpr, raw, traced_afresh, variables
from ..._rewrite.record import Recorder, recording
from ..call import FlatCall
from ..data.records import CompiledMemory


def compiled_memory(
    call: FlatCall, jaxpr: Jaxpr, device: Any, *, as_written: bool
) -> CompiledMemory | None:
    """Compiles a call and asks XLA; `None` if XLA gives no account.

    Args:
        call: what is compiled.
        jaxpr: its program, which says what is donated.
        device: what to compile for; `None` for that of the arguments, or JAX's
            default.
        as_written: whether `amp` is to do nothing in it."""
    arrays = call.arrays if device is None else placed(call.arrays, device)
    # All arguments are in memory, whether they are read or not.
    jitted = jax.jit(call.fn, donate_argnums=_donated(jaxpr), keep_unused=True)
    with recording(Recorder(as_written)), traced_afresh(), warnings.catch_warnings():
        # The function itself warns when it is run.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = jitted.lower(*arrays).compile()
    found = compiled.memory_analysis()
    if found is None:
        return None
    shardings = jax.tree.leaves(compiled.input_shardings)
    # With references among the arguments, JAX can't tell those of the results.
    shardings = shardings or jax.tree.leaves(compiled.output_shardings)
    devices = {one for each in shardings for one in each.device_set}
    first = min(devices or jax.devices(), key=lambda one: one.id)
    return CompiledMemory(
        device=first.device_kind,
        num_devices=max(len(devices), 1),
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes - found.alias_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
    )


def _donated(jaxpr: Jaxpr) -> tuple[int, ...]:
    """The inputs of a program that it donates to the functions that it calls."""
    inner = raw(jaxpr)
    donated = set()
    for eqn in inner.eqns:
        flags = eqn.params.get("donated_invars", [False] * len(eqn.invars))
        donated |= set(variables(compress(eqn.invars, flags)))
    return tuple(i for i, var in enumerate(inner.invars) if var in donated)
