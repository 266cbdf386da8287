"""Loops that go on until their numbers are good enough: they end, and as written.

A test looks at the program first, so that it fails on a solver that computes low rather
than wait for it."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import walk
from jaxamp_like import amp, amp_stop, default_amp_policy, explain
from jaxamp_like.presets import jmp
from jaxamp_like.rules import use_compute_precision, use_dot_algorithm

from .constructs import new_ref

pytestmark = pytest.mark.sample(5)

DTYPES = ("float16", "bfloat16")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

W = 0.15 * jr.normal(jr.key(0), (16, 16))
X = jr.normal(jr.key(1), (4, 16))
TOLERANCE = 1e-5


def contractions(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes that contractions read."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return {
        eqn.invars[0].aval.dtype.name
        for eqn, _ in walk(jaxpr)
        if eqn.primitive.name == "dot_general"
    }


def until_close(step: Callable[[Any], Any], z: Any) -> tuple[Any, Any]:
    """A fixed point of `step`, and how many steps it took."""

    def goes_on(carry):
        z, before, _ = carry
        return jnp.max(jnp.abs(z - before)) > TOLERANCE

    def body(carry):
        z, _, n = carry
        return step(z), z, n + 1

    z, _, n = lax.while_loop(goes_on, body, (z, z + 1, 0))
    return z, n


def equilibrium(w, x):
    return until_close(lambda z: jnp.tanh(z @ w + x), jnp.zeros_like(x))


def gradient_descent(w, x):
    def loss(z):
        return jnp.sum((z @ w - x) ** 2)

    def goes_on(carry):
        return jnp.linalg.norm(jax.grad(loss)(carry[0])) > 0.05

    def body(carry):
        z, n = carry
        return z - 0.3 * jax.grad(loss)(z), n + 1

    w = jnp.eye(16) + w
    return lax.while_loop(goes_on, body, (jnp.zeros_like(x), 0))


def bisection(w, x):
    def excess(t):
        return jnp.mean(jnp.tanh(t * x @ w + t)) - 0.5

    def body(carry):
        low, high, n = carry
        middle = (low + high) / 2
        is_low = excess(middle) < 0
        low, high = jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)
        return low, high, n + 1

    def goes_on(carry):
        return jnp.abs(excess(carry[0])) > 1e-6

    low, _, n = lax.while_loop(goes_on, body, (0.0, 10.0, 0))
    return low, n


def line_search(w, x):
    def loss(z):
        return jnp.sum(jnp.cosh(z @ w))

    slope = jax.grad(loss)(x)

    def too_long(carry):
        t, _ = carry
        return loss(x - t * slope) > loss(x) - 0.5 * t * jnp.sum(slope * slope)

    return lax.while_loop(too_long, lambda c: (c[0] / 2, c[1] + 1), (64.0, 0))


def counted_too(w, x):
    """With a counter beside the tolerance."""

    def goes_on(carry):
        z, before, n = carry
        return (jnp.max(jnp.abs(z - before)) > TOLERANCE) & (n < 1000)

    def body(carry):
        z, _, n = carry
        return jnp.tanh(z @ w + x), z, n + 1

    z, _, n = lax.while_loop(goes_on, body, (jnp.zeros_like(x), jnp.ones_like(x), 0))
    return z, n


def centres(w, x):
    """Goes by what is nearest, without a bound: choices that may go in circles."""
    del w

    def body(carry):
        nearest, _, n = carry
        members = jax.nn.one_hot(nearest, 2)
        means = members.T @ x / (1 + jnp.sum(members, axis=0)[:, None])
        return jnp.argmax(x @ means.T, axis=1), nearest, n + 1

    def goes_on(carry):
        return jnp.any(carry[0] != carry[1])

    first = jnp.array([0, 1, 0, 1])
    return lax.while_loop(goes_on, body, (first, 1 - first, 0))[::2]


def by_callback(w, x):
    """What decides is computed on the host."""

    def distance(a, b):
        return np.float32(np.max(np.abs(a - b)))

    def body(carry):
        z, _, n = carry
        new = jnp.tanh(z @ w + x)
        out = jax.ShapeDtypeStruct((), jnp.float32)
        return new, jax.pure_callback(distance, out, new, z), n + 1

    first = jnp.zeros_like(x), jnp.float32(1), 0
    z, _, n = lax.while_loop(lambda c: c[1] > TOLERANCE, body, first)
    return z, n


def in_jit(w, x):
    step = jax.jit(lambda z: jnp.tanh(z @ w + x))
    return jax.jit(lambda x: until_close(step, jnp.zeros_like(x)))(x)


def in_scan(w, x):
    def body(total, x):
        z, n = until_close(lambda z: jnp.tanh(z @ w + x), jnp.zeros_like(x))
        return total + z, n

    return lax.scan(body, jnp.zeros(16), x)


def in_vmap(w, x):
    return jax.vmap(lambda x: equilibrium(w, x))(x)


def in_checkpoint(w, x):
    return jax.checkpoint(equilibrium)(w, x)


def in_branch(w, x):
    return lax.cond(x[0, 0] > -9, equilibrium, lambda w, x: (x, 0), w, x)


def in_custom_jvp(w, x):
    solve = jax.custom_jvp(equilibrium)
    solve.defjvp(lambda primals, tangents: (equilibrium(*primals), tangents[1]))
    return solve(w, x)


def in_custom_vjp(w, x):
    solve = jax.custom_vjp(equilibrium)
    solve.defvjp(lambda w, x: (equilibrium(w, x), w), lambda w, ct: (w, ct[0]))
    return solve(w, x)


def nested(w, x):
    """A solver in each step of a loop that ends by what it found."""

    def step(z):
        return 0.5 * until_close(lambda y: jnp.tanh(y @ w + x + z), z)[0]

    return until_close(step, jnp.zeros_like(x))


def ended_by_cond(kind: str, w, x):
    """Equinox's loops of a bounded length."""

    def goes_on(carry):
        z, before, _ = carry
        return jnp.max(jnp.abs(z - before)) > TOLERANCE

    def body(carry):
        z, _, n = carry
        return jnp.tanh(z @ w + x), z, n + 1

    first = jnp.zeros_like(x), jnp.ones_like(x), jnp.array(0)
    z, _, n = eqxi.while_loop(goes_on, body, first, max_steps=64, kind=kind, base=4)
    return z, n


