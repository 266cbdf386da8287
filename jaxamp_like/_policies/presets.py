"""The casting rules of known systems, as policies: `amp(fn, amp_policy=jmp())`.

Each preset is a function that makes a plain policy dict, to be extended by `|` like
`default_amp_policy`. The lists are written in the names of JAX's primitives. The
sources are those of the systems, by file and commit; where one op of theirs is several
primitives of JAX's (softmax, layer norm), the docstring says what follows.

Common to all of them, and unlike their originals: every equation is reached at any
depth; no equation runs in more bits than its author wrote; what the author asked for
explicitly (`precision=`, an `astype`) wins; casts are made where a value is read, so
that gradients of biases, embeddings and scanned weights add up in float32; and what has
no 16-bit kernel, or carries code that was traced in float32, runs in float32."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from jax.typing import DTypeLike

from .._dtypes import as_float_dtype, survives
from .._errors import AmpError
from .._jax import Primitive
from .._primitives import FIXED
from .._rules import (
    ByRange,
    ConvertAsWritten,
    Decision,
    Demand,
    Fact,
    Leaf,
    Mark,
    Rule,
    Site,
    choose_exactly,
    follow_inputs,
    keep_each_input,
    keep_inputs,
    move_exactly,
    sort_exactly,
    take_extremes,
    use_compute_precision,
    use_original_precision,
    use_original_precision_locally,
    use_widest_precision,
)
from .._rules.conditions import param_is, when
from .._structural import STRUCTURAL
from .classes import CLASSES
from .dictionary import policy_by_name

Op = Primitive | str
Table = dict[str, Rule]

_MOVES = frozenset(
    name
    for name, rule in CLASSES.items()
    if rule in (move_exactly, take_extremes, choose_exactly)
)
_MOVES_EACH = frozenset(
    name for name, rule in CLASSES.items() if rule in (keep_each_input, sort_exactly)
)

# What the systems say nothing of: sums over devices, and what is given by the kind of
# the primitive.
_SUMS_OVER_DEVICES = frozenset(
    name
    for name, rule in CLASSES.items()
    if isinstance(rule, ByRange) and rule.wide == keep_each_input
)
_GIVEN = {
    **{name: CLASSES[name] for name in (*FIXED, "custom_linear_solve")},
    **dict.fromkeys(
        _SUMS_OVER_DEVICES,
        ByRange(narrow=use_original_precision_locally, wide=keep_each_input),
    ),
    "convert_element_type": ConvertAsWritten(),
}


@dataclass(frozen=True)
class Promote(Rule):
    """The widest dtype among the operands, as a type promotion has it.

    Constants do not vote, unless they would not survive the compute dtype. Nor does the
    `bias` of a layer: a parameter that is smaller than what it is added to."""

    bias: bool = False

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW | Demand.FULL  # the other operands decide

    def decide(self, site: Site) -> Decision:
        facts = dict(enumerate(site.facts))
        if sum(fact is not None for fact in facts.values()) <= 1:
            return keep_inputs.decide(site)
        votes = {i: f for i, f in facts.items() if f and self._votes(site, i, f)}
        if not votes:
            votes = facts
        voters = tuple(votes.get(i) for i in facts)
        return use_widest_precision.decide(site._replace(facts=voters))

    def _votes(self, site: Site, i: int, fact: Fact) -> bool:
        values = fact.values or ()
        if fact.leaf == Leaf.CONST or (values and fact.leaf == Leaf.NO):
            return not all(survives(value, site.compute_dtype) for value in values)
        is_bias = fact.mark == Mark.NEUTRAL and not site.spreads(i)
        return not (self.bias and is_bias)


@dataclass(frozen=True)
class ComputeUnlessFull(Rule):
    """The compute dtype, unless an operand was made in full on purpose.

    As with inputs that are cast beforehand: what is drawn at random or made of integers
    inside the function is float32, and promotes what it meets."""

    @property
    def may_compute_low(self) -> bool:
        return True

    def demand(self, params: dict[str, Any], wanted: Demand) -> Demand:
        return Demand.LOW

    def decide(self, site: Site) -> Decision:
        full = any(
            fact.mark == Mark.FULL
            or not all(survives(v, site.compute_dtype) for v in fact.values or ())
            for fact in site.facts
            if fact
        )
        return (use_original_precision if full else use_compute_precision).decide(site)


@dataclass(frozen=True)
class Unlisted(Rule):
    """The author's dtypes, which neither spread nor keep others from being low."""

    def decide(self, site: Site) -> Decision:
        decision = use_original_precision.decide(site)
        outs = (fact and fact._replace(mark=Mark.NEUTRAL) for fact in decision.outs)
        return decision._replace(outs=tuple(outs), why="in no list")


