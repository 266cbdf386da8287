"""Structural primitives: those that hold programs. One row of `STRUCTURAL` for each."""

from .base import (
    NO_PLAN as NO_PLAN,
    REMAT,
    SOLVER as SOLVER,
    Body as Body,
    Facts as Facts,
    Handler as Handler,
    HoistedWeights as HoistedWeights,
    Plan as Plan,
    Scope as Scope,
    Step as Step,
    steps_in as steps_in,
    steps_of as steps_of,
)
from .branches import bind_cond, cond_bodies, decide_cond
from .calls import (
    bind_inline,
    bind_jit,
    bind_remat,
    call_bodies,
    decide_call,
    decide_inline,
    decide_jit,
    decide_remat,
)
from .derivatives import (
    bind_custom_jvp,
    bind_custom_vjp,
    bind_remat_opt,
    derivative_of as derivative_of,
)
from .loops import (
    bind_scan,
    bind_while,
    decide_scan,
    decide_while,
    scan_bodies,
    while_bodies,
)
from .mapped import bind_custom_vmap, bind_pmap, bind_shard_map
from .pinned import bind_pinned, decide_pinned, no_bodies

# `_JIT` stays a call; `_INLINE` is replaced by what it holds.
_JIT = Handler(
    call_bodies,
    decide_jit,
    bind_jit,
    is_call=True,
    may_recompute=True,
    passes_hoisted_weights=True,
    is_closed=True,
)
_INLINE = Handler(
    call_bodies,
    decide_inline,
    bind_inline,
    is_call=True,
    may_recompute=True,
    passes_hoisted_weights=True,
)

STRUCTURAL: dict[str, Handler] = {
    "jit": _JIT,
    "pjit": _JIT,  # its name up to JAX 0.6
    **dict.fromkeys(
        REMAT,
        Handler(
            call_bodies,
            decide_remat,
            bind_remat,
            is_call=True,
            passes_hoisted_weights=True,
        ),
    ),
    **dict.fromkeys(("closed_call", "core_call", "call", "eval_jaxpr"), _INLINE),
    "remat_opt": Handler(
        call_bodies,
        decide_call,
        bind_remat_opt,
        is_call=True,
        passes_hoisted_weights=True,
    ),
    "cond": Handler(cond_bodies, decide_cond, bind_cond),
    "scan": Handler(scan_bodies, decide_scan, bind_scan, passes_hoisted_weights=True),
    "while": Handler(
        while_bodies, decide_while, bind_while, passes_hoisted_weights=True
    ),
    "custom_jvp_call": Handler(
        call_bodies, decide_inline, bind_custom_jvp, is_call=True, may_recompute=True
    ),
    "custom_vjp_call": Handler(call_bodies, decide_call, bind_custom_vjp, is_call=True),
    "custom_linear_solve": Handler(no_bodies, decide_pinned, bind_pinned),
    "linear_call": Handler(no_bodies, decide_pinned, bind_pinned, is_call=True),
    "custom_vmap_call": Handler(
        no_bodies, decide_pinned, bind_custom_vmap, is_call=True
    ),
    "shard_map": Handler(call_bodies, decide_call, bind_shard_map),
    "xla_pmap": Handler(call_bodies, decide_call, bind_pmap),
}
"""How each structural primitive is rewritten, by its name."""

CALLS: frozenset[str] = frozenset(n for n, row in STRUCTURAL.items() if row.is_call)
"""Those that run one program once, operands in and results out."""
