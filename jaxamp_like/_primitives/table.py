"""The table of JAX's primitives: a row for each, a column for each question.

Whatever the library wants to know of a primitive by its name is a column here, and
every set of primitives follows from the columns. A new primitive is one word in a row
that says what it is; one that is in no row is left in the author's dtypes, with a
warning.

Primitives are told by name and not by object, since JAX exports only some 175 of them.
Where the two compute dtypes differ, range is the reason: float16 ends at 65504 and
loses what is below 6e-8, while bfloat16 has the range of float32."""

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a primitive does with precision; the default policy has a rule for each."""

    CONTRACTION = "multiplies and adds up: fast in low precision, and summed in float32"
    FUNCTION = "computes numbers from numbers"
    CONVERSION = "casts, as the author wrote it"
    MOVEMENT = "moves numbers, whatever their precision"
    EXTREME = "selects one of its operands' numbers by size"
    CHOICE = "makes steps, comparisons and ranks, which rounded operands might change"
    SORT = "puts several arrays at once in an order by size"
    SEVERAL = "takes several arrays at once and makes one result of each"
    SENDING = "sends numbers from device to device, here or in the backward pass"
    SUM_OVER_DEVICES = "adds up few terms, so that its result may be read low"
    SOLVER = "iterates to a tolerance that 16 bits may never reach"
    FIXED = "has no 16-bit version, or carries code or contracts that name its dtypes"


@dataclass(frozen=True)
class Row:
    """What is known of a primitive.

    Args:
        kind: what it does with precision.
        fixed: no rule can lower it.
        linear: its derivative reads none of its float operands.
        keeps_inputs: its derivative is made of its operands, not of its result.
        cheap: it costs no more to run twice than its results cost to keep.
        moves: its results hold numbers of its operands, and no others.
        whole: its results hold all numbers of its operands.
        view: it shows one operand in another way, and does nothing else.
        identity: it hands on its operands as they are.
        fans_out: one number of its operand may come up more than once in results of it,
            so that its transpose is a sum.
        repeats: one number of an operand may come up more than once in one result, if
            only under `jax.vmap`.
        looks_up: it picks from an operand by numbers that may be data.
        broadcasts: it repeats operands along their axes of size 1.
        adds: each result is a sum of numbers of its operands.
        reduces: it makes one number of many.
        saturates: it levels off, so that its derivative vanishes for large operands.
        ranks: it chooses by size; a rounding may change what it chooses.
        steep: it has a pole or jumps, so that an error which is small beside the other
            numbers of an array may be large in its result or derivative.
        asks_sign: if one operand is 0, it asks for the sign of the other.
        places: it says on which devices its operand lies.
        summed_back: it hands the same numbers to several devices, and their cotangents
            are added up over these.
        gathers: it makes an array whole of which each device has a part.
        local: it names an axis of devices, and none of them waits for another."""

    kind: Kind
    fixed: bool = False
    linear: bool = False
    keeps_inputs: bool = False
    cheap: bool = False
    moves: bool = False
    whole: bool = False
    view: bool = False
    identity: bool = False
    fans_out: bool = False
    repeats: bool = False
    looks_up: bool = False
    broadcasts: bool = False
    adds: bool = False
    reduces: bool = False
    saturates: bool = False
    ranks: bool = False
    steep: bool = False
    asks_sign: bool = False
    places: bool = False
    summed_back: bool = False
    gathers: bool = False
    local: bool = False


def _contractions() -> Iterator[tuple[str, Row]]:
    yield "dot_general conv_general_dilated", Row(Kind.CONTRACTION)
    yield "ragged_dot ragged_dot_general", Row(Kind.CONTRACTION, looks_up=True)


def _functions() -> Iterator[tuple[str, Row]]:
    def row(**columns: bool) -> Row:
        return Row(Kind.FUNCTION, **columns)

    # Range: ordinary inputs leave float16 (exp overflows at 11.1), and an absolute
    # error of the input becomes a relative error of the result (5.9 % in bfloat16 at
    # |x| = 20).
    yield "exp exp2 expm1 sinh cosh", row(cheap=True)
    yield "pow", row(cheap=True, keeps_inputs=True, broadcasts=True, steep=True)
    yield "cumlogsumexp", row()
    # Long sums and products: the error grows with the number of terms, and a bfloat16
    # sum stops growing at 256 times its summand.
    yield "reduce_sum", row(cheap=True, linear=True, adds=True, reduces=True)
    yield "reduce_prod", row(cheap=True, reduces=True)
    yield "cumsum cumprod reduce_window_sum", row()
    # Their reducers are traced in the author's dtypes.
    yield "scatter-add scatter_add scatter-sub scatter_sub", row(fixed=True)
    yield "scatter-mul scatter_mul", row(fixed=True)
    # Poles, zeros and phases: the rounding of the input is magnified without bound.
    yield "sin cos", row(cheap=True, keeps_inputs=True)
    yield "tan acos asin acosh atanh erf_inv", row(cheap=True, steep=True)
    yield "one_minus_square polynomial", row(cheap=True)
    yield "rem", row(cheap=True, broadcasts=True, steep=True)
    yield "digamma lgamma polygamma zeta igamma igammac", row(steep=True)
    yield "igamma_grad_a random_gamma_grad", row(steep=True)
    yield "regularized_incomplete_beta", row(steep=True)
    # Elementwise arithmetic and saturating functions: one rounding, no magnification.
    yield "add sub", row(cheap=True, linear=True, adds=True, broadcasts=True)
    yield "add_any", row(cheap=True, adds=True)
    yield "mul", row(cheap=True, keeps_inputs=True, broadcasts=True)
    yield "atan2", row(cheap=True, keeps_inputs=True, broadcasts=True, steep=True)
    yield "tanh logistic", row(cheap=True, saturates=True)
    yield "erf erfc", row(cheap=True, keeps_inputs=True)
    yield "atan asinh bessel_i1e", row(cheap=True)
    yield "bessel_i0e", row(cheap=True, steep=True)  # its derivative jumps at 0
    # One rounding in bfloat16; in float16 squares overflow above 256 and vanish below
    # 2e-4, and quotients by small numbers overflow.
    yield "square", row(cheap=True, keeps_inputs=True)
    yield "integer_pow", row(cheap=True, keeps_inputs=True, steep=True)
    yield "div", row(cheap=True, keeps_inputs=True, broadcasts=True, steep=True)
    yield "sqrt cbrt", row(cheap=True, steep=True)
    # The result is small and smooth where the input is not.
    yield "log log1p", row(cheap=True, keeps_inputs=True, steep=True)
    yield "log2 rsqrt", row(cheap=True, steep=True)
    # Exact, in a dtype that is their author's choice.
    yield "iota conj and or xor not", row(cheap=True, fixed=True)


def _movement() -> Iterator[tuple[str, Row]]:
    def row(**columns: bool) -> Row:
        return Row(Kind.MOVEMENT, **columns)

    def mover(**columns: bool) -> Row:
        return row(cheap=True, linear=True, moves=True, **columns)

    yield (  # to an integer, a float is cut off
        "convert_element_type",
        Row(Kind.CONVERSION, cheap=True, linear=True, view=True, steep=True),
    )
    yield "reshape squeeze expand_dims transpose rev", mover(view=True, whole=True)
    yield "split unstack", mover(view=True)
    yield "slice", mover(view=True, fans_out=True)
    repeating = {"fans_out": True, "repeats": True}
    yield "dynamic_slice", mover(view=True, **repeating)
    yield "broadcast_in_dim tile", mover(view=True, whole=True, **repeating)
    yield "gather", mover(looks_up=True, **repeating)
    yield "concatenate stack", mover(repeats=True)
    yield "select_n pad dynamic_update_slice", mover()
    yield "stop_gradient", mover(whole=True)
    yield "copy", mover(view=True, whole=True, identity=True)
    yield "copy_p", row(cheap=True, moves=True, whole=True, identity=True)
    yield "name", row(linear=True, moves=True, whole=True, identity=True)
    yield "neg", row(cheap=True, linear=True)
    yield "abs real_if_close zeros_like xla_metadata_value", row(cheap=True)
    yield "scatter select_and_gather_add ragged_all_to_all pbroadcast_dynamic", row()


def _selection() -> Iterator[tuple[str, Row]]:
    def extreme(**columns: bool) -> Row:
        return Row(Kind.EXTREME, steep=True, **columns)

    yield "max min", extreme(cheap=True, broadcasts=True, asks_sign=True)
    yield "reduce_max reduce_min", extreme(cheap=True, reduces=True)
    yield "clamp", extreme(cheap=True)
    yield "cummax cummin", extreme()
    yield (  # where windows overlap
        "reduce_window_max reduce_window_min",
        extreme(fans_out=True, repeats=True),
    )
    yield "sign ceil floor round", Row(Kind.CHOICE, cheap=True, steep=True)
    yield "is_finite", Row(Kind.CHOICE, cheap=True)
    yield "lt le gt ge", Row(Kind.CHOICE, cheap=True, asks_sign=True, steep=True)
    yield "eq ne", Row(Kind.CHOICE, cheap=True, steep=True)
    yield "eq_to lt_to le_to", Row(Kind.CHOICE, cheap=True)
    yield "argmax argmin", Row(Kind.CHOICE, cheap=True, ranks=True, steep=True)
    yield "top_k approx_top_k", Row(Kind.CHOICE, ranks=True, steep=True)
    yield "sort", Row(Kind.SORT, ranks=True, steep=True)


def _devices() -> Iterator[tuple[str, Row]]:
    def several(**columns: bool) -> Row:
        return Row(Kind.SEVERAL, **columns)

    def sending(**columns: bool) -> Row:
        return Row(Kind.SENDING, linear=True, moves=True, **columns)

    yield "optimization_barrier", several(moves=True, whole=True, identity=True)
    yield "device_put", several(moves=True, whole=True)
    yield "layout_constraint", several(moves=True)
    yield "pcast", several(moves=True, whole=True, local=True)
    yield "pmax pmin pbroadcast psend precv tie dce_sink dce_sential", several()
    yield "reduced_vary_cast reduced_vary_cast_p preduced mesh_cast", several()
    yield "vary_unreduced_cast vary_unreduced_cast_p shard_alike", several()
    yield "unreduced_pmax unreduced_pmin all_gather_reduced", several()
    yield "sharding_constraint", sending(whole=True, places=True)
    yield "reshard", sending(places=True)
    yield "all_gather", sending(summed_back=True, gathers=True)
    yield "all_gather_invariant", sending(gathers=True)
    yield "ppermute all_to_all", sending()
    yield (  # nothing is sent; the sum of the cotangents is made once, there or here
        "pvary",
        sending(cheap=True, whole=True, identity=True, summed_back=True, local=True),
    )
    yield "psum psum_invariant", Row(Kind.SUM_OVER_DEVICES, adds=True)
    yield "psum2 reduce_scatter", Row(Kind.SUM_OVER_DEVICES)
    yield "unreduced_psum unreduced_reduce_scatter", Row(Kind.SUM_OVER_DEVICES)


# Discontinuous or exact by contract: the integer that a float stands for, its bits, its
# place in a sequence of random numbers.
_SOURCES = """iota_2x32_shape rng_uniform bitcast_convert_type reduce_precision
    nextafter random_gamma random_bits rng_bit_generator threefry2x32 threefry4x32
    philox2x32 philox4x32 random_unwrap random_wrap random_seed random_split
    random_fold_in random_clone empty empty2 real imag"""

# These have no 16-bit kernel, or another array type: they run in the traced dtypes.
_NO_KERNEL = """cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3
    householder_product ormqr eigh eigh_jacobi eig svd schur hessenberg tridiagonal
    tridiagonal_solve triangular_solve symmetric_product fft complex
    shift_left shift_right_logical shift_right_arithmetic clz
    population_count mulhi reduce_and reduce_or reduce_xor axis_size
    create_token after_all platform_index dimension_size dim_as_value
    shape_assertion random_shuffle to_edtype from_edtype"""

# Kernels of vendors. Their author chose the dtypes by hand (attention in cuDNN takes 16
# bits, a scaled contraction 8 with scales), and the recurrent ones take no 16 bits.
_KERNELS = """dot_product_attention_fwd dot_product_attention_fwd_wrapper
    dot_product_attention_bwd dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper bias_fwd
    bias_bwd scaled_dot scaled_matmul scaled_matmul_wrapper rnn_fwd rnn_bwd"""

# Sparse formats. Products and conversions add up what falls on one place, in no fixed
# order, and so do their derivatives: in 16 bits a sum would stop growing, as in
# scatter-add. Not every backend has a kernel for 16 bits.
_SPARSE = """todense spsolve bcoo_dot_general bcoo_dot_general_sampled bcoo_extract
    bcoo_fromdense bcoo_sort_indices bcoo_spdot_general bcoo_sum_duplicates bcoo_todense
    bcoo_transpose bcsr_dot_general bcsr_extract bcsr_fromdense bcsr_todense
    coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense csr_fromdense
    csr_matmat csr_matvec csr_spmm csr_spmv csr_todense"""

# Two halves of one collective: what the first hands to the second has a type of its
# own, which holds the dtype.
_ASYNCHRONOUS = """all_gather_start all_gather_done all_gather_reduced_start
    all_to_all_start all_to_all_done pbroadcast_start pbroadcast_done ppermute_start
    ppermute_done psum_start psum_done psum_invariant_start reduce_scatter_start
    reduce_scatter_done unreduced_psum_start unreduced_reduce_scatter_start"""

# Contracts with something outside of the program, by dtype: memory, layouts, queues,
# other processes and what looks on.
_OUTSIDE = """infeed outfeed inspect_sharding relayout full_to_shard shard_to_full
    host_local_array_to_global_array global_array_to_host_local_array pgather
    create_linear pin unpin broadcast_to with_memory_space_constraint new_box box_get
    box_set new_log log_extend log_read"""

# A reducer or kernel that was traced in the author's dtypes comes with the equation.
_OPAQUE = """reduce reduce_window select_and_scatter select_and_scatter_add scatter-max
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


def _fixed() -> Iterator[tuple[str, Row]]:
    yield "custom_linear_solve", Row(Kind.SOLVER)
    yield "axis_index", Row(Kind.FIXED, fixed=True, local=True)
    groups = (_SOURCES, _NO_KERNEL, _KERNELS, _SPARSE, _ASYNCHRONOUS, _OUTSIDE, _OPAQUE)
    yield from ((names, Row(Kind.FIXED, fixed=True)) for names in groups)


def _table() -> dict[str, Row]:
    table: dict[str, Row] = {}
    parts = _contractions, _functions, _movement, _selection, _devices, _fixed
    for part in parts:
        for names, row in part():
            for name in names.split():
                assert name not in table, f"{name} is in the table twice"
                table[name] = row
    return table


TABLE: dict[str, Row] = _table()
"""What is known of each primitive, by its name."""


def those(asked: Callable[[Row], bool]) -> frozenset[str]:
    """The names of the primitives of which something is true."""
    return frozenset(name for name, row in TABLE.items() if asked(row))