_promote = Promote()


def _table(other: Rule, lists: Mapping[str, Rule], moving: Rule = keep_inputs) -> Table:
    """The rules of all primitives: by `lists`, or `other`; `moving` for movement."""
    table: Table = {}
    for name in CLASSES:
        if name in _GIVEN:
            table[name] = _GIVEN[name]
        elif name in _MOVES_EACH:
            table[name] = keep_each_input
        else:
            table[name] = moving if name in _MOVES else other
    return table | {name: rule for name, rule in lists.items() if name not in _GIVEN}


def _lists(*rows: tuple[str, Rule]) -> Table:
    return {name: rule for names, rule in rows for name in names.split()}


_CONTRACTIONS = "dot_general conv_general_dilated"


# full_precision


def full_precision() -> dict[Any, Any]:
    """Everything as its author wrote it.

    To be extended with the few ops or scopes that are to run low, or to switch mixed
    precision off where a policy must be passed.

    Returns:
        A policy dict.

    >>> from jax import lax
    >>> policy = full_precision() | {"encoder": "bfloat16"}
    >>> policy[lax.dot_general_p]
    UseOriginalPrecision(local=False)
    """
    return policy_by_name(dict.fromkeys(CLASSES, use_original_precision))


# jmp


def jmp() -> dict[Any, Any]:
    """Everything in the compute dtype, as if all inputs were cast to it beforehand.

    As `jmp.Policy(param_dtype=float32, compute_dtype=..., output_dtype=float32)` of
    google-deepmind/jmp (`jmp/_src/policy.py`, commit 9c1cdbb) around a function: its
    `cast_to_compute` casts parameters and inputs, and JAX's type promotion does the
    rest. Thus exp, powers, norms and softmax run low. What `jax.numpy` does by itself
    with 16-bit inputs is done here too: `reduce_sum` and `reduce_prod` add up in
    float32 and give a low result. Values that start inside (random numbers, integers
    made floats) are float32 and promote what they meet. Where this differs from jmp:

    - contractions always run low, also where promotion had made an input float32;
    - a constant that 16 bits can't hold (a mask of -1e9, an epsilon of 1e-8) keeps its
      op in float32; constant arrays of the function are cast as inputs are;
    - the carries of loops stay float32 unless a contraction makes them.

    Returns:
        A policy dict.

    >>> policy = jmp() | {"head": "float32"}
    """
    sums = "reduce_sum reduce_prod"
    lists = _lists(
        (f"{_CONTRACTIONS} ragged_dot_general ragged_dot", use_compute_precision),
        (sums, use_original_precision_locally),
    )
    return policy_by_name(_table(ComputeUnlessFull(), lists))


# jaxamp


def jaxamp() -> dict[Any, Any]:
    """Contractions, additions and subtractions low, all else in the author's dtypes.

    The default policy of jaxamp (acutkosky/jaxamp, `src/jaxamp/_amp.py`, commit
    36f958f): `add`, `sub`, `dot_general` and `conv_general_dilated` on the low list,
    `exp`, `log`, `mul` and `div` on the float32 list, and every other equation cast
    back to the dtypes that it was traced with, so that values go up and down often.
    Where this differs from jaxamp:

    - jaxamp leaves whole programs inside (jit, scan, cond, custom rules) in float32;
      here the lists hold inside them too;
    - jaxamp overrules `precision=HIGHEST` and dot algorithms;
    - jaxamp, as this preset, casts literals without a look: a mask of -1e9 that is
      *added* becomes -inf in float16.

    Returns:
        A policy dict.

    >>> from jax import lax
    >>> jaxamp()[lax.add_p]
    UsePrecision(dtype=None, wide_result=False)
    """
    table = dict.fromkeys(CLASSES, use_original_precision)
    low = _lists((f"add sub {_CONTRACTIONS}", use_compute_precision))
    return policy_by_name(table | low)


