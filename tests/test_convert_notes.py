"""What the summary of a conversion says besides: of rounding, randomness and states."""

import functools
import warnings

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from jaxamp_like import AmpWarning, amp, convert, load
from jaxamp_like.presets import quantised
from jaxamp_like.rules import float8, int4, int8

BF16 = {"compute_dtype": "bfloat16"}
W = {
    k: jnp.asarray(np.random.default_rng(i).normal(size=(64, 64)), "float32")
    for i, k in enumerate("qkv")
}
X = jnp.asarray(np.random.default_rng(3).normal(size=(4, 64)), "float32")
RULES = (
    int8(where=None),
    int8(where=None, weight_only=True),
    float8(where=None),
    int4(),
)


def notes(fn, params, *inputs, rule=None, **options):
    policy = {} if rule is None else {"amp_policy": quantised(rule)}
    low = convert(fn, params, *inputs, **BF16, **policy, **options)
    assert str(low.summary).endswith("\n".join(low.summary.notes))
    return low.summary.notes


# ------------------------------------------------------- weights that are still rounded


def qkv(p, x):
    with jax.named_scope("attention"):
        return x @ jnp.concatenate([p["q"], p["k"], p["v"]], 1)


def layers(p, x):
    return jnp.tanh(x @ p["q"].T) @ (2 * p["k"]) @ jnp.roll(p["v"], 1, axis=0)


def stack(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p)[0]


def sums(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ (w[0] + w[1])), None), x, p)[0]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_weight_of_several_parameters_is_told(rule):
    (note,) = notes(qkv, W, X, rule=rule)
    assert note.startswith("Rounded at each call, which is slow: the weight of a quant")
    assert "(in attention, test_convert_notes.py:" in note and "as one param" in note


def test_all_of_them_are_counted_also_in_loops_and_calls():
    def both(p, x):
        return sums(
            (jnp.stack([p["q"]] * 3), jnp.stack([p["k"]] * 3)), jit(p, x)[:, :64]
        )

    jit = jax.jit(qkv)
    (note,) = notes(both, W, X, rule=int8(where=None))
    assert "the weights of 2 quantised products, the first (in attention, " in note


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_weights_of_one_parameter_are_not_told(rule):
    assert notes(layers, W, X, rule=rule) == ()
    assert notes(jax.jit(layers), W, X, rule=rule) == ()
    assert notes(stack, jnp.stack([*W.values()]), X, rule=rule) == ()


def test_what_is_kept_on_purpose_or_was_rounded_by_hand_is_not_told():
    rule = int8(where=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmpWarning)
        assert notes(qkv, W, X, rule=rule, cast_params=False) == ()
        assert notes(qkv, W, X, rule=rule, keep_inputs=["q", "k", "v"]) == ()

    def unpacked(p, x):
        return x @ jnp.concatenate([p["w"] & 15, p["w"] >> 4], 0).astype("float32")

    packed = {"w": jnp.ones((32, 64), "uint8"), "q": W["q"]}
    made = notes(lambda p, x: unpacked(p, x) @ p["q"], packed, X, rule=rule)
    assert not any("Rounded" in note for note in made)


# -------------------------------------------------------------- contractions left alone


def named(*names):
    def model(p, x):
        for name, w in zip(names, p.values(), strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return x

    return model


def test_layers_that_are_left_by_their_names():
    model, rule = named("embed_mlp", "q_head", "mlp"), int8(where=None)
    (note,) = notes(model, W, X, rule=rule)
    assert note.startswith(
        "2 of 3 contractions that `int8(where=None)` may quantise are left alone, the "
        "first since 'embed_mlp' is a head or an embedding (in embed_mlp, test_conv"
    )
    assert note.endswith("With `leave=()`, the rule takes layers of any name.")
    assert notes(model, W, X, rule=int8(where=None, leave=())) == ()


def test_small_layers():
    def wide(site):
        return site.avals[1].shape[1] > 32

    p = dict(zip("ab", (W["q"], W["k"][:, :8]), strict=True))
    (note,) = notes(named("one", "two"), p, X, rule=int8(where=wide))
    assert "1 of 2 contractions that `int8(where=" in note and "(in two, " in note
    assert note.endswith("With `where=None`, it takes contractions of any size.")


def test_the_scores_of_attention_are_not_told():
    def attention(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("...id,...jd->...ij", q, k))
        return scores @ v

    assert notes(attention, W, jnp.stack([X, X]), rule=int8(where=None)) == ()


def test_nothing_is_said_without_a_rule_that_quantises():
    assert notes(named("embed_mlp", "q_head", "mlp"), W, X) == ()


# --------------------------------------------------------- as it is called for training


def of_haiku(is_training):
    def net(x, is_training):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training)
        return hk.Linear(4)(jax.nn.relu(x))

    params, state = hk.transform_with_state(net).init(jax.random.key(0), X, True)
    bound = hk.transform_with_state(functools.partial(net, is_training=is_training))
    return bound, params, state


