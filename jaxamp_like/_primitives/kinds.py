"""What is known of JAX's primitives, by name, whatever a policy says of them.

First each group by the reason that it needs something of its own; the table of the
default policy gives a rule to each. By name and not by object, since JAX exports only
some 175 of its primitives. A primitive that is in no group is left in the author's
dtypes. Where the two compute dtypes differ, range is the reason: float16 ends at 65504
and loses what is below 6e-8, bfloat16 has the range of float32.

Then the sets that say what a primitive's derivative keeps, and what it costs to run it
again."""

import math

from .._jax import Eqn
from .contractions import is_contraction

# Contractions: fast in low precision, accumulated in float32 by the hardware.
COMPUTE = "dot_general conv_general_dilated ragged_dot_general ragged_dot"

# Range: ordinary inputs leave float16 (exp overflows at 11.1), and an absolute error of
# the input becomes a relative error of the result (5.9 % in bfloat16 at |x| = 20).
EXPONENTIAL = "exp exp2 expm1 pow sinh cosh cumlogsumexp"

# Long sums and products: the error grows with the number of terms, and a bfloat16 sum
# stops growing at 256 times its summand.
ACCUMULATING = """reduce_sum reduce_prod cumsum cumprod scatter-add scatter_add
    scatter-sub scatter_sub scatter-mul scatter_mul"""

# Sums over devices and of cotangents: few terms, so the result may be read low.
SUMMING_FEW = """psum psum2 psum_invariant reduce_scatter unreduced_psum
    unreduced_reduce_scatter"""

# Poles, zeros and phases: the rounding of the input is magnified without bound.
ILL_CONDITIONED = """acos asin acosh atanh sin cos tan erf_inv digamma lgamma
    polygamma igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta zeta rem one_minus_square polynomial"""

# Discontinuous or exact by contract: the integer that a float stands for, its bits, its
# place in a sequence of random numbers.
SOURCES = """iota_2x32_shape rng_uniform bitcast_convert_type reduce_precision
    nextafter random_gamma random_bits rng_bit_generator threefry2x32 threefry4x32
    philox2x32 philox4x32 random_unwrap random_wrap random_seed random_split
    random_fold_in random_clone empty empty2 real imag"""

# Elementwise arithmetic and saturating functions: one rounding, no magnification.
ELEMENTWISE = """add sub mul tanh erf atan asinh atan2 cbrt bessel_i0e bessel_i1e"""

# One rounding in bfloat16; in float16 squares overflow above 256 and vanish below
# 2e-4, quotients by small numbers overflow.
RANGE_BOUND = "square integer_pow div sqrt"

# The same, but the result itself fits into float16.
SATURATING = "logistic"

# The result is small and smooth where the input is not: bfloat16 may read it low.
COMPRESSING = "log log1p log2 rsqrt"

# Data movement.
MOVEMENT = """abs neg select_n concatenate stack pad reshape squeeze
    expand_dims broadcast_in_dim tile transpose rev slice dynamic_slice
    dynamic_update_slice gather scatter split unstack stop_gradient name
    select_and_gather_add copy copy_p real_if_close zeros_like ragged_all_to_all
    pbroadcast_dynamic xla_metadata_value"""

# Exact selection by size.
EXTREMES = """max min clamp reduce_max reduce_min cummax cummin reduce_window_max
    reduce_window_min"""

# Steps, comparisons and ranks: exact, but of a rounded operand they may be others.
CHOICES = """sign ceil floor round is_finite eq ne lt le gt ge eq_to lt_to le_to argmax
    argmin top_k approx_top_k"""

# The same for several arrays at once, each on its own.
EACH = """optimization_barrier device_put layout_constraint pmax pmin pbroadcast
    pcast psend precv tie dce_sink dce_sential reduced_vary_cast
    reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p preduced
    unreduced_pmax unreduced_pmin all_gather_reduced mesh_cast shard_alike"""

# What hands its operands on.
IDENTITIES = frozenset("copy copy_p name optimization_barrier pvary".split())

# From device to device, there or in the backward pass (what varies over devices from
# here on has a cotangent that is summed over them): half the bytes if rounded before.
SENDING = """sharding_constraint reshard all_gather all_gather_invariant ppermute
    all_to_all pvary"""

# No 16-bit kernel, or another array type: the dtypes that they were traced with.
NO_KERNEL = """cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3
    householder_product ormqr eigh eigh_jacobi eig svd schur hessenberg tridiagonal
    tridiagonal_solve triangular_solve symmetric_product fft complex
    shift_left shift_right_logical shift_right_arithmetic clz
    population_count mulhi reduce_and reduce_or reduce_xor axis_index axis_size
    create_token after_all platform_index dimension_size dim_as_value
    shape_assertion random_shuffle to_edtype from_edtype"""

# Exact, in a dtype that is their author's choice.
EXACT = "iota conj and or xor not"

# Kernels of vendors. Their author chose the dtypes by hand (attention in cuDNN takes 16
# bits, a scaled contraction 8 with scales), and the recurrent ones take no 16 bits.
KERNELS = """dot_product_attention_fwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper bias_fwd
    bias_bwd scaled_dot scaled_matmul scaled_matmul_wrapper rnn_fwd rnn_bwd"""