# PyTorch


# Run in float32: `AT_FORALL_FP32`; and `AT_FORALL_FP32_SET_OPT_DTYPE`, the sums and
# products that give float32 results unless told otherwise.
_TORCH_FP32 = """acos asin cosh cumlogsumexp erf_inv exp expm1 integer_pow log log1p
    log2 pow rsqrt sinh square tan
    cumprod cumsum reduce_prod reduce_sum"""

# What has no bfloat16 kernel on CPUs. The rest of the list (linear algebra, fft) has
# none in JAX either.
_TORCH_CPU_FP32 = "reduce_prod"


def pytorch_autocast(device_type: str = "cuda") -> dict[Any, Any]:
    """The op lists of `torch.autocast`: low, float32, and promotion for all else.

    As `aten/src/ATen/autocast_mode.h` (commit d70fe7f3) and `autocast_mode.cpp` (commit
    008ec6b1) of PyTorch. For "cuda" matrix products and convolutions run low; the exp,
    log and power families, sums and cumulative sums, and norms and losses run in
    float32. This list is the same for float16 and bfloat16. For "cpu", made for
    bfloat16, only what lacks a kernel runs in float32: exp, sums and softmax do not.
    Every other op runs in the dtype that its inputs promote to, so that one float32
    input makes the result float32. Where JAX forces a difference:

    - a bias is added by `add` here and inside of linear and convolution layers there: a
      parameter smaller than what it is added to does not promote. A parameter in any
      other op (a scale, a gate) does, as in PyTorch;
    - softmax, norms and losses are no ops here. On "cuda" their exp, rsqrt and sums run
      in float32, and so does what promotion reaches from there; the subtraction of a
      softmax's maximum and what comes before a norm's first sum do not;
    - `reciprocal` (float32 there) is `div` here, which promotes, and `addcmul`, `cross`
      and their like (promoted) are made of what promotes;
    - `bernoulli`, dropout and random numbers are float32 where they are drawn;
    - constants never promote, as Python numbers there, unless the compute dtype can't
      hold them; a 0-dimensional array is broadcast in JAX before it meets another, and
      promotes as that.

    Args:
        device_type: "cuda" (XPU and MPS are alike) or "cpu".
    Returns:
        A policy dict. Pass the low dtype as `compute_dtype` to `amp`: PyTorch's own
        defaults are float16 for "cuda" and bfloat16 for "cpu".
    Raises:
        ValueError: no such device type is known.

    >>> from jax import lax
    >>> policy = pytorch_autocast("cpu") | {lax.exp_p: "float32"}
    """
    full = {"cuda": _TORCH_FP32, "cpu": _TORCH_CPU_FP32}
    if device_type not in full:
        raise ValueError(
            f"`device_type` must be 'cuda' or 'cpu', but got {device_type!r}. The "
            "lists are the same for float16 and bfloat16: give `amp` the one that you "
            "want as `compute_dtype`."
        )
    lists = _lists(
        (_CONTRACTIONS, use_compute_precision),
        (full[device_type], use_original_precision),
        ("add", Promote(bias=True)),
    )
    return policy_by_name(_table(_promote, lists, moving=_promote))


# TensorFlow


_TF_ALLOW = _CONTRACTIONS

_TF_INFER = """add add_any div erf erfc log log1p logistic mul reduce_prod
    reduce_window_sum sqrt sub tanh"""

_TF_DENY = "exp expm1 integer_pow pow"

# The movement that TensorFlow does not list is left in float32 there.
_TF_UNLISTED = frozenset(["dynamic_update_slice", "scatter", "sort"])


def _tf_lists(dtype: str) -> dict[str, frozenset[str]]:
    infer, deny = _TF_INFER, _TF_DENY
    clear = (_MOVES | _MOVES_EACH) - _TF_UNLISTED
    if dtype == "bfloat16":
        infer, clear = f"{infer} reduce_sum rsqrt square", clear | {"scatter"}
    else:
        deny = f"{deny} reduce_sum"
    return {
        "allow": frozenset(_TF_ALLOW.split()),
        "infer": frozenset(infer.split()),
        "deny": frozenset(deny.split()),
        "clear": frozenset(clear),
    }


