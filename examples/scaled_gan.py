"""Two losses over one scale: a generator and a critic, as in a GAN.

One state scales both. `merge_scalers` lets the scale change once a step, so that
neither loss undoes what the other found out; if either overflows, both networks stay
as they are, and remain in step with each other.

    python examples/scaled_gan.py --steps 20
"""

import argparse

import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from jaxamp_like import DynamicScalerState, amp, dynamic_scale_value_and_grad
from jaxamp_like.scaling import check_scaler, merge_scalers

LATENT, DATA, WIDTH, ROWS = 4, 2, 32, 64


def network(key, *widths):
    keys = jr.split(key, len(widths) - 1)
    return [
        {"w": jr.normal(k, (m, n)) / jnp.sqrt(m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, widths, widths[1:], strict=False)
    ]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


@amp
def critic_loss(critic, generator, real, noise):
    fake = apply(generator, noise)
    good = optax.sigmoid_binary_cross_entropy(apply(critic, real), jnp.ones(()))
    bad = optax.sigmoid_binary_cross_entropy(apply(critic, fake), jnp.zeros(()))
    return jnp.mean(good) + jnp.mean(bad)


@amp
def generator_loss(generator, critic, noise):
    logits = apply(critic, apply(generator, noise))
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.ones(())))


def make_step(tx):
    critic_grad = dynamic_scale_value_and_grad(critic_loss, redo_on_nan=2)
    generator_grad = dynamic_scale_value_and_grad(generator_loss, redo_on_nan=2)

    @jax.jit
    def step(params, opt_state, scaler, real, noise):
        critic, generator = params["critic"], params["generator"]
        scale = dict(dynamic_scaler_state=scaler)
        first, (loss_c, grads_c) = critic_grad(critic, generator, real, noise, **scale)
        second, (loss_g, grads_g) = generator_grad(generator, critic, noise, **scale)
        scaler = merge_scalers(first, second)
        grads = {"critic": grads_c, "generator": grads_g}
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        return *scaler.accept(new, (params, opt_state)), scaler, (loss_c, loss_g)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Two losses, one scale.")
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps

    keys = jr.split(jr.key(0), 3)
    params = {
        "critic": network(keys[0], DATA, WIDTH, WIDTH, 1),
        "generator": network(keys[1], LATENT, WIDTH, WIDTH, DATA),
    }
    tx = optax.adam(2e-3, b1=0.5)
    opt_state, scaler = tx.init(params), DynamicScalerState(patience=100)
    step, losses = make_step(tx), (jnp.nan, jnp.nan)
    for i in range(steps):
        real_key, noise_key = jr.split(jr.fold_in(keys[2], i))
        angle = jr.uniform(real_key, (ROWS, 1), maxval=6.28)
        real = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)
        noise = jr.normal(noise_key, (ROWS, LATENT))
        params, opt_state, scaler, losses = step(params, opt_state, scaler, real, noise)
        if i % 100 == 99:
            check_scaler(scaler)  # raises if no scale can help
    names = (f"{n} {float(x):.3f}" for n, x in zip(params, losses, strict=True))
    resets = int(scaler.total_resets)
    print(
        f"losses: {', '.join(names)}; scale {float(scaler.scaler):g}, {resets} resets"
    )


if __name__ == "__main__":
    main()