# Sparse formats. Products and conversions add up what falls on one place, in no fixed
# order, and so do their derivatives: in 16 bits a sum would stop growing, as in
# scatter-add. Not every backend has a kernel for 16 bits.
SPARSE = """todense spsolve bcoo_dot_general bcoo_dot_general_sampled bcoo_extract
    bcoo_fromdense bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense
    bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
    coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense
    csr_matmat csr_matvec csr_spmm csr_spmv csr_todense"""

# Two halves of one collective: what the first hands to the second has a type of its
# own, which holds the dtype.
ASYNCHRONOUS = """all_gather_start all_gather_done all_gather_reduced_start
    all_to_all_start all_to_all_done pbroadcast_start pbroadcast_done ppermute_start
    ppermute_done psum_start psum_done psum_invariant_start reduce_scatter_start
    reduce_scatter_done unreduced_psum_start unreduced_reduce_scatter_start"""

# Contracts with something outside of the program, by dtype: memory, layouts, queues,
# other processes and what looks on.
OUTSIDE = """infeed outfeed inspect_sharding relayout full_to_shard shard_to_full
    host_local_array_to_global_array global_array_to_host_local_array pgather
    create_linear pin unpin broadcast_to with_memory_space_constraint new_box box_get
    box_set new_log log_extend log_read"""

# A reducer or kernel that was traced in the author's dtypes comes with the equation.
OPAQUE = """reduce reduce_window select_and_scatter select_and_scatter_add scatter-max
    scatter_max scatter-min scatter_min pure_callback io_callback debug_callback
    debug_print buffer_callback check pallas_call ffi_call custom_partitioning
    call_exported call_hi_primitive custom_lin composite tpu_custom_call
    new_ref mutable_array freeze free_ref empty_ref get swap addupdate
    accum_grad_in_ref run_state run_scoped core_map mpmd_map noinline nonbatchable
    nontraceable unvmap_any unvmap_all unvmap_max select_if_vmap nondifferentiable
    nondifferentiable_backward custom_filter_vjp announce_transform maybe_set
    xla_metadata_call compute_on stage trace_value call_tf call_hi_primitive_linearized
    cudnn_fusion fused_call fusible custom_dce_call custom_transpose_call
    custom_jvp_call_jaxpr for program_order unreachable announce_jaxpr
    vprim"""

_UNCHANGED = (
    EXACT, NO_KERNEL, KERNELS, SPARSE, ASYNCHRONOUS, OUTSIDE, OPAQUE, SOURCES,
    # Their reducers are traced in the author's dtypes as well.
    "scatter-add scatter_add scatter-sub scatter_sub scatter-mul scatter_mul",
)  # fmt: skip

FIXED: frozenset[str] = frozenset(" ".join(_UNCHANGED).split())
"""Primitives that no rule can lower: they have no other kernel or carry code."""


CONTRACTIONS: frozenset[str] = frozenset(COMPUTE.split())
"""Primitives that multiply and add up; see `contractions` for when they do."""

VIEWS: frozenset[str] = frozenset(
    """reshape squeeze expand_dims broadcast_in_dim tile transpose rev slice
    dynamic_slice split unstack copy convert_element_type""".split()
)
"""Primitives that only show their operand in another way."""

LINEAR: frozenset[str] = VIEWS.union(
    SENDING.split(),
    """add sub neg select_n concatenate stack pad gather dynamic_update_slice reduce_sum
    stop_gradient name""".split(),
)
"""Primitives whose derivative reads none of their float operands."""

RANKING: frozenset[str] = frozenset("argmax argmin top_k approx_top_k sort".split())
"""Primitives that choose by size: a rounding may change what they choose."""

KEEPING_INPUTS: frozenset[str] = frozenset(
    "mul div square integer_pow pow log log1p sin cos tan erf erfc atan2".split()
)
"""Primitives whose derivative is made of their operands, not of their result."""

EACH_ALONE: frozenset[str] = frozenset((*EACH.split(), *SUMMING_FEW.split()))
"""Primitives that may have many operands, and make one result of each."""

_CHEAP = (
    EXPONENTIAL, ILL_CONDITIONED, ELEMENTWISE, RANGE_BOUND, SATURATING,
    COMPRESSING, MOVEMENT, EXTREMES, CHOICES, EXACT,
    "convert_element_type reduce_sum reduce_prod add_any erfc",
    "pvary",  # nothing is sent; the sum of the cotangents is made once, there or here
)  # fmt: skip

CHEAP: frozenset[str] = frozenset(" ".join(_CHEAP).split()) - frozenset(
    """cumlogsumexp cummax cummin scatter top_k approx_top_k reduce_window_max
    reduce_window_min ragged_all_to_all select_and_gather_add lgamma digamma
    polygamma igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta zeta pbroadcast_dynamic name""".split()
)
"""Primitives that cost no more to run twice than their results cost to keep."""


def is_cheap(eqn: Eqn) -> bool:
    """Whether an equation costs no more to run twice than its results cost to keep."""
    if eqn.primitive.name not in CONTRACTIONS:
        return eqn.primitive.name in CHEAP
    return not is_contraction(eqn.params, [atom.aval.shape for atom in eqn.invars])


_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod".split())
_MANY = 16


def is_statistic(eqn: Eqn) -> bool:
    """Whether an equation makes one number of many, as the mean of a row is.

    It takes a pass over an array to make that again, and next to nothing to keep."""
    if eqn.primitive.name not in _REDUCTIONS:
        return False
    sizes = math.prod(eqn.invars[0].aval.shape), math.prod(eqn.outvars[0].aval.shape)
    return sizes[0] >= _MANY * sizes[1]
