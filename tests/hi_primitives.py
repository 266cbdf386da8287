"""JAX's flags that have it write hi-primitives."""

import contextlib
from collections.abc import Iterator

import jax

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
"""Each has JAX write one kind of structural primitive as a hi-primitive."""


def unknown(names: tuple[str, ...]) -> list[str]:
    """The flags that this JAX does not have."""
    return [name for name in names if not hasattr(jax.config, name)]


@contextlib.contextmanager
def flags(*names: str) -> Iterator[None]:
    """In here these flags are on, and the others off."""
    known = [name for name in FLAGS if not unknown((name,))]
    before = {name: getattr(jax.config, name) for name in known}
    try:
        for name in known:
            jax.config.update(name, name in names)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
