"""`calibrate` by equation: a policy holds for batches of other sizes, or says so."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxamp_like import AmpError, AmpWarning, Budget, Policy, amp, calibrate
from jaxamp_like._calibrate.marks import Contraction
from jaxamp_like._calibrate.sizes import _merged
from jaxamp_like._reports.walk import CONTRACTIONS, walk
from jaxamp_like._rules.by_shapes import as_dims, as_text, overlap

pytestmark = pytest.mark.rest

BF16, F32 = "bfloat16", "float32"


def array(*shape, seed=0):
    x = np.random.default_rng(seed).normal(size=shape) / 3
    return x.astype("float32")


WEIGHTS = {"a": array(8, 16), "b": array(16, 12), "c": array(12, 4)}


def loss(w, x):
    h = jnp.sin(60 * (x @ w["a"]))  # 60 times a product, and its rounding
    return jnp.mean((jnp.tanh(h @ w["b"]) @ w["c"]) ** 2)


def batches(*shape):
    return [(WEIGHTS, array(*shape, seed=i)) for i in range(2)]


@pytest.fixture(scope="module")
def policy():
    found = calibrate(loss, batches(6, 8), budget=0.02, granularity="equation")
    assert [group.name for group in found.kept_full] == ["dot_general *x8+,8+x16"]
    return found.policy


def read(fn, *args):
    """The dtypes that the contractions of a program read."""
    eqns = [e for e, *_ in walk(jax.make_jaxpr(fn)(*args), ())]
    return [
        e.invars[0].aval.dtype.name for e in eqns if e.primitive.name in CONTRACTIONS
    ]


@pytest.mark.parametrize("size", (1, 6, 8, 64))
def test_a_policy_holds_for_other_sizes_of_batch(policy, size):
    mixed = amp(loss, amp_policy=policy, strict=True)
    assert read(mixed, WEIGHTS, array(size, 8)) == [F32, BF16, BF16]


def names(fn, arguments, **options):
    options |= {"budget": Budget(gradients=9), "granularity": "equation"}
    found = calibrate(fn, [arguments], **options)
    return [group.name.removeprefix("dot_general ") for group in found.groups]


def test_a_batch_as_large_as_the_features_is_told_from_them():
    found = names(loss, (WEIGHTS, array(8, 8)))
    assert found == ["*x8+,8+x16", "*x16+,16+x12", "*x12+,12+x4"]


def attention(w, x):
    q, k, v = (jnp.einsum("btd,dhk->bhtk", x, w[name]) for name in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
    return jnp.mean(jnp.einsum("bhts,bhsk->bthk", scores, v) ** 2)


def test_batch_and_length_are_free_and_both_products_of_attention_known():
    w = {name: array(8, 2, 4, seed=i) for i, name in enumerate("qkv")}
    found = names(attention, (w, array(3, 5, 8)))
    projection, scores, mixture = found
    assert projection in ("*x*x8+,8+x2x4", "8+x2x4,*x*x8+")
    assert scores.count("4+") == 2 and "*+" not in scores
    assert mixture.count("*+") == 2 and scores.count("*") == 4


def test_weights_on_the_left_under_vmap():
    def fn(w, x):
        return jnp.mean(jax.vmap(lambda x: jnp.tanh(w["a"].T @ x))(x))

    assert names(fn, (WEIGHTS, array(6, 8))) in (["16x8+,*x8+"], ["*x8+,16x8+"])


def test_a_size_that_the_function_fixes_is_fixed():
    def fn(w, x):
        return loss(w, x + np.ones((6, 1), "float32"))

    assert names(fn, (WEIGHTS, array(6, 8)))[0] == "6x8+,8+x16"


def test_the_length_of_an_unrolled_recurrence_is_free():
    def fn(w, x):
        h = x[0]
        for part in x[1:]:
            h = jnp.tanh(part + h @ w["s"])
        return jnp.mean(jnp.sin(60 * x[0] @ w["a"])) + 9 * jnp.mean(h @ w["t"])

    w = WEIGHTS | {"s": array(8, 8), "t": array(8, 4)}
    arguments = [(w, array(3, 6, 8, seed=i)) for i in range(2)]
    found = calibrate(fn, arguments, budget=0.02, granularity="equation")
    assert [group.name for group in found.kept_full] == ["dot_general *x8+,8+x16"]
    mixed = amp(fn, amp_policy=found.policy, strict=True)
    assert read(mixed, w, array(5, 2, 8)) == [BF16] * 4 + [F32, BF16]


def test_contractions_of_unknown_shapes_compute_as_written_and_are_told(policy):
    def other(w, x):
        return loss(w, x) + jnp.mean(x @ w["a"][:, :5])

    with pytest.warns(
        AmpWarning, match=r"says nothing of `dot_general` in no scope of 6x8\+,"
    ):
        dtypes = read(amp(other, amp_policy=policy), *batches(6, 8)[0])
    assert dtypes == [F32, BF16, BF16, F32]
    with pytest.raises(AmpError, match="Calibrate the function as it is now"):
        amp(other, amp_policy=policy, strict=True)(*batches(6, 8)[0])


def test_what_amp_would_leave_as_written_is_not_unknown(policy):
    def other(w, x):
        with jax.named_scope("exact"):
            exact = jnp.matmul(x.T, x, precision="highest")
        counts = jnp.ones((3, 5), int) @ jnp.ones((5, 2), int)
        return loss(w, x) + jnp.sum(exact) + jnp.sum(counts)

    amp(other, amp_policy=policy, strict=True)(*batches(6, 8)[0])


def test_a_backward_pass_that_the_policy_does_not_know_is_told(policy):
    step = amp(jax.grad(loss), amp_policy=policy, strict=True)
    with pytest.raises(AmpError, match="make `amp` of the loss"):
        step(*batches(6, 8)[0])


def test_rows_that_match_nothing_are_told(policy):
    def smaller(w, x):
        return jnp.mean(jnp.sin(60 * (x @ w["a"])))

    with pytest.raises(AmpError, match=r"rows \*x16\+,16\+x12, .* matched no"):
        amp(smaller, amp_policy=policy, strict=True)(*batches(6, 8)[0])


# Where no two decisions of one scope differ, shapes count too.


def scoped(w, x):
    with jax.named_scope("a"):
        h = jnp.sin(60 * (x @ w["a"]))
    with jax.named_scope("b"):
        h = jnp.tanh(h @ w["b"])
    with jax.named_scope("c"):
        return jnp.mean((h @ w["c"]) ** 2)


def grown(scope, x_of, w_of):
    """`scoped`, with one more contraction in a scope."""

    def fn(w, x):
        with jax.named_scope(scope):
            more = jnp.mean(jnp.sin(x_of(x) @ w_of(w)))
        return scoped(w, x) + more

    return fn


@pytest.fixture(scope="module", params=(0.02, Budget(gradients=9)))
def by_equation(request):
    return calibrate(
        scoped, batches(6, 8), budget=request.param, granularity="equation"
    )


def wide(width):
    return lambda x: jnp.concatenate([x, x], axis=1)[:, :width]


NEW = {
    "fewer terms": ("b", wide(4), lambda w: w["a"][:4, :7], "6x4+,4+x7"),
    "more columns": ("b", wide(12), lambda w: w["b"].T, "6x12+,12+x16"),
    "one axis more": ("c", lambda x: wide(12)(x)[None], lambda w: w["c"], "1x6x12+,"),
}


@pytest.mark.parametrize("name", NEW)
def test_another_shape_in_a_measured_scope_is_left_as_written(by_equation, name):
    scope, x_of, w_of, shapes = NEW[name]
    fn, batch = grown(scope, x_of, w_of), batches(6, 8)[0]
    saved = type(by_equation.policy).from_dict(by_equation.policy.to_dict())
    assert saved == by_equation.policy
    assert f"{scope!r}: {{'dot_general': ['*x" in repr(saved)
    known = read(amp(scoped, amp_policy=saved, strict=True), *batch)
    text = f"`dot_general` in scope '{scope}' of {re.escape(shapes)}"
    with pytest.warns(AmpWarning, match=f"without {text}.*make `amp` of the loss"):
        assert read(amp(fn, amp_policy=saved), *batch) == [F32, *known]
    with pytest.raises(AmpError, match=text):
        amp(fn, amp_policy=saved, strict=True)(*batch)


@pytest.mark.parametrize("size", (1, 6, 8, 64))
def test_the_same_shapes_of_another_batch_are_known(by_equation, size):
    def twice(w, x):
        """As in a training step, with what sums nothing and what is exact."""
        with jax.named_scope("step"):
            total = scoped(w, x)
        with jax.named_scope("b"):
            exact = jnp.matmul(x.T, x, precision="highest")
            return total + jnp.mean(jnp.einsum("i,j->ij", x[0], x[0])) + exact[0, 0]

    amp(twice, amp_policy=by_equation.policy, strict=True)(WEIGHTS, array(size, 8))


@pytest.mark.parametrize("granularity", ("scope", "primitive"))
def test_other_granularities_decide_of_all_shapes(granularity):
    found = calibrate(
        scoped, batches(6, 8), budget=Budget(gradients=9), granularity=granularity
    )
    assert found.policy.measured.to_dict() == {k: ["dot_general"] for k in "abc"}
    fn = grown("b", lambda x: x[:, :4], lambda w: w["a"][:4, :7])
    mixed = amp(fn, amp_policy=found.policy, strict=True)
    assert read(mixed, *batches(6, 8)[0]) == [BF16] * 4


@pytest.mark.parametrize(
    "row", (("dot_general",), {"dot_general": ["*x8+,8+x16"]}, {"dot_general": ()})
)
def test_what_was_measured_is_data(row):
    policy = Policy(BF16, measured={"a": row})
    assert eval(repr(policy)) == policy == Policy.from_dict(policy.to_dict())
    assert hash(eval(repr(policy))) == hash(policy)
    is_any = policy == Policy(BF16, measured={"a": ["dot_general"]})
    assert is_any == (row != {"dot_general": ["*x8+,8+x16"]})


@pytest.mark.parametrize("row", ({"dot_general": "*x8+,8+x16"}, {"dot_general": ["8"]}))
def test_what_is_no_shape_is_refused(row):
    with pytest.raises(AmpError, match="lists of shapes"):
        Policy(BF16, measured={"a": row})


token = st.sampled_from(("2", "3", "4", "*", "2+", "3+", "*+"))
shapes = st.lists(st.tuples(st.tuples(token, token), st.tuples(token)), min_size=1)


@given(shapes)
@settings(max_examples=60)
def test_patterns_of_one_place_exclude_each_other(some):
    dims = {Contraction((), "dot_general", str(i)): one for i, one in enumerate(some)}
    found = _merged(dims)
    for of, one in dims.items():
        assert overlap(found[of], one) and as_dims(as_text(one)) == one
    patterns = [*dict.fromkeys(found.values())]
    assert not any(overlap(a, b) for i, a in enumerate(patterns) for b in patterns[:i])
