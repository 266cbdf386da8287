"""Delayed scaling in a `shard_map`: one history for all devices, checked or not."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxamp_like import AmpError, Policy, amp_with_state, init_amp_state
from jaxamp_like._jax import varying_over
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8
from tests.programs import values

pytestmark = pytest.mark.rest

WS, X = values(2, 8, 8) / 2, values(8, 8, seed=1)
SPLIT = P("d")


def layer(x, w):
    with jax.named_scope("layer"):
        return x + jnp.tanh(x @ w), None


def scanned(ws, x):
    return jnp.mean(lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2)


def unrolled(ws, x):
    for w in ws:
        x, _ = layer(x, w)
    return jnp.mean(x**2)


def checkpointed(ws, x):
    return unrolled(ws, jax.checkpoint(layer)(x, ws[0])[0])


def regular(ws, x):
    """A weight that is read beside data, and beside itself."""
    return unrolled(ws, x) + jnp.mean((ws[0].T @ ws[0]) ** 2)


def regular_first(ws, x):
    return jnp.mean((ws[0].T @ ws[0]) ** 2) + unrolled(ws, x)


def columns(ws, x):
    """The first layer has its columns on several devices, the second its rows."""
    return jnp.mean(jnp.tanh(x @ ws[0]) @ ws[1].T)


def columns_of(ws, x):
    return jnp.mean(lax.psum(jnp.tanh(x @ ws[0]) @ ws[1].T, "m"))


def gathered(ws, x):
    return scanned(lax.all_gather(ws, "d", axis=1, tiled=True), x)


def told_to_vary(ws, x):
    return unrolled(varying_over(ws, ["d"]), x)


class Case(NamedTuple):
    """A loss of one device, and of a device that has its part of the arguments."""

    alone: Callable[..., Any]
    local: Callable[..., Any] | None = None
    weights: P = P()
    batch: P = SPLIT
    mesh: tuple[str, ...] = ("d",)


CASES = {
    "unrolled": Case(unrolled),
    "scan": Case(scanned),
    "checkpoint": Case(checkpointed),
    "told to vary": Case(unrolled, told_to_vary),
    "gathered": Case(scanned, gathered, P(None, "d")),
    "columns": Case(columns, columns_of, P(None, None, "m"), SPLIT, ("d", "m")),
    "beside itself": Case(regular),
    "beside itself first": Case(regular_first),
}


def make_mesh(*axes):
    return jax.make_mesh(
        (2,) * len(axes), axes, axis_types=(AxisType.Auto,) * len(axes)
    )


def outside(case, check_vma):
    """Data parallel: the gradient of a loss that `shard_map` makes."""
    fn = case.local or case.alone
    return jax.value_and_grad(
        jax.shard_map(
            lambda ws, x: lax.pmean(fn(ws, x), "d"),
            mesh=make_mesh(*case.mesh),
            in_specs=(case.weights, case.batch),
            out_specs=P(),
            check_vma=check_vma,
        )
    )


def inside(case, check_vma):
    """Each device makes a gradient by its part of the batch, and means are taken."""
    fn = case.local or case.alone
    is_split = case.weights != P()

    def step(ws, x):
        ws = ws if is_split else varying_over(ws, ["d"])
        value, grads = jax.value_and_grad(fn)(ws, x)
        grads = grads / 2 if is_split else lax.pmean(grads, "d")
        return lax.pmean(value, "d"), grads

    return jax.shard_map(
        step,
        mesh=make_mesh(*case.mesh),
        in_specs=(case.weights, case.batch),
        out_specs=(P(), case.weights),
        check_vma=check_vma,
    )


RULES = {
    "powers of two": float8(delayed=True, amax_history_length=4, where=None),
    "exact": float8(
        delayed=True, amax_history_length=4, where=None, power_of_two=False
    ),
}


def train(gradient, rule):
    """Losses, weights and histories of some steps of gradient descent."""
    step = amp_with_state(gradient, amp_policy=policy(rule))
    state, ws, losses = init_amp_state(step, WS, X), WS, []
    step = jax.jit(step)
    for _ in range(3):
        (value, grads), state = step(state, ws, X)
        ws = ws - 0.1 * grads
        losses.append(float(value))
    return losses, ws, {key: tensor.history for key, tensor in state.items()}


def policy(rule):
    return Policy("bfloat16", rules=quantised(RULES[rule]))


def check(made, other, rtol):
    assert np.allclose(made[0], other[0], rtol=rtol)
    assert jnp.linalg.norm(made[1] - other[1]) < rtol * jnp.linalg.norm(other[1])
    assert made[2].keys() == other[2].keys()
    for key, history in other[2].items():
        # Of a mean, a device may be handed its own share or that of all.
        shares = (0.5, 1, 2) if key.endswith("cotangent") else (1,)
        assert any(
            np.allclose(made[2][key], n * history, rtol=4 * rtol) for n in shares
        )


@pytest.mark.sample(3)
@pytest.mark.cross("name", where=2, rule=len(RULES))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("where", (outside, inside))
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_without_the_check_and_of_one_device(name, where, rule):
    case = CASES[name]
    if where is inside and case.local in (columns_of, told_to_vary):
        pytest.skip("without the check, a sum's cotangent is summed once more")
    checked = train(where(case, True), rule)
    check(checked, train(where(case, False), rule), 0.005)
    check(checked, train(jax.value_and_grad(case.alone), rule), 0.05)


def branching(ws, x):
    """Each device takes a branch, within which another `shard_map` may stand."""

    @functools.partial(
        jax.shard_map, in_specs=(P(None, "m"), P()), out_specs=P(None, "m")
    )
    def columns(w, x):
        return jnp.tanh(x @ w)

    x = lax.cond(x[0, 0] > 0, lambda x: columns(ws[0], x), lambda x: x, x)
    return columns(ws[1], x) @ ws[0]


def both_alike(ws, x):
    """A weight that is the same everywhere in one branch, and elsewhere is not."""
    x = lax.cond(
        x[0, 0] > 0, lambda x: x @ ws[0] + jnp.mean(ws[1] @ ws[1]), lambda x: x, x
    )
    w = lax.cond(ws[0, 0, 0] > 0, lambda w: w, lambda w: w @ w, ws[0])
    return jnp.tanh(x @ ws[1]) @ w


def uneven(ws, x):
    """A weight that is first read in a loop, as often as a device says."""

    def step(x):
        return x @ ws[0] + jnp.mean(ws[1] @ ws[1])

    return lax.while_loop(lambda x: jnp.max(x) < 9, step, abs(x)) @ ws[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fn", (branching, both_alike, uneven))
def test_branches_and_loops_that_each_device_takes_by_itself(fn):
    def run(check_vma):
        axes = ("d", "m") if fn is branching else ("d",)
        made = jax.shard_map(
            fn,
            mesh=make_mesh(*axes),
            in_specs=(P(), SPLIT),
            out_specs=SPLIT,
            axis_names={"d"},
            check_vma=check_vma,
        )
        step = jax.jit(amp_with_state(made, amp_policy=policy("powers of two")))
        state = init_amp_state(step, WS, X)
        for _ in range(2):
            out, state = step(state, WS, X)
        return out, state

    (out, state), (other, known) = run(True), run(False)
    assert np.allclose(out, other, rtol=1e-6)
    assert state.keys() == known.keys()
    for key, tensor in known.items():
        assert np.array_equal(state[key].history, tensor.history), key


@pytest.mark.sample(2)
@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("fn", (unrolled, regular))
def test_a_state_within_a_shard_map_is_each_devices_own(fn, check_vma):
    step = amp_with_state(jax.value_and_grad(fn), amp_policy=policy("powers of two"))

    def train(specs, before, after):
        def local(state, ws, x):
            (value, _), state = step(jax.tree.map(before, state), ws, x)
            return lax.pmean(value, "d"), jax.tree.map(after, state)

        run = jax.jit(
            jax.shard_map(
                local,
                mesh=make_mesh("d"),
                in_specs=(specs, P(), SPLIT),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )
        state = init_amp_state(step, WS, X[:4])
        if specs == SPLIT:
            state = jax.tree.map(lambda x: jnp.stack([x, x]), state)
        for _ in range(2):
            value, state = run(state, WS, X)
        return value, state

    def largest(x):
        return lax.pmax(varying_over(x, ["d"]) if check_vma else x, "d")

    value, state = train(P(), lambda x: x, largest)
    if fn is regular and check_vma:
        with pytest.raises(AmpError, match=r"differs between .*pmax\(x, \('d',\)\)"):
            train(SPLIT, lambda x: x[0], lambda x: x[None])
        return
    other, each = train(SPLIT, lambda x: x[0], lambda x: x[None])
    assert np.allclose(value, other, rtol=0.01)
    for key, tensor in each.items():
        assert np.allclose(state[key].history, tensor.history.max(0), rtol=0.1), key
