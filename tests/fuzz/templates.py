"""Code to be filled in: `{0}` and `{1}` stand for what is read.

Each row holds several templates, with `|` between them. What comes out has the shape
and the type of `{0}`, unless a table says otherwise."""

LITERALS = """0.5 2.0 3.0 1.0 0.0 -1.0 1e-3 1e-6 0.999 7.0 1.5 100.0 2 3
    jnp.float32(0.25) np.float32(1.25) jnp.ones((1,)) jnp.asarray(0.75)""".split()
LARGE = ["1e5", "-1e9", "123456.78", "1e-8", "jnp.finfo(jnp.float32).min"]

# On floats of any size, to floats of the same shape.
_UNARY = """
    jnp.tanh({0})|jnp.tanh({0})|jnp.sin({0})|jnp.cos({0})|jnp.exp(-jnp.abs({0}))
    jnp.exp(jnp.minimum({0}, 3.0))|jax.nn.sigmoid({0})|jax.nn.relu({0})|jax.nn.gelu({0})
    jax.nn.silu({0})|jax.nn.softplus({0})|jax.nn.leaky_relu({0})|lax.erf({0})
    lax.erfc({0})|jnp.sqrt(jnp.abs({0}) + 0.1)|lax.rsqrt({0} * {0} + 1e-6)|{0} * {0}
    jnp.square({0})|{0} ** 3|lax.integer_pow({0}, 2)|-{0}|jnp.abs({0})|jnp.sign({0})
    jnp.floor({0})|jnp.ceil({0})|jnp.round({0})|jnp.log(jnp.abs({0}) + 0.1)
    jnp.log1p(jnp.abs({0}))|jnp.log2({0} * {0} + 1.0)|jnp.expm1(jnp.minimum({0}, 2.0))
    jnp.exp2(jnp.minimum({0}, 2.0))|lax.cbrt({0})|jnp.arcsin(jnp.clip({0}, -0.9, 0.9))
    jnp.arccos(jnp.clip({0}, -0.9, 0.9))|jnp.arctan({0})|jnp.arcsinh({0})
    jnp.arccosh(1.5 + jnp.abs({0}))|jnp.arctanh(jnp.clip({0}, -0.9, 0.9))
    jnp.sinh(jnp.clip({0}, -2, 2))|jnp.cosh(jnp.clip({0}, -2, 2))|jnp.tan(jnp.tanh({0}))
    lax.lgamma(jnp.abs({0}) + 0.5)|lax.digamma(jnp.abs({0}) + 0.5)
    lax.erf_inv(jnp.clip({0}, -0.9, 0.9))|lax.bessel_i0e({0})|lax.bessel_i1e({0})
    lax.reduce_precision({0}, 8, 12)|lax.stop_gradient({0})|lax.round({0})
    checkpoint_name({0}, "saved")|lax.optimization_barrier({0})|jnp.copy({0})
    jnp.nan_to_num({0})|{0}.astype(jnp.bfloat16).astype(jnp.float32)
    {0}.astype(jnp.float16).astype(jnp.float32)|jax.nn.softmax({0}, -1)
    jax.nn.log_softmax({0}, -1)|jax.nn.standardize({0}, -1)|jnp.cumsum({0}, -1)
    lax.cumlogsumexp({0}, {0}.ndim - 1)|lax.cummax({0}, {0}.ndim - 1)
    lax.cummin({0}, {0}.ndim - 1, reverse=True)|lax.cumprod({0}, {0}.ndim - 1)
    lax.rev({0}, ({0}.ndim - 1,))|jnp.roll({0}, 1, -1)|jnp.sort({0}, -1)
    jnp.flip({0}, 0)|{0} - {0}.mean(-1, keepdims=True)|{0} - {0}.max(-1, keepdims=True)
    {0} / ({0}.sum() ** 2 + 1.0)|{0} / (jnp.linalg.norm({0}) + 1e-3)
    {0} / jnp.sqrt(jnp.vdot({0}, {0}) + 1e-6)|{0} * lax.rsqrt(jnp.var({0}) + 1e-5)
    jax.nn.one_hot(jnp.argmax({0}, -1), {0}.shape[-1])|{0} + lax.stop_gradient({0})
    jnp.real({0} * 1j + {0})|lax.real(lax.fft(lax.complex({0}, {0}), "FFT", {0}.shape[-1:]))
    lax.bitcast_convert_type(lax.bitcast_convert_type({0}, jnp.int32), jnp.float32)
    jnp.where({0} > 0, {0}, 0.0)|jnp.clip({0}, -1.0, 1.0)|lax.clamp(-1.0, {0}, 1.0)
    jnp.maximum({0}, 0.0)|jnp.minimum({0}, 0.5)|jnp.zeros_like({0})|jnp.ones_like({0})
    jnp.full_like({0}, 0.5)|jnp.sinc({0})|jnp.hypot({0}, 1.0)|jnp.logaddexp({0}, 0.0)
    jnp.log(jnp.cosh(jnp.clip({0}, -5, 5)))|{0} % 1.0|jnp.diff({0}, prepend=0.0)
    lax.square({0})|jnp.exp({0} - jax.nn.logsumexp({0}, -1, keepdims=True))
    jnp.trunc({0})|jnp.deg2rad({0})|jax.nn.hard_swish({0})|jax.nn.elu({0})
    jax.nn.relu6({0})|jax.nn.log_sigmoid({0})|lax.logistic({0})|jax.nn.glu(jnp.concatenate([{0}, {0}], -1))
    jnp.linalg.qr({0} @ {0}.T + 3 * jnp.eye({0}.shape[0]))[1].sum() * {0}
    jnp.vectorize(jnp.sin)({0})|lax.nextafter({0}, jnp.ones_like({0}))
    lax.top_k({0}, {0}.shape[-1])[0]|jnp.sort_complex({0} + 0j).real.reshape({0}.shape)
    """  # fmt: skip