def bounded(decide, w, x, state):
    """A loop of as many steps, of which the last ones are to change nothing."""

    def body(carry, _):
        z, state, n = carry
        new, state = decide(lambda z: jnp.tanh(z @ w + x), z, state)
        return (new, state, n + jnp.any(new != z)), None

    first = jnp.zeros_like(x), state, jnp.array(0)
    (z, _, n), _ = lax.scan(body, first, length=64)
    return z, n


def change(new, z, axis=None):
    return jnp.max(jnp.abs(new - z), axis)


def decided_beside_the_cond(w, x):
    def decide(step, z, done):
        new = lax.cond(done, lambda z: z, step, z)
        return new, change(new, z) < TOLERANCE

    return bounded(decide, w, x, False)


def done_by_where(w, x):
    def decide(step, z, done):
        new = jnp.where(done, z, step(z))
        return new, done | (change(new, z) < TOLERANCE)

    return bounded(decide, w, x, False)


def running_rows(w, x):
    def decide(step, z, running):
        new = jnp.where(running[:, None], step(z), z)
        return new, running & (change(new, z, 1) >= TOLERANCE)

    return bounded(decide, w, x, jnp.ones(4, bool))


def error_carried(w, x):
    def decide(step, z, error):
        new = lax.cond(error < TOLERANCE, lambda z: z, step, z)
        return new, jnp.where(error < TOLERANCE, error, change(new, z))

    return bounded(decide, w, x, jnp.inf)


def steps_counted_too(w, x):
    def decide(step, z, state):
        error, n = state
        stop = (error < TOLERANCE) | (n >= 1000)
        new = lax.cond(stop, lambda z: z, step, z)
        return new, (jnp.where(stop, error, change(new, z)), n + 1)

    return bounded(decide, w, x, (jnp.inf, 0))


def cond_in_vmap(w, x):
    return jax.vmap(lambda x: decided_beside_the_cond(w, x))(x)


def damped_less_and_less(w, x):
    """Each step reads something else, but none does any more when it is done."""

    def body(carry, rate):
        z, done = carry
        new = jnp.where(done, z, z + rate * (jnp.tanh(z @ w + x) - z))
        done |= change(new, z) < TOLERANCE
        return (new, done), jnp.any(new != z)

    first = jnp.zeros_like(x), False
    (z, _), moved = lax.scan(body, first, jnp.linspace(0.5, 1, 64))
    return z, jnp.sum(moved)