def tensorflow_graph_rewrite(
    dtype: DTypeLike = "float16",
    *,
    allow: Sequence[Op] = (),
    deny: Sequence[Op] = (),
    infer: Sequence[Op] = (),
    clear: Sequence[Op] = (),
    remove: Sequence[Op] = (),
) -> dict[Any, Any]:
    """The four lists of TensorFlow's graph rewrite, and its way to colour a graph.

    As `tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h` (commit
    e1c1b297) and `auto_mixed_precision.cc` (commit 0059df75): *allow* ops run low;
    *deny* ops in float32, and so does all that follows them through infer and clear
    ops; *infer* ops run low only between ops that run low; *clear* ops run in whatever
    precision their data has; an op in no list runs in float32, but lets its followers
    be low. The lists for float16 are those for CUDA, the lists for bfloat16 those for
    oneDNN, where sums, `rsqrt` and `square` are inferred. Where this differs from
    TensorFlow:

    - softmax, batch norm, layer norm and average pooling are one op there, mostly
      inferred. Here their exp is denied, and in float16 their sums, so that they run in
      float32, until the next allow op;
    - what a denied op makes denies an op only if it is as large as that op's result: a
      mean or a variance has that op computed in float32 but no more;
    - casts are made at the reader: TensorFlow also lowers the clear ops in front of an
      allow op;
    - a clear op whose inputs differ in precision is treated as an infer op;
    - backward ops are not coloured afresh: they run in the precision of the forward op;
    - constants that 16 bits can't hold keep an infer op in float32;
    - movement that only JAX has (`cummax`, `expand_dims`, collectives that move data)
      is in the clear list.

    As there, an op must leave the list that it is in before it can join another:
    `remove` stands for the environment variables `..._ALLOWLIST_REMOVE` and so on, the
    other arguments for `..._ALLOWLIST_ADD` and so on.

    Args:
        dtype: which lists: "float16" or "bfloat16"; the `compute_dtype` given to `amp`.
        allow: primitives, or their names, that are added to the allow list.
        deny: likewise, to the deny list.
        infer: likewise, to the infer list.
        clear: likewise, to the clear list.
        remove: primitives that are taken from the list that they are in, before others
            are added.
    Returns:
        A policy dict.
    Raises:
        TypeError: an argument is no sequence of primitives or names.
        ValueError: there are no lists for `dtype`.
        AmpError: an op would be in two lists, is not known, or has no low kernel.

    >>> policy = tensorflow_graph_rewrite(remove=["tanh"], deny=["tanh"])
    """
    given = {"allow": allow, "deny": deny, "infer": infer, "clear": clear}
    added = {key: names_of(ops, key, key == "deny") for key, ops in given.items()}
    removed = names_of(remove, "remove", may_be_fixed=True)
    lists = {
        key: (ops - removed) | added[key]
        for key, ops in _tf_lists(_low_dtype(dtype)).items()
    }
    check_disjoint(lists, "Take it from the one it is in by `remove`.")
    rules = {
        "allow": use_compute_precision,
        "infer": follow_inputs,
        "deny": use_original_precision,
        "clear": keep_inputs,
    }
    listed = {name: rules[key] for key, names in lists.items() for name in names}
    each = {name: keep_each_input for name in lists["clear"] & _MOVES_EACH}
    table = _table(Unlisted(), {}, moving=Unlisted())
    table |= {name: Unlisted() for name in _MOVES_EACH}
    return policy_by_name(table | _lowerable(listed) | each)


# MXNet


_MXNET_TARGET = _CONTRACTIONS

