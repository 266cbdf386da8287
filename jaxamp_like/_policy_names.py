"""The names of policies, and the strings that spell them out."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import NamedTuple, NoReturn

import jax

from ._errors import AmpError
from ._named_policy import DTYPE_FIELDS, Policy

_PURE = ("float16", "bfloat16", "float32", "float64")
_NAMES: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(DTYPE_FIELDS, name) for name in _PURE},
    **{
        f"mixed_{name}": {"compute_dtype": name, "param_dtype": "float32"}
        for name in ("float16", "bfloat16")
    },
}
_QUANTISED = ("int8", "float8")
_ALIASES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "full": "float32",
}
_PARTS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


def get_policy(policy: str | Policy) -> Policy:
    """The policy of a name, such as "mixed_bfloat16", or of a string of its fields.

    - "float32", "bfloat16", "float16", "float64": everything in this dtype;
    - "mixed_float16", "mixed_bfloat16": compute low, with float32 parameters, and the
      author's dtypes for outputs;
    - "params=float32,compute=bfloat16,output=float32", or short
      "p=f32,c=bf16,o=f32": field by field. What is not named is left as it is. "full"
      is float32, "half" is bfloat16 on a TPU and float16 elsewhere;
    - "int8_from_mixed_bfloat16", "float8_from_mixed_bfloat16" and the like are names of
      policies that this version has no rules for yet, and says so.

    Args:
        policy: the name or string; a `Policy` is returned as it is.
    Returns:
        A policy.
    Raises:
        TypeError: `policy` is neither a string nor a `Policy`.
        ValueError: an unknown name, a malformed string, or float64 without x64.
        AmpError: a quantised policy.

    >>> get_policy("params=float32,compute=bfloat16,output=float32")
    Policy(compute_dtype='bfloat16', param_dtype='float32', output_dtype='float32')

    The names are those of Keras' `DTypePolicy`, the strings those of `jmp.get_policy`,
    which fills in what is not named."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            "A policy is given as a `Policy`, as a name such as 'mixed_bfloat16' or as "
            f"a string such as 'p=f32,c=bf16,o=f32', but got {policy!r}."
        )
    if "=" in policy:
        return _parse(policy)
    name = _as_dtype_name(policy.strip())
    mode, is_quantised, source = name.partition("_from_")
    if is_quantised and mode in _QUANTISED:
        get_policy(source)  # which may be wrong by itself
        raise AmpError(
            f"{policy!r} is a policy whose {mode} rules this version does not have "
            f"yet. Until then use the policy that it starts from, {source!r}."
        )
    if name not in _NAMES:
        quantised = [f"{mode}_from_mixed_bfloat16" for mode in _QUANTISED]
        close = get_close_matches(name, [*_NAMES, *quantised, *_ALIASES], 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"There is no policy called {policy!r}.{hint} Known names are "
            f"{', '.join(map(repr, _NAMES))}; a policy can also be spelt out: "
            "'params=float32,compute=bfloat16,output=float32'."
        )
    return _with_dtypes(_NAMES[name])


def _as_dtype_name(name: str) -> str:
    if name == "half":  # asks which devices there are, so only when it must
        return "bfloat16" if jax.default_backend() == "tpu" else "float16"
    return _ALIASES.get(name, name)


class _Word(NamedTuple):
    """A word of a policy's string, and where it stands."""

    text: str
    start: int


def _parse(policy: str) -> Policy:
    given: dict[str, str] = {}
    start = 0
    for part in policy.split(","):
        key, is_pair, value = part.partition("=")
        word = _word(key, start)
        field = _PARTS.get(word.text)
        if field is None or not is_pair:
            what = "`key=dtype`" if field or not word.text else "a known key"
            _malformed(
                policy, word, f"expected {what}; the keys are {', '.join(_PARTS)}"
            )
        if field in given:
            _malformed(policy, word, f"`{field}` is given twice")
        word = _word(value, start + len(key) + 1)
        given[field] = _as_dtype_name(word.text)
        if given[field] not in _PURE:
            known = [*_PURE, *_ALIASES, "half"]
            close = get_close_matches(word.text, known, 1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            _malformed(
                policy, word, f"expected a dtype: one of {', '.join(known)}{hint}"
            )
        start += len(part) + 1
    return _with_dtypes(given)


def _with_dtypes(dtypes: Mapping[str, str]) -> Policy:
    compute, param, output = map(dtypes.get, DTYPE_FIELDS)
    return Policy(compute, param, output)


def _word(text: str, start: int) -> _Word:
    return _Word(text.strip(), start + len(text) - len(text.lstrip()))


def _malformed(policy: str, word: _Word, what: str) -> NoReturn:
    mark = " " * word.start + "^" * max(len(word.text), 1)
    raise ValueError(
        f"The policy string is malformed at position {word.start}: {what}\n"
        f"  {policy}\n  {mark}"
    )