def test_statistics_of_haiku_that_change():
    net, params, state = of_haiku(is_training=True)
    (note,) = notes(net, params, state, None, X)
    assert note.startswith("A result is like input 0, with 6 of its 6 arrays changed")
    assert "BatchNorm" in note
    net, params, state = of_haiku(is_training=False)
    assert notes(net, params, state, None, X) == ()
    assert notes(jax.jit(net.apply), params, state, None, X) == ()


@pytest.mark.parametrize("train", (True, False))
def test_statistics_of_linen_that_change(train):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
            return nn.Dense(4)(x)

    net = Net()
    variables = net.init(jax.random.key(0), X)

    def apply(variables, x):
        return net.apply(variables, x, mutable=["batch_stats"])

    made = [note for note in notes(apply, variables, X) if "`params`" in note]
    assert len(made) == train


def test_states_alike_that_are_handed_on():
    def handed_on(p, x, one, other):
        return x @ p["q"], one, other

    states = {"mean": X}, {"mean": X + 1}
    assert notes(handed_on, W, X, *states) == ()
    (note,) = notes(lambda *a: handed_on(*a[:3], {"mean": X * 2}), W, X, *states)
    assert note.startswith("A result is like input 1, with 1 of its 1 arrays changed")


def test_results_that_are_no_states():
    def residual(p, x):
        return x + x @ p["q"], x @ p["k"]

    assert notes(residual, W, X) == ()
    assert notes(lambda p, x: {"x": x["x"] @ p["q"]}, W, {"x": X}) == ()


def test_random_numbers():
    def dropped(p, key, x):
        with jax.named_scope("drop"):
            keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, x, 0) @ p["q"]

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        (note,) = notes(dropped, W, key, X)
        assert note.startswith("Random numbers are drawn at each call (the first in dr")
        assert "dropout" in note

    def only_keys(p, key, x):
        return x @ p["q"], jax.random.split(jax.random.fold_in(key, 1))

    assert notes(only_keys, W, jax.random.key(0), X) == ()


def test_notes_are_saved_and_printed(tmp_path, capsys):
    low = convert(qkv, W, X, **BF16, amp_policy=quantised(int8(where=None)))
    low.save(tmp_path / "low")
    assert load(tmp_path / "low").summary == low.summary
    low.summary.print()
    assert "Rounded at each call" in capsys.readouterr().out
    page = low.summary.save_html(tmp_path / "page.html").read_text()
    assert "Rounded at each call" in page


# --------------------------------------------------------- the batch in the first place


def two(p, x):
    return jnp.tanh(x @ p["q"]) @ p["k"]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_parameters_that_come_after_the_batch(rule):
    def fn(x, p):
        return two(p, x)

    rounded = amp(fn, amp_policy=quantised(rule), **BF16)
    with pytest.warns(AmpWarning, match="leaves 1 alone that multiply .*argnums=1"):
        rounded(X, W)


def quiet(fn, *args, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmpWarning)
        amp(fn, amp_policy=quantised(int8(where=None)), **BF16, **options)(*args)


def test_no_alarm_where_the_parameters_are_given():
    quiet(two, W, X)
    quiet(lambda x, p: two(p, x), X, W, argnums=1)
    quiet(lambda p, x: x @ p["q"], W, X)
    quiet(lambda w, x: x @ w, W["q"], X)
    # Of a graph: a matrix of data stands beside what was computed, on the left.
    quiet(lambda w, x, a: a @ jnp.tanh(x @ w), W["q"], X, jnp.ones((4, 4)))
    # Low-rank updates of weights that stay as they are.
    low = {"a": jnp.ones((64, 2)), "b": jnp.ones((2, 64))}
    quiet(lambda p, w, x: two(w, x) + x @ p["a"] @ p["b"], low, W, X)


# ---------------------------------------------------------------- what to write instead


def test_several_inputs_of_keras():
    one, other = keras.Input((64,)), keras.Input((64,))
    made = keras.layers.Dense(4)(keras.layers.Add()([one, other]))
    net = keras.Model([one, other], made)
    with pytest.raises(TypeError, match=r"`convert\(model, None, \[a, b\]\)`"):
        convert(net, None, X, X, **BF16)
    assert convert(net, None, [X, X], **BF16)([X, X]).shape == (4, 4)


def test_a_state_of_haiku_that_is_missing():
    net, params, _ = of_haiku(is_training=False)
    for fn in (net, net.apply):
        with pytest.raises(TypeError, match="params, state, None, x"):
            convert(fn, params, None, X, **BF16)


def test_parameters_read_back_by_numpy(tmp_path):
    low = convert(two, W, X, **BF16)
    np.savez(tmp_path / "p.npz", **low.params)
    read = dict(np.load(tmp_path / "p.npz"))
    with pytest.raises(ValueError, match=r"view\('bfloat16'\).*save_parameters"):
        low.apply(read, X)
    whole = {k: read[k].view("bfloat16") for k in "qk"} | {"v": W["v"]}
    assert (low.apply(whole, X) == low(X)).all()


def test_the_digest_of_another_version(tmp_path):
    low = convert(two, W, X, **BF16)
    old = low.save(tmp_path / "low")
    convert(two, jax.tree.map(jnp.negative, W), X, **BF16).save(tmp_path / "low")
    with pytest.raises(Exception, match="If it was saved again since, give"):
        load(tmp_path / "low", digest=old)
