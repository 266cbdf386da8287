"""The names of policies, and the strings that spell them out."""

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from .._dtypes import NAMES, SHORT_NAMES, bits, full_name
from .._errors import AmpError, showing_call
from .._quantised import FORMATS
from .._rules.user_rules import short
from .._suggestions import did_you_mean
from .mistakes import instead_of_policy
from .named import DTYPE_FIELDS, Policy
from .quantised import quantised

_NAMES: dict[str, dict[str, str]] = {
    **{name: dict.fromkeys(DTYPE_FIELDS, name) for name in NAMES},
    **{
        f"mixed_{name}": {"compute_dtype": name, "param_dtype": "float32"}
        for name in ("float16", "bfloat16")
    },
}
_PARTS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
}


# What Apex and Lightning call them.
_ELSEWHERE = {
    "O0": "float32",
    "O1": "mixed_float16",
    "O2": "mixed_float16",
    "O3": "float16",
    "16-mixed": "mixed_float16",
    "bf16-mixed": "mixed_bfloat16",
    "32-true": "float32",
    "16-true": "float16",
    "bf16-true": "bfloat16",
    "fp8": "float8_from_mixed_bfloat16",
    "mixed_fp8": "float8_from_mixed_bfloat16",
    "mixed_float8": "float8_from_mixed_bfloat16",
    "mixed_int8": "int8_from_mixed_bfloat16",
}


@showing_call("get_policy('mixed_bfloat16')")
def get_policy(
    policy: str | Policy, *, amax_history_length: int | None = None
) -> Policy:
    """The policy of a name, such as "mixed_bfloat16", or of a string of its fields.

    - "float32", "bfloat16", "float16", "float64": everything in this dtype, results
      too: a loss is rounded to it, which `amp` warns of where it is differentiated;
    - "mixed_float16", "mixed_bfloat16": compute low, with float32 parameters, and the
      author's dtypes for outputs;
    - "params=float32,compute=bfloat16,output=float32", or short
      "p=f32,c=bf16,o=f32": field by field. What is not named is left as it is. "full"
      is float32, "half" is bfloat16 on a TPU and float16 elsewhere;
    - "int8_from_mixed_bfloat16", "float8_from_float32" and the like: the policy named
      after "from", with contractions by the rule of that name: `int8()`, `float8()`,
      `mxfp8()`, `nvfp4()` or `int4()`. This rule does not quantise heads, embeddings,
      attention's scores, and (but for `int4()`, which rounds weights alone)
      contractions that are too small to gain from it.

    Args:
        policy: the name or string; a `Policy` is returned as it is.
        amax_history_length: for a name that begins with "float8_from_": the number of
            earlier steps whose maxima the scales are made of, by `float8(delayed=True)`
            (as always in Keras). Such a policy is for `amp_with_state`.
    Returns:
        A policy.
    Raises:
        TypeError: `policy` is neither a string nor a `Policy`, or the length no
            integer.
        ValueError: an unknown name, a malformed string, float64 without x64, or a
            length that is less than 1 or given for another name than one of float8.
        AmpError: a quantised policy starts from a dtype of more than 32 bits.

    >>> get_policy("params=float32,compute=bfloat16,output=float32")
    Policy(compute_dtype='bfloat16', param_dtype='float32', output_dtype='float32')

    The names are those of Keras' `DTypePolicy`. The strings are those of
    `jmp.get_policy`, which has defaults for fields that are not named."""
    if amax_history_length is not None:
        return _delayed(policy, amax_history_length)
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            "A policy is given as a `Policy`, as a name such as 'mixed_bfloat16' or as "
            f"a string such as 'p=f32,c=bf16,o=f32', but got {short(policy)}."
            f"{instead_of_policy(policy)}"
        )
    if "=" in policy:
        return _parse(policy)
    name = full_name(policy)
    mode, is_quantised, source = name.partition("_from_")
    if is_quantised and mode in FORMATS:
        _refuse_second_mode(policy, mode, source)
        return _quantised(mode, get_policy(source), policy)
    if is_quantised or name in FORMATS:
        raise ValueError(
            f"There is no policy called {policy!r}. Quantised policies are called by "
            f"{', '.join(map(repr, FORMATS))} and the policy that they start from: "
            "'int8_from_mixed_bfloat16'."
        )
    if name not in _NAMES:
        low = [f"{mode}_from_mixed_bfloat16" for mode in FORMATS]
        known = _ELSEWHERE.get(name)
        hint = f" Did you mean {known!r}?" if known else ""
        hint = hint or did_you_mean(name, (*_NAMES, *low, *SHORT_NAMES))
        raise ValueError(
            f"There is no policy called {policy!r}.{hint} Known names are "
            f"{', '.join(map(repr, _NAMES))}; a policy can also be spelt out: "
            "'params=float32,compute=bfloat16,output=float32'."
        )
    return Policy.from_dict(_NAMES[name])


def name_of(policy: Policy) -> str | None:
    """The name by which `get_policy` makes a policy; `None` if it has none."""
    plain = [name for name in _NAMES if name != "float64"]  # which needs x64
    quantised = [f"{mode}_from_{name}" for mode in FORMATS for name in plain]
    return next((n for n in (*plain, *quantised) if get_policy(n) == policy), None)


def _refuse_second_mode(name: str, mode: str, source: str) -> None:
    second, is_quantised, innermost = source.partition("_from_")
    if is_quantised and second in FORMATS:
        raise ValueError(
            f"{name!r} names two rules for the same contractions. Write "
            f"'{mode}_from_{innermost}' or '{second}_from_{innermost}'; a `PolicyMap` "
            "gives each scope a policy of its own."
        )


def _quantised(mode: str, source: Policy, name: str) -> Policy:
    if source.compute_dtype is not None and bits(source.compute_dtype) > 32:
        raise AmpError(
            f"{name!r}: nothing of more than 32 bits is quantised. Start from "
            f"'float32' or 'mixed_bfloat16': '{mode}_from_float32'."
        )
    return replace(source, rules=quantised(FORMATS[mode]()))


def _delayed(policy: Any, length: int) -> Policy:
    """The policy of a name such as "float8_from_...", scaled by histories of maxima."""
    mode = policy.partition("_from_")[0] if isinstance(policy, str) else ""
    rule = FORMATS[mode].with_history(length) if mode in FORMATS else None
    if rule is None:
        raise ValueError(
            f"`amax_history_length` is of policies in float8, but got {short(policy)}. "
            "Give a name such as 'float8_from_mixed_bfloat16', or leave it out."
        )
    return replace(get_policy(policy), rules=quantised(rule))


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
        given[field] = full_name(word.text)
        if given[field] not in NAMES:
            known = (*NAMES, *SHORT_NAMES, "half")
            hint = did_you_mean(word.text, known)
            _malformed(
                policy, word, f"expected a dtype: one of {', '.join(known)}.{hint}"
            )
        start += len(part) + 1
    return Policy.from_dict(given)


def _word(text: str, start: int) -> _Word:
    return _Word(text.strip(), start + len(text) - len(text.lstrip()))


def _malformed(policy: str, word: _Word, what: str) -> NoReturn:
    mark = " " * word.start + "^" * max(len(word.text), 1)
    raise ValueError(
        f"The policy string is malformed at position {word.start}: {what}\n"
        f"  {policy}\n  {mark}"
    )
