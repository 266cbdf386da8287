"""Rules that change how precise a contraction's sums are, and no dtype."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._errors import AmpError
from .._primitives import CONTRACTIONS
from .._suggestions import did_you_mean
from . import Decision, Rule, Site, use_original_precision, why_as_written

_FLOAT32 = jnp.dtype("float32")

# Presets for float8 don't take float32, and float64 is more than the author wrote.
_PRESETS = {
    preset.name: preset
    for preset in lax.DotAlgorithmPreset
    if not preset.name.startswith(("ANY_F8", "F64"))
}


@dataclass(frozen=True)
class UseDotAlgorithm(Rule):
    """The author's dtypes, and another `precision=`; see `use_dot_algorithm`."""

    algorithm: lax.DotAlgorithmPreset | lax.Precision

    def __post_init__(self) -> None:
        algorithm = self.algorithm
        if not isinstance(algorithm, lax.DotAlgorithmPreset | lax.Precision):
            raise TypeError(
                "`algorithm` must be a `lax.DotAlgorithmPreset`, a `lax.Precision` or "
                "the name of one, such as 'TF32_TF32_F32' or 'highest', but got "
                f"{algorithm!r}."
            )
        is_preset = isinstance(algorithm, lax.DotAlgorithmPreset)
        if is_preset and algorithm.name not in _PRESETS:
            raise ValueError(
                f"{algorithm.name} does not take float32 operands. Those that do: "
                f"{', '.join(_PRESETS)}."
            )
        super().__post_init__()

    @property
    def may_compute_low(self) -> bool:
        return True

    def decide(self, site: Site) -> Decision:
        decision = use_original_precision.decide(site)
        name = site.primitive and site.primitive.name
        if site.primitive and name not in CONTRACTIONS:
            return decision
        if why := why_as_written(site):
            return decision._replace(why=why)
        if site.authors[:2] != (_FLOAT32, _FLOAT32):
            return decision._replace(why="no contraction of float32")
        precision: Any = self.algorithm
        if isinstance(precision, lax.Precision):
            precision = (precision, precision)
        elif name == "conv_general_dilated":
            if site.by_scope:
                return decision._replace(why="no convolution has a dot algorithm")
            raise AmpError(
                f"A convolution takes no dot algorithm, so {self.algorithm.name} can't "
                f"be the rule for `{site.primitive}`. Use a `lax.Precision`: "
                "`use_dot_algorithm('high')`; or give convolutions a rule of their own."
            )
        params = site.params | {"precision": precision}
        return decision._replace(params=params, why=f"as {self.algorithm.name}")


def use_dot_algorithm(algorithm: lax.DotAlgorithmPreset | lax.Precision | str) -> Rule:
    """Computes contractions of float32 operands by `algorithm`, without any cast.

    Only the parameter `precision` changes, no dtype: speed without less memory, and no
    loss scaling. The contractions of the backward pass inherit it. Left as written are
    contractions of other dtypes, those that the author gave a precision by hand (but
    under the key of a scope the rule wins) and, under the key of a scope, all ops that
    are no contractions.

    A convolution takes a `lax.Precision` only. Under the key of a scope, a dot
    algorithm leaves it as written; under any other key, that is an error.

    Not every algorithm runs on every device; XLA says so when it compiles. On a CPU,
    JAX 0.12 runs `BF16_BF16_F32`, `BF16_BF16_F32_X3` and `F32_F32_F32`, but no TF32.

    Args:
        algorithm: a `lax.DotAlgorithmPreset`, a `lax.Precision`, or the name of one
            ("TF32_TF32_F32", "BF16_BF16_F32_X3", "high", "highest").
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: `algorithm` is none of these.
        ValueError: there is no such algorithm, or none that takes float32 operands.
        AmpError: when a function is traced, if a convolution is given a dot algorithm.

    >>> from jax import lax
    >>> policy = {lax.dot_general_p: use_dot_algorithm("TF32_TF32_F32")}
    """
    if isinstance(algorithm, str):
        algorithm = _algorithm_named(algorithm)
    return UseDotAlgorithm(algorithm)


def _algorithm_named(name: str) -> lax.DotAlgorithmPreset | lax.Precision:
    if name in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[name]
    try:
        return lax.Precision(name)
    except ValueError:
        known = [*_PRESETS, *(p.name.lower() for p in lax.Precision)]
    begun = [k for k in known if name and k.lower().startswith(f"{name.lower()}_")]
    hint = did_you_mean(begun[0] if begun else name, known)
    raise ValueError(
        f"There is no algorithm {name!r} for contractions.{hint} Known: "
        f"{', '.join(known)}."
    )