_MXNET_FP32 = {
    "float16": """acos asin atanh cosh sinh tan exp expm1 log log1p log2 pow integer_pow
        square rsqrt erf_inv reduce_sum reduce_prod cumsum digamma lgamma top_k
        approx_top_k""",
    "bfloat16": """acos asin atanh cosh sinh tan expm1 log log1p log2 pow integer_pow
        rsqrt erf_inv reduce_prod cumsum digamma lgamma top_k approx_top_k
        acosh asinh atan atan2 cbrt cos sin erf logistic rem
        abs neg sign ceil floor round clamp max min eq ne lt le gt ge is_finite argmax
        argmin reduce_max reduce_min broadcast_in_dim pad rev squeeze tile
        dynamic_update_slice scatter sort""",
}

_MXNET_WIDEST = {
    "float16": """add add_any sub mul div rem max min eq ne lt le gt ge select_n
        concatenate stack""",
    "bfloat16": "add add_any sub mul div concatenate",
}

# Ops that run in whatever dtype their inputs have.
_MXNET_EITHER = {
    "float16": """tanh logistic erf sin cos sqrt cbrt acosh asinh atan atan2
        reduce_window_sum""",
    "bfloat16": "tanh exp sqrt square reduce_sum reduce_window_sum",
}


def mxnet(
    dtype: DTypeLike = "float16",
    *,
    target: Sequence[Op] = (),
    fp32: Sequence[Op] = (),
    widest: Sequence[Op] = (),
    either: Sequence[Op] = (),
    conditional: Sequence[tuple[Op, str, Sequence[Any]]] = (),
) -> dict[Any, Any]:
    """The op lists of MXNet's AMP: target dtype, float32, widest, either, conditional.

    As `python/mxnet/amp/lists/symbol_fp16.py` and `symbol_bf16.py` of MXNet (commit
    b84609d3). Ops of the *target* list run low and those of the *float32* list in
    float32. Ops of the *widest* list run in the widest dtype among their inputs, ops of
    the *either* list in the dtype that they are given. Ops of the *conditional* list
    run in float32 where one of their parameters has certain values. The float16 lists
    keep the exp and power families, sums and norms in float32. The bfloat16 lists keep
    all but some fifty ops there, movement of data among them, so that casts abound.
    Where JAX forces a difference:

    - FullyConnected, einsum and matmul are on the target list and `dot` on the widest;
      all are `dot_general` here, which runs low. (For bfloat16, einsum and matmul are
      on the float32 list.);
    - a bias is added by `add` here, inside of the layer there: a parameter smaller than
      what it is added to is no vote for float32;
    - softmax, norms and losses are no ops here: their exp, powers and sums decide. By
      the bfloat16 lists exp and sums run low, as softmax and LayerNorm do there, but
      without the float32 accumulators of MXNet's kernels;
    - MXNet's own conditional list (softplus, elu and selu as activations) is empty
      here, for JAX makes these of exp and log1p. To match `Activation("relu")` of the
      bfloat16 lists, give `either=["max"]`;
    - an op of the either list whose inputs differ runs in the widest of their dtypes;
    - movement that only JAX has is on the either list, other ops on the float32 list;
    - constants are no votes for float32, unless the compute dtype can't hold them.

    An op that is given leaves the list that it was in; one that is given in two lists
    is an error, as it is there. To take an op from the target, float32 or widest list,
    give it in `either`.

    Args:
        dtype: which lists: "float16" or "bfloat16"; the `compute_dtype` given to `amp`.
        target: primitives, or their names, that run in the compute dtype.
        fp32: those that run in float32.
        widest: those that run in the widest dtype among their inputs.
        either: those that run in the dtype of their inputs.
        conditional: tuples `(op, parameter, values)`: in float32 where the parameter
            has one of the values, and else by the built-in list that the op is in.
    Returns:
        A policy dict.
    Raises:
        TypeError: an argument is no sequence of primitives or names.
        ValueError: there are no lists for `dtype`.
        AmpError: an op is in two lists, is not known, or has no low kernel.

    >>> policy = mxnet("bfloat16", either=["max"], fp32=["exp"])
    >>> policy = mxnet(conditional=[("integer_pow", "y", [3])], either=["integer_pow"])
    Traceback (most recent call last):
        ...
    jaxamp_like._errors.AmpError: `integer_pow` is in two lists: either and conditional.
    """
    name = _low_dtype(dtype)
    conditions = conditions_of(conditional, "conditional")
    given = {
        "target": names_of(target, "target"),
        "fp32": names_of(fp32, "fp32", may_be_fixed=True),
        "widest": names_of(widest, "widest"),
        "either": names_of(either, "either"),
        "conditional": frozenset(op for op, _, _ in conditions),
    }
    check_disjoint(given)
    lists = _lists(
        (_MXNET_TARGET, use_compute_precision),
        (_MXNET_FP32[name], use_original_precision),
        (_MXNET_WIDEST[name], _promote),
        (_MXNET_EITHER[name], _promote),
        ("add", Promote(bias=True)),
    )
    rules = {
        "target": use_compute_precision,
        "fp32": use_original_precision,
        "widest": _promote,
        "either": _promote,
    }
    table = _table(use_original_precision, lists, moving=_promote)
    table |= _lowerable({op: rule for key, rule in rules.items() for op in given[key]})
    for op, parameter, values in conditions:
        holds = param_is(parameter, *values)
        table[op] = when(holds, use_original_precision, table[op])
    return policy_by_name(table)