# Unary code that wants at least one, or two, axes.
NEEDS_AXIS = (
    "-1", "ndim - 1", ".shape[", "argmax", "diff", "concatenate", "flip", "FFT", "sort",
)  # fmt: skip

_BINARY = """
    {0} + {1}|{0} + {1}|{0} - {1}|{0} * {1}|{0} * {1}|{0} / (jnp.abs({1}) + 0.5)
    jnp.maximum({0}, {1})|jnp.minimum({0}, {1})|jnp.arctan2({0}, {1} + 2.0)
    jnp.power(jnp.abs({0}) + 0.1, jnp.tanh({1}))|lax.rem({0}, jnp.abs({1}) + 0.5)
    jnp.where({0} > {1}, {0}, {1})|jnp.where({1} > 0, {0}, {1})|jnp.where({0} < 0, {1}, 7.0)
    lax.select({0} >= {1}, {0}, {1})|{0} + 1e-3 * jnp.tanh({1})|{0} * jax.nn.sigmoid(5 + {1})
    jax.nn.sigmoid({0}) * {1} + (1 - jax.nn.sigmoid({0})) * {0}|jnp.hypot({0}, {1})
    jnp.logaddexp({0}, {1})|lax.optimization_barrier(({0}, {1}))[0]|jnp.float_power(2.0, jnp.tanh({0})).astype(jnp.float32) * {1}
    jnp.copysign({0}, {1})|jax.scipy.special.xlogy(jnp.abs({0}), jnp.abs({1}) + 0.1)
    {0} + jnp.asarray(0.5) * {1}|lax.add({0}, {1})|lax.mul({0}, lax.neg({1}))
    """  # fmt: skip

