"""What each JAX primitive needs, by name: the table behind the default policy.

By name and not by object, since JAX exports only some 175 of its primitives. A
primitive that is in no class is left in the author's dtypes. Where the two compute
dtypes differ, range is the reason: float16 ends at 65504 and loses what is below 6e-8,
bfloat16 has the range of float32."""

from ._rules import (
    ByRange,
    ConvertAsWritten,
    Rule,
    follow_inputs,
    keep_each_input,
    keep_inputs,
    use_compute_precision,
    use_original_precision,
    use_original_precision_locally,
)

_FULL, _LOCAL = use_original_precision, use_original_precision_locally

# Contractions: fast in low precision, accumulated in float32 by the hardware.
_COMPUTE = "dot_general conv_general_dilated ragged_dot_general ragged_dot"

# Range: ordinary inputs leave float16 (exp overflows at 11.1), and an absolute error of
# the input becomes a relative error of the result (5.9 % in bfloat16 at |x| = 20).
_EXPONENTIAL = "exp exp2 expm1 pow sinh cosh cumlogsumexp"

# Long sums and products: the error grows with the number of terms, and a bfloat16 sum
# stops growing at 256 times its summand.
_ACCUMULATING = """reduce_sum reduce_prod cumsum cumprod scatter-add scatter_add
    scatter-sub scatter_sub scatter-mul scatter_mul"""

# Sums over devices and of cotangents: few terms, so the result may be read low.
_SUMMING_FEW = """psum psum2 psum_invariant reduce_scatter unreduced_psum
    unreduced_reduce_scatter"""

# Poles, zeros and phases: the rounding of the input is magnified without bound.
_ILL_CONDITIONED = """acos asin acosh atanh sin cos tan erf_inv digamma lgamma
    polygamma igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta zeta rem one_minus_square polynomial"""

# Discontinuous or exact by contract: the integer that a float stands for, its bits, its
# place in a sequence of random numbers.
_SOURCES = """iota rng_uniform bitcast_convert_type reduce_precision nextafter
    random_gamma random_bits rng_bit_generator threefry2x32 random_unwrap random_wrap
    random_seed random_split random_fold_in random_clone empty empty2 real imag"""

# Elementwise arithmetic and saturating functions: one rounding, no magnification.
_ELEMENTWISE = """add sub mul tanh erf atan asinh atan2 cbrt bessel_i0e bessel_i1e"""

# One rounding in bfloat16; in float16 squares overflow above 256 and vanish below
# 2e-4, quotients by small numbers overflow.
_RANGE_BOUND = "square integer_pow div sqrt logistic"

# The result is small and smooth where the input is not: bfloat16 may read it low.
_COMPRESSING = "log log1p log2 rsqrt"

# Data movement and exact selection.
_MOVEMENT = """abs neg sign max min clamp select_n concatenate stack pad reshape squeeze
    expand_dims broadcast_in_dim tile transpose rev slice dynamic_slice
    dynamic_update_slice gather scatter split unstack reduce_max reduce_min cummax
    cummin reduce_window_max reduce_window_min argmax argmin top_k approx_top_k ceil
    floor round is_finite eq ne lt le gt ge eq_to lt_to le_to stop_gradient name
    select_and_gather_add copy copy_p real_if_close"""

# The same for several arrays at once, each on its own.
_EACH = """optimization_barrier sort device_put sharding_constraint layout_constraint
    reshard pmax pmin all_gather all_gather_invariant ppermute all_to_all pbroadcast
    pvary pcast psend precv tie dce_sink reduced_vary_cast vary_unreduced_cast
    all_gather_reduced"""

# No 16-bit kernel, or another array type: the dtypes that they were traced with.
_FIXED = """cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3
    householder_product ormqr eigh eig svd schur hessenberg tridiagonal
    tridiagonal_solve triangular_solve symmetric_product fft complex conj
    and or xor not shift_left shift_right_logical shift_right_arithmetic clz
    population_count mulhi reduce_and reduce_or reduce_xor axis_index axis_size
    create_token after_all platform_index dimension_size dim_as_value
    shape_assertion random_shuffle to_edtype from_edtype"""

# A reducer or kernel that was traced in the author's dtypes comes with the equation.
_OPAQUE = """reduce reduce_window select_and_scatter select_and_scatter_add scatter-max
    scatter_max scatter-min scatter_min pure_callback io_callback debug_callback
    debug_print buffer_callback check pallas_call ffi_call custom_partitioning
    call_exported call_hi_primitive custom_lin composite tpu_custom_call
    new_ref mutable_array freeze free_ref empty_ref get swap addupdate
    accum_grad_in_ref run_state run_scoped core_map mpmd_map noinline nonbatchable
    nontraceable unvmap_any unvmap_all unvmap_max select_if_vmap nondifferentiable
    nondifferentiable_backward custom_filter_vjp announce_transform maybe_set
    xla_metadata_call compute_on stage trace_value"""


def _table() -> dict[str, Rule]:
    by_range = ByRange(narrow=_LOCAL, wide=follow_inputs)
    rows: list[tuple[str, Rule]] = [
        (_COMPUTE, use_compute_precision),
        (_EXPONENTIAL, _FULL),
        (_ACCUMULATING, _FULL),
        (_ILL_CONDITIONED, _FULL),
        (_SOURCES, _FULL),
        (_ELEMENTWISE, follow_inputs),
        (_RANGE_BOUND, by_range),
        (_COMPRESSING, ByRange(narrow=_FULL, wide=_LOCAL)),
        (_SUMMING_FEW, ByRange(narrow=_LOCAL, wide=keep_each_input)),
        ("add_any erfc reduce_window_sum", _LOCAL),
        # Its solver iterates to a tolerance that 16 bits may never reach.
        ("custom_linear_solve", _FULL),
        (_MOVEMENT, keep_inputs),
        (_EACH, keep_each_input),
        ("convert_element_type", ConvertAsWritten()),
        (_FIXED, _FULL),
        (_OPAQUE, _FULL),
    ]
    table: dict[str, Rule] = {}
    for names, rule in rows:
        for name in names.split():
            assert name not in table, f"{name} is classified twice"
            table[name] = rule
    return table


CLASSES: dict[str, Rule] = _table()

FIXED: frozenset[str] = frozenset(f"{_FIXED} {_OPAQUE} {_SOURCES}".split()) | {
    # Their reducers are traced in the author's dtypes as well.
    "scatter-add", "scatter_add", "scatter-sub", "scatter_sub", "scatter-mul",
    "scatter_mul",
}  # fmt: skip
"""Primitives that no rule can lower: they have no other kernel or carry code."""
