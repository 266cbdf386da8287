"""TensorFlow: the graph rewrite."""

from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike

from ..._rules import (
    follow_inputs,
    keep_each_input,
    keep_inputs,
    use_compute_precision,
    use_original_precision,
)
from ..dictionary import policy_by_name
from .common import CONTRACTIONS, MOVES, MOVES_EACH, ListsFor, Op, Unlisted, make_table
from .user_lists import check_disjoint, low_dtype, lowerable, names_of

_TF_ALLOW = CONTRACTIONS

_TF_INFER = """add add_any div erf erfc log log1p logistic mul reduce_prod
    reduce_window_sum sqrt sub tanh"""

_TF_DENY = "exp expm1 integer_pow pow"

# The movement that TensorFlow does not list is left in float32 there.
_TF_UNLISTED = frozenset(["dynamic_update_slice", "scatter", "sort"])


def _tf_lists(dtype: str) -> dict[str, frozenset[str]]:
    infer, deny = _TF_INFER, _TF_DENY
    clear = (MOVES | MOVES_EACH) - _TF_UNLISTED
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
    """The four lists of TensorFlow's graph rewrite, and how it applies them to a graph.

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
    - the result of a denied op denies a reader only if it is as large as the reader's
      result: a mean or a variance makes its reader compute in float32, but no others;
    - casts are made at the reader: TensorFlow also lowers the clear ops in front of an
      allow op;
    - a clear op whose inputs differ in precision is treated as an infer op;
    - the lists don't decide backward ops: they run in the precision of the forward op;
    - constants that 16 bits can't hold keep an infer op in float32;
    - movement that only JAX has (`cummax`, `expand_dims`, collectives that move data)
      is in the clear list.

    As there, an op must leave the list that it is in before it can join another:
    `remove` stands for the environment variables `..._ALLOWLIST_REMOVE` and so on, the
    other arguments for `..._ALLOWLIST_ADD` and so on.

    Args:
        dtype: which lists: "float16" or "bfloat16". `amp` computes in it, unless it is
            given another `compute_dtype`.
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
    low = low_dtype(dtype)
    lists = {key: (ops - removed) | added[key] for key, ops in _tf_lists(low).items()}
    check_disjoint(lists, "Take it from the one it is in by `remove`.")
    rules = {
        "allow": use_compute_precision,
        "infer": follow_inputs,
        "deny": use_original_precision,
        "clear": keep_inputs,
    }
    listed = {name: rules[key] for key, names in lists.items() for name in names}
    each = {name: keep_each_input for name in lists["clear"] & MOVES_EACH}
    table = make_table(Unlisted(), {}, moving=Unlisted())
    table |= {name: Unlisted() for name in MOVES_EACH}
    return ListsFor(policy_by_name(table | lowerable(listed) | each), low)