# Float matrices (3, 3) only.
_SQUARE = """
    {0} @ {1}|{0} @ {1}|{0} @ {1}|{0} @ {1}.T|{0}.T @ {1}|jnp.tanh({0} @ {1})
    0.5 * ({0} @ {1}) + {0}|jnp.einsum("ij,kj->ik", {0}, {1})|jnp.einsum("ij,ij->i", {0}, {1})[:, None] * {0}
    jnp.einsum("ij,ij->ij", {0}, {1})|jnp.matmul({0}, {1}, precision="highest")
    lax.dot_general({0}, {1}, (((1,), (0,)), ((), ())))|lax.dot_general({0}, {1}, (((0,), (1,)), ((), ())))
    lax.dot_general({0}, {1}, (((1,), (1,)), ((0,), (0,))))[:, None] + {0}
    lax.dot_general({0}, {1}, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    {0} @ {0}|{0} @ {0}.T|({0} @ {1}) @ {1}|jax.nn.softmax({0} @ {1}.T) @ {1}
    {0}.at[:1].set({1}[:1] @ {0})|{0}.at[1].set(({0} @ {1})[0])|{0}.at[jnp.array([0, 2])].add({1}[:2])
    lax.dynamic_update_slice({0}, {1}[:1] @ {0}, (1, 0))|jnp.concatenate([({0} @ {1})[:1], {0}[1:]])
    jnp.stack([{0}[0], ({0} @ {1})[1], {1}[2]])|jnp.where(jnp.eye(3) > 0, {0} @ {1}, {0})
    jnp.linalg.solve({0} + 9 * jnp.eye(3), {1})|lax.linalg.triangular_solve({0} + 9 * jnp.eye(3), {1}, left_side=True, lower=True)
    jnp.linalg.cholesky({0} @ {0}.T + 3 * jnp.eye(3))|jnp.linalg.inv({0} + 9 * jnp.eye(3))
    {0} + jnp.linalg.det({1})|jnp.kron({0}, {1})[:3, :3]|jnp.cov({0})|jnp.outer({0}[0], {1}[1])
    jnp.einsum("i,j->ij", {0}[0], {1}[:, 0])|jnp.linalg.multi_dot([{0}, {1}, {0}])
    jnp.matmul({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16)).astype(jnp.float32)
    jnp.matmul({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    lax.conv_general_dilated({0}[None, None], {1}[None, None], (1, 1), "SAME")[0, 0]
    lax.conv_general_dilated({0}[None], {1}[:, :, None], (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))[0] * {0}
    lax.conv_general_dilated({0}[None, :, None, :], {1}[:, None, None, :], (1, 1), "SAME", rhs_dilation=(2, 1), dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=3)[0, :, 0, :]
    lax.ragged_dot({0}, jnp.stack([{1}, {0}]), jnp.array([1, 2], jnp.int32))
    jnp.triu({0}) + jnp.tril({1}, -1)|lax.reduce_window({0}, 0.0, lax.add, (2, 2), (1, 1), "SAME") * {1}
    lax.reduce_window({0}, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME") + {1}
    jnp.take_along_axis({0}, jnp.argsort({1}, axis=-1), -1)|{0}[jnp.argmax({1}, -1)]|{0}[:, jnp.array([2, 0, 1])] * {1}
    lax.associative_scan(jnp.add, {0}) * {1}|lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jax.nn.sigmoid(7 + {0}), {1}))[1]
    jax.nn.dot_product_attention({0}[:, None], {1}[:, None], {0}[:, None])[:, 0]
    jnp.einsum("ij,jk,kl->il", {0}, {1}, {0})|jnp.tensordot({0}, {1}, 1)|jnp.inner({0}, {1})
    jax.vmap(jnp.dot)({0}, {1})[:, None] * {0}|jax.vmap(lambda r: r @ {1})({0})|jax.vmap(jnp.outer)({0}, {1})[:, 0]
    jax.grad(lambda w: jnp.sum(jnp.tanh({1} @ w)))({0})|jax.jvp(lambda w: {1} @ w, ({0},), ({1},))[1]
    jax.lax.reduce({0}, jnp.float32(0), lambda x, y: x + y, (1,))[:, None] * {1}
    lax.scatter_min({0}, jnp.array([[1]]), {1}[:1], lax.ScatterDimensionNumbers((1,), (0,), (0,)))
    {0}.at[0].max({1}[1])|{0}.at[:, 0].mul({1}[0])|jnp.histogram({0}, 3)[0].astype(jnp.float32) * {1}
    jnp.asarray(lax.batch_matmul(jnp.stack([{0}, {1}]), jnp.stack([{1}, {0}])))[0]
    jax.nn.logsumexp({0} @ {1}, axis=-1, keepdims=True, b=jnp.abs({0}) + 0.1) + {1}
    jnp.einsum("ij,ij->", {0}, {0}) * {1}|{0} / jnp.sqrt(jnp.einsum("ij,ij->", {0}, {0}) + 1e-6)
    lax.cond({0}[0, 0] > 0, lambda a, b: a @ b, lambda a, b: a, {0}, {1})|lax.cond({1}[0, 0] > 0, lambda a, b: b, lambda a, b: jnp.tanh(a) @ b, {0}, {1})
    lax.fori_loop(0, 2, lambda i, y: y + jnp.tanh(lax.dynamic_slice_in_dim(jnp.concatenate([{0}, {1}]), 3 * i, 3) @ {1}), {0})
    lax.scan(lambda y, i: (y + 0.1 * y @ {1}, lax.dynamic_slice_in_dim({0}, i, 2)[1] @ {1}), {0}, jnp.arange(3))[1]
    """  # fmt: skip

_TO_INT = """
    jnp.argmax({0}).astype(jnp.int32)|jnp.sum({0} > 0)|jnp.argmin({0}).astype(jnp.int32)
    ({0}.sum() * 10).astype(jnp.int32)|jnp.count_nonzero({0}).astype(jnp.int32)
    """

_INT = """
    {0} + 1|{0} * 2|{0} % 3|{0} // 2|{0} & 3|{0} ^ 5|{0} << 1|{0} >> 1|jnp.abs({0})|-{0}
    lax.population_count({0})|lax.clz({0})|jnp.minimum({0}, 2)|jnp.clip({0}, 0, 2)|~{0}
    jnp.where({0} > 1, {0}, 7)|lax.rem({0}, jnp.int32(5))|jnp.maximum({0}, jnp.int32(1))
    """

_TO_BOOL = (
    "{0} > 0|{0} <= 0.5|jnp.isfinite({0})|{0} != 0|jnp.isnan({0})|{0} == 0|{0} < 1e5"
)

_REDUCE = """
    jnp.sum({0}{a})|jnp.mean({0}{a})|jnp.max({0}{a})|jnp.min({0}{a})|jnp.var({0}{a})
    jnp.prod({0}{a})|jax.nn.logsumexp({0}{a})|jnp.linalg.norm({0}{a})|jnp.std({0}{a})
    """


def _codes(table: str) -> list[str]:
    return [code.strip() for row in table.strip().splitlines() for code in row.split("|")
            if code.strip()]  # fmt: skip


UNARY, BINARY, SQUARE = _codes(_UNARY), _codes(_BINARY), _codes(_SQUARE)
INT, TO_INT, REDUCE = _codes(_INT), _codes(_TO_INT), _codes(_REDUCE)
BOOL = [
    "~{0}",
    "jnp.logical_xor({0}, True)",
    "{0} & True",
    "jnp.logical_or({0}, False)",
]
TO_BOOL = _codes(_TO_BOOL)
