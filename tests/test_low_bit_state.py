"""Optimizer states in few bits: the codes, what is stored so, and under transforms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxamp_like import (
    AmpWarning,
    DynamicScalerState,
    guard_step,
    loss_scale_optimizer,
)
from jaxamp_like._storage.codes import encoded, layout_of
from jaxamp_like._tiles import tile_of
from jaxamp_like.storage import (
    LowBitArray,
    LowBitState,
    apply_updates,
    low_bit_state,
    to_full_state,
    to_low_bit_state,
    update_in_float32,
)

pytestmark = [pytest.mark.rest, pytest.mark.sample(5)]

FORMATS = "int8", "int4", "float8", "bfloat16"
enable_x64 = (
    jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
)
BITS = {"int8": 8, "int4": 4, "float8": 8, "bfloat16": 16}


def stored(x: Any, format: str = "int8", block: int = 64, seed: Any = None) -> Any:
    return encoded(x, layout_of(x, format, tile_of(x, block)), seed)


def low_arrays(tree: Any) -> list[LowBitArray]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LowBitArray))
    return [x for x in leaves if isinstance(x, LowBitArray)]


def bytes_of(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("block", [64, 256])  # one block, and several
@pytest.mark.parametrize("number", [-3e38, 1.2e-38, 1e20, 1e38, 3.4e38])
@pytest.mark.parametrize("format", ["int8", "int4", "float8"])
def test_the_largest_and_the_smallest_normal_numbers(format, number, block):
    """XLA divides all numbers by one scale by multiplying with its inverse."""
    x = jnp.full((16, 16), number).at[0, 0].multiply(0.99)
    low = jax.jit(lambda x: stored(x, format, block))(x)
    np.testing.assert_allclose(low.decoded(), x, rtol=0.02 if format == "int8" else 0.1)


# ------------------------------------------------------------------- codes, in NumPy


def levels(format: str, is_signed: bool) -> np.ndarray:
    """All numbers of a format over the scale of a block, as it is defined."""
    if format == "float8":
        bits = np.arange(127, dtype=np.uint8)  # 127 is NaN
        positive = bits.view(jnp.float8_e4m3fn).astype(np.float64) / 448
    else:
        largest = 2 ** BITS[format] // (2 if is_signed else 1) - 1
        power = 2 if format == "int4" and is_signed else 4
        positive = (np.arange(largest + 1) / largest) ** power
    return np.unique(np.concatenate([-positive, positive])) if is_signed else positive


def blocks_of(x: np.ndarray, block: int) -> np.ndarray:
    return x.reshape(-1, block)


numbers = st.floats(-(2.0**100), 2.0**100, width=32).map(
    lambda x: x if abs(x) > 2.0**-100 else 0.0
)


@pytest.mark.parametrize("format", ["int8", "int4", "float8"])
@settings(max_examples=60)
@given(values=st.lists(numbers, min_size=64, max_size=64), absolute=st.booleans())
def test_a_number_becomes_the_nearest_code(format, values, absolute):
    x = np.asarray(values, np.float32)
    x = np.abs(x) if absolute else x
    got = np.asarray(stored(jnp.asarray(x), format, 16).decoded(), np.float64)
    for before, after in zip(blocks_of(x, 16), blocks_of(got, 16), strict=True):
        scale = np.abs(before).max()
        table = levels(format, bool((before < 0).any())) * float(scale)
        distance = np.abs(before[:, None].astype(np.float64) - table).min(axis=1)
        error = np.abs(before - after)
        # Two codes may be equally near up to float32's rounding of their distance.
        slack = 2.0**-20 * np.abs(before) + 1e-37
        kept = (before > 0) & (before < table[table > 0].min()) if scale else False
        if not (before < 0).any():  # what is above zero must stay so
            assert (after[before > 0] > 0).all()
        assert ((error <= distance + slack) | kept).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_signed", [False, True])
def test_rounding_by_chance_keeps_the_mean(format, is_signed, getkey):
    x = jr.normal(getkey(), (256,)) * 10.0 ** jr.uniform(getkey(), (256,), maxval=-2)
    x = x if is_signed else x**2
    layout = layout_of(x, format, tile_of(x, 256))
    draws = 4000
    got = jax.vmap(lambda seed: encoded(x, layout, seed).decoded())(
        jnp.arange(draws, dtype=jnp.uint32) * np.uint32(2654435761)
    )
    mean = np.asarray(got, np.float64).mean(axis=0)
    exact = np.asarray(x, np.float64)
    table = np.zeros(2)
    if format == "bfloat16":
        lower = np.asarray(x).view(np.uint32) & np.uint32(0xFFFF0000)
        lower, upper = (
            (lower + np.uint32(n)).view(np.float32).astype(np.float64)
            for n in (0, 0x10000)
        )
    else:
        table = levels(format, is_signed) * float(np.abs(exact).max())
        upper = table[np.minimum(np.searchsorted(table, exact), len(table) - 1)]
        lower = table[np.maximum(np.searchsorted(table, exact) - 1, 0)]
    # Two neighbours with this mean have this variance. A chance that is rarer than one
    # in a thousand makes a skewed mean: five such draws more are allowed.
    gap = np.abs(upper - lower)
    variance = np.abs(upper - exact) * np.abs(exact - lower)
    slack = 4.5 * np.sqrt(variance / draws) + 5 * gap / draws + 1e-6 * np.abs(exact)
    if not is_signed and format != "bfloat16":
        # What is above zero is never rounded to it, which is above its mean.
        slack += np.where(exact < table[1], table[1], 0)
    assert (np.abs(mean - exact) <= slack).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_numbers_of_the_format_stay_as_they_are(format, rounding, getkey):
    x = jr.normal(getkey(), (8, 512))
    once = stored(x, format, seed=jnp.uint32(1) if rounding == "stochastic" else None)
    again = encoded(once.decoded(), once.layout, jnp.uint32(2))
    assert np.allclose(once.decoded(), again.decoded(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_what_is_not_finite_survives(format, bad):
    x = jnp.ones(256).at[70].set(bad)
    got = stored(x, format, 64).decoded()
    assert not jnp.isfinite(got[70])
    assert jnp.isfinite(got[:64]).all() and jnp.isfinite(got[128:]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_and_huge_numbers_keep_their_size(format):
    x = jnp.array([1e-42, 1e-37, 1.0, 3e38]).repeat(64)
    got = stored(x, format, 64, jnp.uint32(3)).decoded()
    assert np.allclose(got[64:], x[64:], rtol=0.01)
    assert (got[:64] <= 1e-37).all()


@pytest.mark.sample(6)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(1,), (0, 3), (5, 7), (4097, 1), (3, 3, 5, 9)])
def test_any_shape_is_stored(format, shape, getkey):
    x = jr.normal(getkey(), shape)
    got = stored(x, format, 32).decoded()
    assert got.shape == x.shape and got.dtype == x.dtype
    assert np.allclose(got, x, atol=0.3 * float(jnp.abs(x).max(initial=0)))


def test_blocks_lie_along_the_last_axis_and_then_those_before_it():
    assert tile_of(jnp.zeros((64, 512)), 256) == (1, 256)
    assert tile_of(jnp.zeros((3, 3, 64, 16)), 256) == (1, 1, 16, 16)
    assert tile_of(jnp.zeros((5000, 1)), 256) == (256, 1)
    assert tile_of(jnp.zeros((100,)), 256) == (100,)


# ----------------------------------------------------------------- Optax's optimizers

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    name: partial(getattr(optax, name), 1e-3)
    for name in """adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad
    lamb lion nadam nadamw novograd radam rmsprop rprop yogi signum""".split()
} | {
    "sgd with momentum": partial(optax.sgd, 1e-3, momentum=0.9),
    "Nesterov": partial(optax.sgd, 1e-3, momentum=0.9, nesterov=True),
    "lars": partial(optax.lars, 1e-3),
    "rmsprop, momentum": partial(optax.rmsprop, 1e-3, momentum=0.9),
    "ademamix": partial(optax.contrib.ademamix, 1e-3),
    "adopt": partial(optax.contrib.adopt, 1e-3),
    "muon": partial(optax.contrib.muon, 1e-3),
    "sophia": partial(optax.contrib.sophia, 1e-3),
}


def params_of(key: Any) -> dict[str, Any]:
    keys = jr.split(key, 3)
    return {
        "embed": jr.normal(keys[0], (96, 256)),
        "kernel": jr.normal(keys[1], (3, 3, 64, 32)),
        "bias": jr.normal(keys[2], (32,)),
    }


def arguments_of(name: str, params: Any) -> dict[str, Any]:
    """What `update` of some optimizers takes besides."""
    if name != "sophia":
        return {}
    return {"obj_fn": lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p))}


@pytest.mark.sample(12)
@pytest.mark.parametrize("format, share", [("int8", 0.27), ("int4", 0.15)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_optax_takes_a_share_of_the_memory(name, format, share, getkey):
    params = params_of(getkey())
    plain = OPTIMIZERS[name]()
    low = low_bit_state(plain, format)
    full_state, state = plain.init(params), low.init(params)
    assert bytes_of(state) <= share * bytes_of(full_state)
    more = arguments_of(name, params)
    expected = updates = params
    for _ in range(2):
        grads = jax.tree.map(lambda p: jr.normal(getkey(), p.shape), params)
        expected, full_state = plain.update(grads, full_state, params, **more)
        updates, state = low.update(grads, state, params, **more)
    # The first updates are sure in sign: nothing is lost but what few bits leave out.
    for got, want in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        cosine = jnp.vdot(got, want) / jnp.linalg.norm(got) / jnp.linalg.norm(want)
        assert cosine > (0.99 if format == "int8" else 0.9)
    assert jax.tree.structure(to_full_state(state)) == jax.tree.structure(full_state)


@pytest.mark.parametrize("format", FORMATS)
def test_the_update_is_that_of_the_decoded_state(format, getkey):
    params = params_of(getkey())
    plain = optax.adamw(1e-2)
    low = low_bit_state(plain, format)
    state = low.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda p: jr.normal(getkey(), p.shape), params)
        expected, _ = plain.update(grads, to_full_state(state), params)
        updates, state = low.update(grads, state, params)
        for got, want in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
            assert np.array_equal(got, want)


def test_small_leaves_and_copies_of_parameters_stay(getkey):
    params = params_of(getkey())
    tx = low_bit_state(optax.contrib.schedule_free_adamw(1e-3, b1=0.9))
    state = tx.init(params).inner_state
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state.z))
    assert {x.layout.format for x in low_arrays(state)} == {"int8"}
    adam = low_bit_state(optax.adam(1e-3)).init(params).inner_state[0]
    assert adam.nu["bias"].dtype == jnp.float32
    assert isinstance(adam.nu["embed"], LowBitArray)
    assert adam.count.dtype == jnp.int32


def test_moments_that_are_subtracted_from_each_other_stay(getkey):
    tx = optax.chain(optax.scale_by_stddev(), optax.trace(0.9))
    variance, momentum = low_bit_state(tx).init(params_of(getkey())).inner_state
    assert low_arrays(momentum) and not low_arrays(variance)


@pytest.mark.parametrize(
    "tx",
    [
        optax.rmsprop(1e-3, centered=True, bias_correction=True),
        optax.lbfgs(),
        optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
        optax.contrib.cocob(),
        optax.contrib.madgrad(1e-3),
    ],
    ids="centered lbfgs search cocob madgrad".split(),
)
def test_numbers_that_must_be_exact_stay(tx, getkey):
    with pytest.warns(AmpWarning, match="stores nothing in few bits"):
        state = low_bit_state(tx).init(params_of(getkey()))
    assert not low_arrays(state)


def test_scalars_stay_and_what_begins_as_a_product_does_not():
    params = {"w": jnp.ones((64, 64)), "scale": jnp.ones(())}
    state = low_bit_state(optax.adam(1e-3), "int4", min_size=0).init(params)
    assert isinstance(state.inner_state[0].mu["w"], LowBitArray)
    assert state.inner_state[0].mu["scale"].dtype == jnp.float32

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jnp.ones_like(p) * 1e-3, params)

    tx = optax.GradientTransformation(init, optax.identity().update)
    assert len(low_arrays(low_bit_state(tx).init(params))) == 1


def test_without_parameters_there_is_nothing_to_warn_of():
    tx = low_bit_state(optax.adam(1e-3))
    state = tx.init({"w": jnp.ones((64, 64))})
    assert not low_arrays(tx.init({}))
    same = optax.tree_map_params(
        tx, lambda x: x, state
    )  # it calls `init` with no array
    assert jax.tree.structure(same) == jax.tree.structure(state)


def test_settings_and_sums_of_gradients_stay(getkey):
    params = params_of(getkey())
    rates = jnp.full((96, 256), 1e-3)

    def scale_by(rates: Any) -> optax.GradientTransformation:
        return optax.stateless(lambda u, _: jax.tree.map(lambda x: x * rates[0, 0], u))

    settings = optax.inject_hyperparams(scale_by)(rates=rates)
    with pytest.warns(AmpWarning, match="stores nothing in few bits"):
        state = low_bit_state(settings).init(params)
    assert not low_arrays(state)
    sums = low_bit_state(
        optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation()
    )
    state = sums.init(params).inner_state
    assert not low_arrays(state.acc_grads) and low_arrays(state.inner_opt_state)


def test_parameters_may_be_called_like_the_settings_of_optax():
    params = dict.fromkeys(("hyperparams", "grad_acc", "w"), jnp.ones((64, 80)))
    state = low_bit_state(optax.inject_hyperparams(optax.adam)(0.1)).init(params)
    assert len(low_arrays(state)) == 6


def test_where_decides_by_path(getkey):
    params = params_of(getkey())
    tx = low_bit_state(
        optax.adam(1e-3),
        where=lambda path, x: (
            True if "bias" in path else (False if "nu" in path else None)
        ),
    )
    state = tx.init(params).inner_state[0]
    assert isinstance(state.mu["bias"], LowBitArray)
    assert isinstance(state.nu["bias"], LowBitArray)
    assert isinstance(state.mu["embed"], LowBitArray)
    assert not low_arrays(state.nu["embed"])


def test_what_can_not_be_told_is_asked_about(getkey):
    params = {"w": jr.normal(getkey(), (96, 256))}
    rates = jnp.linspace(0, 1, 96 * 256).reshape(96, 256)

    def init(params: Any) -> Any:
        return {"rates": jax.tree.map(lambda _: rates, params)}

    tx = optax.GradientTransformation(init, optax.identity().update)
    with pytest.raises(ValueError, match=r"(?s)state\['rates'\]\['w'\].*where"):
        low_bit_state(tx).init(params)
    low = low_bit_state(tx, where=lambda path, x: "rates" in path).init(params)
    assert len(low_arrays(low)) == 1


# ------------------------------------------------------------------------- transforms


def quadratic(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def small(key: Any) -> dict[str, Any]:
    return {
        "w": jr.normal(key, (64, 128)) / 8,
        "v": jr.normal(jr.fold_in(key, 1), (128, 64)) / 11,
    }


def steps(tx: Any, params: Any, x: Any, number: int = 5) -> Any:
    state = tx.init(params)
    for _ in range(number):
        grads = jax.grad(quadratic)(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("format", FORMATS)
def test_scan_and_vmap_and_jit_give_the_numbers_of_a_loop(format, getkey):
    tx = low_bit_state(optax.adam(1e-2), format, seed=5)
    params, x = small(getkey()), jr.normal(getkey(), (16, 64))
    expected, _ = jax.jit(partial(steps, tx))(params, x)

    @jax.jit
    def scanned(params: Any, x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            params, state = carry
            updates, state = tx.update(jax.grad(quadratic)(params, x), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(body, (params, tx.init(params)), None, 5)[0]

    got, state = scanned(params, x)
    ensemble = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    several, several_states = jax.jit(jax.vmap(partial(steps, tx), (0, None)))(
        ensemble, x
    )
    for name in params:
        # XLA orders sums in its own way in each program, and a moment that then differs
        # in its last bit may be rounded the other way.
        for result in (got[name], several[name][0]):
            is_close = np.isclose(result, expected[name], rtol=1e-3, atol=1e-4)
            assert is_close.mean() > 0.98
    # What `vmap` has stacked is decoded outside of it as well.
    full = to_full_state(several_states)
    assert full[0].mu["w"].shape == (2, 64, 128)
    one = to_full_state(state)[0].mu["w"]
    is_close = np.isclose(full[0].mu["w"][0], one, rtol=1e-2, atol=1e-4)
    assert is_close.mean() > 0.98


def test_steps_are_reproducible_and_seeds_differ(getkey):
    params, x = small(getkey()), jr.normal(getkey(), (16, 64))
    one, same, other = (
        steps(low_bit_state(optax.adam(1e-2), seed=seed), params, x)[0]["w"]
        for seed in (0, 0, 1)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_a_step_that_overflows_leaves_the_state_as_it_is(getkey):
    tx = loss_scale_optimizer(
        low_bit_state(optax.adam(1e-2)), scaler=DynamicScalerState(scaler=2.0**10)
    )
    params, x = small(getkey()), jr.normal(getkey(), (16, 64))

    @jax.jit
    @guard_step
    def step(state: Any, x: Any) -> Any:
        params, opt_state = state
        loss, grads = tx.value_and_grad(quadratic, opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    good, _ = step((params, tx.init(params)), x)
    bad, _ = step(good, x.at[0, 0].set(jnp.inf))
    for before, after in zip(
        jax.tree.leaves((good[0], good[1].inner_state)),
        jax.tree.leaves((bad[0], bad[1].inner_state)),
        strict=True,
    ):
        assert np.array_equal(before, after)
    assert bad[1].scaler.scaler < good[1].scaler.scaler


ONE = {"w": True, "v": False}
OTHERS_STAY = optax.masked(optax.set_to_zero(), {"w": False, "v": True})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda low, tx: optax.chain(optax.masked(low(tx), ONE), OTHERS_STAY),
        lambda low, tx: low(optax.chain(optax.masked(tx, ONE), OTHERS_STAY)),
        lambda low, tx: low(
            optax.partition({"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "v": "b"})
        ),
        lambda low, tx: optax.inject_hyperparams(
            lambda learning_rate: low(optax.adam(learning_rate))
        )(learning_rate=1e-2),
        lambda low, tx: optax.MultiSteps(low(tx), 2),
        lambda low, tx: low(optax.chain(optax.clip_by_global_norm(1.0), tx)),
        lambda low, tx: low(optax.chain(low(tx), optax.trace(0.9)), "int4"),
        lambda low, tx: optax.apply_if_finite(low(tx), 3),
        lambda low, tx: optax.lookahead(low(tx), 3, 0.5),
    ],
    ids="""masked within partition hyperparams multisteps chain nested finite
    ahead""".split(),
)
def test_it_composes_with_wrappers_of_optax(wrap, getkey):
    tx = wrap(low_bit_state, optax.adam(2e-3))
    params, x = small(getkey()), jr.normal(getkey(), (16, 64))
    is_ahead = "lookahead" in wrap.__code__.co_names
    start = optax.LookaheadParams.init_synced(params) if is_ahead else params
    state = tx.init(start)
    assert low_arrays(state)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        fast = params.fast if is_ahead else params
        loss, grads = jax.value_and_grad(quadratic)(fast, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(8):
        start, state, loss = step(start, state)
        losses.append(loss)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("format", FORMATS)
def test_float64_and_strict_promotion(format, getkey):
    with enable_x64(True):
        x = jnp.linspace(0.5, 1, 512, dtype=jnp.float64)
        got = stored(x, format, seed=jnp.uint32(1)).decoded()
        assert got.dtype == jnp.float64 and np.allclose(got, x, rtol=0.3)
    with jax.numpy_dtype_promotion("strict"):
        low = x.astype(jnp.bfloat16)
        got = stored(low, format, seed=jnp.uint32(1)).decoded()
        assert got.dtype == jnp.bfloat16
        for rounding in ("nearest", "stochastic"):
            new = apply_updates(low, jnp.ones(512), rounding=rounding, key=getkey())
            assert new.dtype == jnp.bfloat16


def test_no_derivative_passes_through_the_state(getkey):
    def second_update(tx: Any, params: Any) -> Any:
        _, state = tx.update(params, tx.init(params), params)
        updates, _ = tx.update(params, state, params)
        return updates.sum()

    tx = low_bit_state(optax.sgd(1.0, momentum=0.9))
    x = jr.normal(getkey(), (64, 64))
    # The momentum would add 0.9 of the first gradient.
    assert np.array_equal(jax.grad(partial(second_update, tx))(x), -jnp.ones((64, 64)))

    def new_sum(updates: Any) -> Any:
        new = apply_updates(x.astype(jnp.bfloat16), updates, key=jr.key(0))
        return new.astype(jnp.float32).sum()

    assert np.array_equal(jax.grad(new_sum)(x), jnp.ones((64, 64)))


def test_seeds_of_numpy_wrap_around_in_silence(getkey):
    tx, params = low_bit_state(optax.adam(1e-3)), small(getkey())
    _, expected = tx.update(params, tx.init(params), params)
    state = jax.tree.map(np.asarray, tx.init(params))
    _, got = tx.update(params, state, params)
    assert got.seed == expected.seed
    tx.update(params, jax.tree.map(np.asarray, got), params)


@pytest.mark.parametrize("format", FORMATS)
def test_nnx_optimizers_and_states(format):
    nnx = pytest.importorskip("flax.nnx")
    plain = optax.sgd(0.1, momentum=0.9)
    losses = []
    for tx in (plain, low_bit_state(plain, format, rounding="nearest")):
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any) -> Any:
            loss, grads = nnx.value_and_grad(
                lambda m: jnp.mean((m(jnp.ones((2, 64))) - 1) ** 2)
            )(model)
            optimizer.update(model, grads)
            return loss

        losses.append([step(model, optimizer) for _ in range(3)])
    assert np.allclose(*losses, rtol=0.05)
    # Without `nnx.Optimizer`: trees of variables.
    params = nnx.state(model, nnx.Param)
    state = tx.init(params)
    updates, state = tx.update(params, state, params)
    expected, full = plain.update(params, plain.init(params), params)
    assert jax.tree.structure(to_full_state(state)) == jax.tree.structure(full)
    assert jax.tree.structure(updates) == jax.tree.structure(expected)


# --------------------------------------------------------------------- many devices


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("number", [2, 8])
def test_sharding_changes_no_bit(format, number, getkey):
    tx = low_bit_state(optax.adam(1e-2), format, block=64)
    params, grads = small(getkey()), small(getkey())

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params)

    expected, expected_state = step(grads, tx.init(params), params)
    mesh = jax.make_mesh((number,), ("x",), devices=jax.devices()[:number])
    spec = {"w": P("x", None), "v": P("x", None)}
    placed, placed_grads = (
        jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, spec)
        for tree in (params, grads)
    )
    state = tx.init(placed)
    for x in low_arrays(state):
        parts = [p for p in (x.codes, x.scales) if p is not None]
        assert all(p.sharding.shard_shape(p.shape)[0] < p.shape[0] for p in parts)
    got, state = step(placed_grads, state, placed)
    for want, have in zip(
        jax.tree.leaves((expected, expected_state)),
        jax.tree.leaves((got, state)),
        strict=True,
    ):
        assert np.array_equal(want, have)


def test_a_block_crosses_no_border_of_devices():
    mesh = jax.make_mesh((8,), ("x",), devices=jax.devices()[:8])
    x = jax.device_put(jnp.zeros((64, 768)), NamedSharding(mesh, P(None, "x")))
    assert tile_of(x, 256) == (2, 96)
    x = jax.device_put(jnp.zeros((64, 1376 * 8)), NamedSharding(mesh, P(None, "x")))
    assert tile_of(x, 256) == (1, 172)


@pytest.mark.sample(6)
@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no `set_mesh`")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "shape, spec",
    [((4 * 257,), P("x")), ((4 * 9, 5), P("x", None)), ((64, 4 * 17), P(None, "x"))],
)
def test_explicit_sharding_of_odd_parts(format, shape, spec, getkey):
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=explicit, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        x = jax.device_put(jr.normal(getkey(), shape), NamedSharding(mesh, spec))
        got = stored(x, format, 256).decoded()
    assert got.sharding.shard_shape(shape) == x.sharding.shard_shape(shape)
    assert np.allclose(got, x, atol=0.3 * float(jnp.abs(x).max()))


def test_each_device_of_shard_map_has_a_state():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])
    tx = low_bit_state(optax.adam(1e-3), "int4")

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    def update(params: Any) -> Any:
        return tx.update(params, tx.init(params), params)[0]

    assert np.allclose(update(jnp.ones((64, 512))), -1e-3)


# ----------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("format", FORMATS)
def test_states_go_to_full_ones_and_back(format, getkey):
    plain, params = optax.adamw(1e-2), small(getkey())
    low = low_bit_state(plain, format, rounding="nearest")
    x = jr.normal(getkey(), (16, 64))
    _, state = steps(low, params, x)
    full = to_full_state(state)
    assert jax.tree.structure(full) == jax.tree.structure(plain.init(params))
    back = to_low_bit_state(full, like=low.init(params))
    for a, b in zip(
        jax.tree.leaves(to_full_state(back)), jax.tree.leaves(full), strict=True
    ):
        assert np.allclose(a, b, rtol=1e-6)


def test_orbax_saves_and_restores(tmp_path, getkey):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx, params = low_bit_state(optax.adamw(1e-2), "int4"), small(getkey())
    _, state = steps(tx, params, jr.normal(getkey(), (16, 64)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", tx.init(params))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


# -------------------------------------------------------------- parameters, 16 bits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_updates_move_parameters_in_the_mean(dtype, getkey):
    n = 20_000
    params = jnp.full(n, 1.0, dtype)
    update = jnp.full(n, 1e-5)
    new = apply_updates(params, update, key=getkey()).astype(jnp.float32)
    step = float(jnp.finfo(dtype).eps)
    chance = 1e-5 / step
    deviation = step * (chance * (1 - chance) / n) ** 0.5
    assert abs(float((new - 1).mean()) - 1e-5) < 4.5 * deviation
    assert set(np.unique(new)) <= {1.0, 1.0 + step}
    assert (apply_updates(params, update, rounding="nearest") == params).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact_sums_stay_and_others_are_neighbours(dtype, getkey):
    x = jr.normal(getkey(), (5000,)) * 10.0 ** jr.uniform(
        getkey(), (5000,), minval=-7, maxval=4
    )
    low = x.astype(dtype)
    assert np.array_equal(apply_updates(low, 0 * x, key=getkey()), low)
    total = low.astype(jnp.float32) + x
    total = jnp.clip(total, -6e4, 6e4)
    got = apply_updates(low, total - low.astype(jnp.float32), key=getkey())
    nearest = total.astype(dtype).astype(jnp.float32)
    step = jnp.abs(total) * 2.0 * float(jnp.finfo(dtype).eps) + 2.0**-24
    assert (jnp.abs(got.astype(jnp.float32) - nearest) <= step).all()


def test_what_is_not_finite_stays_so(getkey):
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0], jnp.bfloat16)
    got = apply_updates(x, jnp.zeros(4), key=getkey())
    assert np.array_equal(got, x, equal_nan=True)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_above_the_largest_number_becomes_that_number(sign, getkey):
    largest = jnp.finfo(jnp.bfloat16).max
    x = jnp.full(4, sign * largest)
    updates = sign * jnp.array([3e36, 3e38, 1.0, jnp.inf], jnp.float32)
    got = apply_updates(x, updates, key=getkey())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, sign * jnp.array([largest] * 3 + [jnp.inf]))


def test_other_leaves_are_as_with_optax(getkey):
    params = {
        "w": jnp.ones(3),
        "n": jnp.arange(3),
        "none": None,
        "b": jnp.ones(2, "bfloat16"),
    }
    updates = {"w": jnp.ones(3), "n": jnp.ones(3, int), "none": None, "b": None}
    got = apply_updates(params, updates, key=getkey())
    assert np.array_equal(got["w"], 2 * jnp.ones(3))
    assert np.array_equal(got["n"], [1, 2, 3]) and got["none"] is None
    assert np.array_equal(got["b"], params["b"])


@pytest.mark.parametrize("number", [2, 8])
def test_rounded_parameters_are_the_same_on_any_sharding(number, getkey):
    key = getkey()
    params = jr.normal(getkey(), (64, 32)).astype("bfloat16")
    updates = 1e-3 * jr.normal(getkey(), (64, 32))
    step = jax.jit(lambda p, u: apply_updates(p, u, key=key))
    expected = step(params, updates)
    mesh = jax.make_mesh((number,), ("x",), devices=jax.devices()[:number])
    placed = (jax.device_put(x, NamedSharding(mesh, P("x"))) for x in (params, updates))
    assert np.array_equal(step(*placed), expected)


def test_an_optimizer_of_bfloat16_parameters_computes_in_float32(getkey):
    params = jax.tree.map(lambda p: p.astype("bfloat16"), small(getkey()))
    tx = low_bit_state(update_in_float32(optax.adam(1e-2)))
    # No warning of updates that are rounded away comes up.
    state = loss_scale_optimizer(tx).init(params).inner_state
    assert all(x.layout.dtype == jnp.float32 for x in low_arrays(state))
    grads = jax.grad(quadratic)(params, jnp.ones((4, 64), "bfloat16"))
    updates, state = tx.update(grads, state, params)
    assert {x.dtype.name for x in jax.tree.leaves(updates)} == {"float32"}
    new = apply_updates(params, updates, key=getkey())
    assert {x.dtype.name for x in jax.tree.leaves(new)} == {"bfloat16"}


# ------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"format": "float_8"}, "`format` must be one of .*Did you mean 'float8'"),
        ({"block": 0}, "`block` must be an integer of at least 16"),
        ({"block": 1.5}, "`block` must be an integer"),
        ({"min_size": -1}, "`min_size` must be"),
        ({"rounding": "up"}, "`rounding` must be"),
        ({"seed": "a"}, "`seed` must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        low_bit_state(optax.adam(1e-3), **arguments)


def test_other_mistakes_say_what_to_do(getkey):
    params = small(getkey())
    grads = params
    with pytest.raises(TypeError, match="must be an Optax optimizer"):
        low_bit_state(optax.adam)  # pyright: ignore
    with pytest.raises(TypeError, match="can't be called so"):
        low_bit_state(optax.adam(1e-3), blocks=3)  # pyright: ignore
    tx = low_bit_state(optax.adam(1e-3))
    with pytest.raises(TypeError, match="to_low_bit_state"):
        tx.update(grads, optax.adam(1e-3).init(params), params)
    with pytest.raises(ValueError, match=r"stored as 'int8'.*'int4'"):
        low_bit_state(optax.adam(1e-3), "int4").update(grads, tx.init(params), params)
    with pytest.raises(ValueError, match=r"blocks of 256.*blocks of 64"):
        low_bit_state(optax.adam(1e-3), block=64).update(grads, tx.init(params), params)
    with pytest.raises(ValueError, match="made with `rounding='stochastic'`"):
        low_bit_state(optax.adam(1e-3), rounding="nearest").update(
            grads, tx.init(params), params
        )
    with pytest.raises(TypeError, match="`where`"):
        low_bit_state(
            optax.adam(1e-3),
            where=lambda path, x: "mu",  # pyright: ignore
        ).init(params)
    with pytest.raises(TypeError, match="`key` must be a single PRNG key"):
        apply_updates(params, grads)
    with pytest.raises(TypeError, match="`key` must be a single PRNG key"):
        apply_updates(params, grads, key=jr.split(getkey()))
    with pytest.raises(ValueError, match=r"updates\['v'\]"):
        apply_updates(params, grads | {"v": jnp.ones(3)}, key=getkey())
    other = optax.adam(1e-3).init({"w": jnp.ones((64, 64)), "v": params["v"]})
    with pytest.raises(ValueError, match="shape"):
        to_low_bit_state(other, like=tx.init(params))
    with pytest.raises(ValueError, match="another tree"):
        to_low_bit_state(optax.sgd(0.1).init(params), like=tx.init(params))


def test_state_is_a_pytree_of_arrays(getkey):
    tx = low_bit_state(optax.adam(1e-3))
    state = jax.jit(tx.init)(small(getkey()))
    assert isinstance(state, LowBitState)
    shapes = jax.eval_shape(tx.init, small(getkey()))
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


def test_compiling_init_computes_no_codes(getkey):
    """XLA would fold the maxima of an array of zeros for minutes, number by number."""
    tx = low_bit_state(optax.adam(1e-3))
    program = str(jax.make_jaxpr(tx.init)(small(getkey())))
    assert program.count("optimization_barrier") == 4  # two moments of two parameters