def steps_known_at_run_time(w, x):
    def body(_, carry):
        z, done, n = carry
        new = jnp.where(done, z, jnp.tanh(z @ w + x))
        return new, done | (change(new, z) < TOLERANCE), n + jnp.any(new != z)

    first = jnp.zeros_like(x), False, jnp.array(0)
    z, _, n = jax.jit(lambda n: lax.fori_loop(0, n, body, first))(64)
    return z, n


SOLVERS = {
    fn.__name__: fn
    for fn in (
        equilibrium, gradient_descent, bisection, line_search, counted_too, centres,
        by_callback, in_jit, in_scan, in_vmap, in_checkpoint, in_branch, in_custom_jvp,
        in_custom_vjp, nested, decided_beside_the_cond, done_by_where, running_rows,
        error_carried, steps_counted_too, cond_in_vmap, damped_less_and_less,
        steps_known_at_run_time,
    )
}  # fmt: skip
SOLVERS |= {
    kind: functools.partial(ended_by_cond, kind) for kind in ("bounded", "checkpointed")
}
every_solver = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())


def in_loops(jaxpr: Any) -> set[str]:
    """The dtypes of what the contractions in loops read."""
    loops = (eqn for eqn, _ in walk(jaxpr) if eqn.primitive.name in ("while", "scan"))
    inner = (eqn for loop in loops for sub in subjaxprs(loop) for eqn, _ in walk(sub))
    dots = (eqn for eqn in inner if eqn.primitive.name == "dot_general")
    return {eqn.invars[0].aval.dtype.name for eqn in dots}


def subjaxprs(eqn: Any) -> list[Any]:
    names = ("jaxpr", "cond_jaxpr", "body_jaxpr")
    return [eqn.params[name] for name in names if name in eqn.params]


@pytest.mark.sample(2)
@pytest.mark.cross("solve", dtype=2)
@every_dtype
@every_solver
def test_a_solver_takes_the_steps_that_it_takes_as_written(solve, dtype):
    mixed = amp(solve, compute_dtype=dtype)
    assert in_loops(jax.make_jaxpr(mixed)(W, X)) == {"float32"}
    (z, n), (exact, steps) = mixed(W, X), solve(W, X)
    np.testing.assert_array_equal(n, steps)
    np.testing.assert_allclose(z, exact, rtol=1e-5, atol=1e-5)


# Loops that are none.


def counted(w, x):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w), x)


def counted_at_run_time(w, x, n=5):
    return jax.jit(lambda n: lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ w), x))(n)


def generation(w, x):
    """Ends by a token or by a bound, as a language model."""

    def body(carry):
        h, _, n = carry
        h = jnp.tanh(h @ w)
        return h, jnp.argmax(h, axis=1), n + 1

    def goes_on(carry):
        _, tokens, n = carry
        return ~((n >= 4) | jnp.all(tokens == 17))

    first = x, jnp.zeros(4, jnp.argmax(x, axis=1).dtype), 0
    return lax.while_loop(goes_on, body, first)[0]


def tried_again(w, x):
    """Until it is finite, or has been tried often enough."""

    def body(carry):
        _, tries, scale, _ = carry
        y = x @ w * scale
        again = ~jnp.isfinite(y).all() & (tries < 3)
        return again, tries + 1, scale / 2, y

    first = True, 0, jnp.float32(8), x
    return lax.while_loop(lambda carry: carry[0], body, first)[3]


def not_a_number(w, x):
    def goes_on(carry):
        y, n = carry
        return (jnp.any(jnp.isnan(y)) | jnp.any(jnp.isinf(y)) | (n < 1)) & (n < 4)

    return lax.while_loop(goes_on, lambda c: (x @ w, c[1] + 1), (x, 0))[0]