# The user's lists


def _low_dtype(dtype: DTypeLike) -> str:
    name = as_float_dtype(dtype, "dtype").name
    if name not in ("float16", "bfloat16"):
        raise ValueError(
            f"There are lists for 'float16' and 'bfloat16', but `dtype` is {name!r}."
        )
    return name


def names_of(
    ops: Sequence[Op], argument: str, may_be_fixed: bool = False
) -> frozenset[str]:
    """The names of `ops`, each of them known and such that a rule can stand for it."""
    if isinstance(ops, str | Primitive) or not isinstance(ops, Iterable):
        raise TypeError(
            f"`{argument}` must be a sequence of primitives or of their names, such as "
            f"['tanh'], but got {ops!r}."
        )
    names = frozenset(_name(op, argument) for op in ops)
    fixed = sorted(names & FIXED)
    if fixed and not may_be_fixed:
        raise AmpError(
            f"`{fixed[0]}` of `{argument}` only exists in the dtypes that it was "
            "traced with: it has no low-precision kernel, or carries code in these "
            "dtypes."
        )
    return names


def _name(op: Any, argument: str) -> str:
    if not isinstance(op, str | Primitive):
        raise TypeError(
            f"`{argument}` must hold primitives, such as `jax.lax.tanh_p`, or their "
            f"names, such as 'tanh', but holds {op!r}."
        )
    name = op if isinstance(op, str) else op.name
    if name in STRUCTURAL:
        raise AmpError(
            f"`{name}` of `{argument}` holds a whole program, so no list can decide "
            "for it; the ops inside are looked up one by one."
        )
    if isinstance(op, str) and name not in CLASSES:
        close = get_close_matches(name, CLASSES, 3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise AmpError(
            f"No primitive is called {name!r}, which `{argument}` holds.{hint} A "
            "primitive of your own is given as an object, not by its name."
        )
    return name


def conditions_of(
    conditional: Sequence[tuple[Op, str, Sequence[Any]]], argument: str
) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Conditions as they were given, checked, with the names of the ops."""
    conditions = []
    for entry in conditional:
        is_triple = isinstance(entry, tuple | list) and len(entry) == 3
        if not is_triple or isinstance(entry[2], str):
            raise TypeError(
                f"`{argument}` must hold tuples `(op, parameter, values)`, such as "
                f"('integer_pow', 'y', [3]), but holds {entry!r}."
            )
        op, parameter, values = entry
        (name,) = names_of([op], argument)
        conditions.append((name, parameter, tuple(values)))
    return conditions


def check_disjoint(lists: Mapping[str, frozenset[str]], hint: str = "") -> None:
    """Raises an `AmpError` if an op is in two of the `lists`."""
    homes: dict[str, str] = {}
    for key, names in lists.items():
        for name in sorted(names):
            if name in homes:
                raise AmpError(
                    f"`{name}` is in two lists: {homes[name]} and {key}. {hint}".strip()
                )
            homes[name] = key


def _lowerable(table: Table) -> Table:
    """Without the primitives whose rule is given: they stay as they were written."""
    return {name: rule for name, rule in table.items() if name not in FIXED}