def skipped_steps(w, x):
    """A training loop that skips steps by the size of their gradient."""

    def body(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        is_small = jnp.linalg.norm(gradient) < 100
        return lax.cond(is_small, lambda w: w - 1e-3 * gradient, lambda w: w, w), None

    return lax.scan(body, w, jnp.stack([x, -x]))[0]


def early_layers(w, x):
    """A `cond` by the number of the layer ends nothing."""

    def body(h, i):
        return lax.cond(i < 2, lambda h: jnp.tanh(h @ w), lambda h: h, h), None

    return lax.scan(body, x, jnp.arange(4))[0]


def masked(w, x):
    """A recurrent network: the mask is given, or told by the lengths of sequences."""
    lengths = jnp.array([1, 2, 3, 3])

    def body(carry, given):
        h, t = carry
        h = jnp.where(given[:, None], jnp.tanh(h @ w + x), h)
        h = jnp.where((t < lengths)[:, None], jnp.tanh(h @ w), h)
        return (h, t + 1), None

    given = jnp.ones((3, 4), bool).at[1, 2].set(False)
    return lax.scan(body, (x, 0), given)[0][0]


def clipped(w, x):
    def body(h, _):
        h = jax.nn.leaky_relu(h) @ w + x
        norm = jnp.linalg.norm(h)
        return jnp.where(norm > 5, 5 * h / norm, h), None

    return lax.scan(body, x, length=3)[0]


def best_so_far(w, x):
    """What is found on the way is kept; the way goes on."""

    def body(carry, _):
        h, best, first = carry
        h = jnp.tanh(h @ w + x)
        score = jnp.sum(h)
        best = jnp.where(score > best, score, best)
        first = jnp.where((first == 0) & (score < 9), score, first)
        return (h, best, first), None

    return lax.scan(body, (x, -jnp.inf, 0.0), length=3)[0][1]


def own_batches(w, x):
    """Skipped steps, with another batch in each: by a key, by a counter."""

    def step(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return jnp.where(jnp.linalg.norm(gradient) < 100, w - 1e-3 * gradient, w)

    def body(carry, _):
        w, key = carry
        key, now = jr.split(key)
        return (step(w, jr.normal(now, x.shape)), key), None

    (w, _), _ = lax.scan(body, (w, jr.key(0)), length=2)
    batches = jnp.stack([x, -x])
    return lax.fori_loop(0, 2, lambda i, w: step(w, batches[i]), w)


def ended_texts(w, x):
    """A text that has ended stays as it is; what is next is chosen by rank."""

    def body(carry, _):
        h, done = carry
        new = jnp.tanh(h @ w + x)
        done |= jnp.argmax(new, 1) == 17
        return (jnp.where(done[:, None], h, new), done), None

    return lax.scan(body, (x, jnp.zeros(4, bool)), length=3)[0][0]


LOOPS = (
    counted, counted_at_run_time, generation, tried_again, not_a_number, skipped_steps,
    early_layers, masked, clipped, best_so_far, own_batches, ended_texts,
)  # fmt: skip


@pytest.mark.parametrize("fn", LOOPS, ids=lambda fn: fn.__name__)
def test_loops_that_end_in_any_precision_compute_low(fn):
    mixed = amp(fn, compute_dtype="bfloat16")
    assert in_loops(jax.make_jaxpr(mixed)(W, X)) == {"bfloat16"}
    np.testing.assert_allclose(mixed(W, X), fn(W, X), rtol=0.05, atol=0.05)


# The backward pass.


def field(y, w):
    return jnp.tanh(y @ w) - 0.5 * y


def low_field(y, w):
    low = jnp.tanh((y.astype("bfloat16") @ w.astype("bfloat16")).astype("float32"))
    return low - 0.5 * y


def adaptive(w, y, field=field, kind="checkpointed"):
    """Heun's method with steps as long as the difference to Euler's allows.

    As Diffrax: a rejected step is made again, and the backward pass makes all of them
    again from checkpoints."""

    def body(carry):
        t, h, y, n = carry
        slope = field(y, w)
        euler = y + h * slope
        heun = y + 0.5 * h * (slope + field(euler, w))
        error = lax.stop_gradient(jnp.max(jnp.abs(heun - euler))) / 1e-2
        accept = error < 1
        factor = jnp.clip(0.9 / jnp.sqrt(error + 1e-9), 0.2, 5.0)
        t_new, y_new = jnp.where(accept, t + h, t), jnp.where(accept, heun, y)
        h = lax.stop_gradient(jnp.minimum(h * factor, 2 - t_new))
        return t_new, h, y_new, n + 1

    def goes_on(carry):
        return carry[0] < 2 - 1e-4

    first = jnp.float32(0), jnp.float32(0.5), y, jnp.array(0)
    *_, y, n = eqxi.while_loop(
        goes_on, body, first, max_steps=256, kind=kind, checkpoints=4
    )
    return jnp.sum(y**2), n


def loss_of(field, kind):
    return functools.partial(adaptive, field=field, kind=kind)


@functools.cache
def gradient_of(field, kind):
    return jax.jit(jax.grad(loss_of(field, kind), has_aux=True))(4 * W, X)


def distance(actual, exact):
    return float(jnp.linalg.norm(actual - exact) / jnp.linalg.norm(exact))


AROUND = {
    "loss": lambda loss: jax.grad(amp(loss, compute_dtype="bfloat16"), has_aux=True),
    "gradient": lambda loss: amp(
        jax.grad(loss, has_aux=True), compute_dtype="bfloat16"
    ),
}


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
@pytest.mark.parametrize("inner", ["plain", "amp"])
def test_what_is_run_again_takes_the_same_steps(around, kind, inner):
    """Gradients of an adaptive solve, of which a field may be low on request."""
    exact, steps = gradient_of(field, kind)
    by_hand, _ = gradient_of(low_field, kind)
    if inner == "amp":
        mixed = around(loss_of(amp(field, compute_dtype="bfloat16"), kind))
    else:
        mixed = around(loss_of(field, kind))
    actual, taken = jax.jit(mixed)(4 * W, X)
    low = contractions(mixed, 4 * W, X)
    # What a finished backward pass reads of a bounded loop, it need not make again.
    is_read = around is AROUND["gradient"] and kind == "bounded"
    assert ("bfloat16" in low) == (inner == "amp" or is_read)
    assert distance(actual, exact) < 2 * distance(by_hand, exact)
    if inner != "amp":
        assert taken == steps


def test_a_rule_for_a_scope_asks_for_more():
    def solve(w, x):
        step = jax.named_scope("step")(lambda z: z @ w)
        return until_close(lambda z: jnp.tanh(step(z) + x), jnp.zeros_like(x))[0]

    def in_named_scope(w, x):
        with jax.named_scope("solver"):
            return solve(w, x)

    for fn, scope in ((solve, "step"), (in_named_scope, "solver")):
        policy = default_amp_policy | {scope: use_compute_precision}
        mixed = amp(fn, compute_dtype="bfloat16", amp_policy=policy, strict=True)
        assert contractions(mixed, W, X) == {"bfloat16"}


def test_rules_for_primitives_hold_outside_of_solvers_only():
    policies = [
        jmp(),
        default_amp_policy | {lax.dot_general_p: "bfloat16"},
        default_amp_policy | {lax.tanh_p: use_compute_precision},
        {lax.dot_general_p: use_dot_algorithm("BF16_BF16_F32")},
    ]
    for policy in policies:
        mixed = amp(equilibrium, compute_dtype="bfloat16", amp_policy=policy)
        with warnings.catch_warnings():  # the key has matched, in the solver
            warnings.simplefilter("error")
            jaxpr = jax.make_jaxpr(mixed)(W, X)
        assert in_loops(jaxpr) == {"float32"}
        dots = [e for e, _ in walk(jaxpr) if e.primitive.name == "dot_general"]
        assert all(eqn.params["precision"] is None for eqn in dots)


def test_a_solver_that_is_kept_as_written_stays_one_program():
    assert contractions(amp(amp_stop(equilibrium)), W, X) == {"float32"}
    once = amp(equilibrium, compute_dtype="bfloat16")
    twice = amp(once, compute_dtype="bfloat16")
    np.testing.assert_array_equal(once(W, X)[0], twice(W, X)[0])


def test_what_goes_round_by_references_alone_is_followed():
    """The scan has no carry: an iteration reads what the one before wrote."""

    def solve(w, x):
        def body(z):
            written, read = new_ref(z), new_ref(z)

            def step(_, x):
                read[...] = written[...] * 1.0
                written[...] = z @ w * 0.1
                return None, x

            lax.scan(step, None, jnp.ones(3))
            return read[...]

        return lax.while_loop(lambda z: jnp.sum(z * z) > 1e-4, body, x)

    assert contractions(amp(solve, compute_dtype="bfloat16"), W, X) == {"float32"}


def test_an_error_that_is_kept_in_a_reference_ends_a_loop_as_written():
    """The condition reads what the body writes, by two operands of the loop."""

    def solve(w, x):
        error = new_ref(jnp.float32(1))

        def step(z):
            new = jnp.tanh(z @ w) + x
            error[...] = jnp.max(jnp.abs(new - z))
            return new

        return lax.while_loop(lambda z: error[...] > 1e-3, step, x)

    assert contractions(amp(solve, compute_dtype="bfloat16"), W, X) == {"float32"}


def test_explain_tells_why():
    report = explain(equilibrium, compute_dtype="bfloat16")(W, X)
    (dot,) = (op for op in report.now.ops if op.primitive == "dot_general")
    assert dot.dtype == "float32" and "solver" in dot.why
    assert dot.place.scope == ""
