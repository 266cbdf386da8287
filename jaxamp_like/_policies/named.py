"""`Policy`: what to compute, store and return in, as one value with a name."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from .._dtypes import DType, as_compute_dtype, as_float_dtype, bits, cast, is_float
from .._errors import AmpError, warn_or_raise
from .._frameworks.nnx import nnx_nodes
from .._jax import is_array_or_shape
from .._rules import Site
from .._suggestions import no_attribute
from .codec import decode_rules, encode_rules, own_rules
from .dictionary import Lookup, default_amp_policy
from .frozen import FrozenRules, checked_policy
from .limit import Limit, limited
from .measured import Contractions, Measured, limited_to
from .mistakes import is_like_policy_name, naming_mistakes, refusing_order_of_jmp

_Tree = TypeVar("_Tree")


@jax.tree_util.register_static
@dataclass(frozen=True, init=False, repr=False)
class Policy:
    """The dtypes to compute, store and return in, and the rules in between.

    It is an immutable value and a pytree without leaves. It is hashable, so that it can
    be a static argument of `jax.jit` or a static field of a module. It is equal to any
    other that says the same, printed as the code that makes it, and saved by `to_dict`.

    Args:
        compute_dtype: what contractions, and the ops between them, compute in. `None`
            leaves everything as it is written, except where a rule names a dtype.
        param_dtype: the dtype to which `cast_to_param` casts a model, once. `None`
            leaves parameters as they are. `amp` does not look at it.
        output_dtype: what `amp` casts the floating results of a function to. `None`
            leaves them in the dtypes that the author gave them.
        rules: a policy dict, as `amp` takes it; `default_amp_policy` if not given.
        limit: where the policy holds; `only`, `excluding` and `where` make one.
        measured: the contractions that `calibrate` has measured: maps paths of scopes
            to primitives, perhaps with shapes. Other contractions are left as written,
            and `amp` warns of them. `None` lowers all that the rules lower.
    Raises:
        TypeError, ValueError: a dtype is no floating dtype or needs x64; a key or rule
            is of the wrong kind; or dtypes without names stand in the order of
            `jmp.Policy`, which begins with `param_dtype`.
        AmpError: a rule can't be followed for the primitive that is its key, or
            `measured` names something else than contractions.

    >>> policy = Policy("bfloat16", param_dtype="float32")
    >>> policy
    Policy(compute_dtype='bfloat16', param_dtype='float32')
    >>> from jaxamp_like import amp, get_policy
    >>> policy == get_policy("mixed_bfloat16")
    True
    >>> dot = amp(jax.numpy.dot, amp_policy=policy)

    It is modelled on `jmp.Policy` (google-deepmind/jmp), which casts at the boundaries
    of functions only."""

    compute_dtype: DType | None
    param_dtype: DType | None
    output_dtype: DType | None
    rules: FrozenRules | None
    limit: Limit | None
    measured: Measured | None

    @naming_mistakes
    @refusing_order_of_jmp
    def __init__(
        self,
        compute_dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        output_dtype: DTypeLike | None = None,
        rules: Mapping[Any, Any] | None = None,
        *,
        limit: Limit | None = None,
        measured: Mapping[str, Contractions] | Measured | None = None,
    ):
        given = {
            "compute_dtype": compute_dtype,
            "param_dtype": param_dtype,
            "output_dtype": output_dtype,
        }
        for name, dtype in given.items():
            as_dtype = as_compute_dtype if name == "compute_dtype" else as_float_dtype
            value = None if dtype is None else _as_dtype(as_dtype, dtype, name)
            object.__setattr__(self, name, value)
        frozen = None if rules is None else FrozenRules(rules, in_order=True)
        object.__setattr__(self, "rules", None if frozen == _default() else frozen)
        object.__setattr__(self, "limit", limit)
        if measured is not None and not isinstance(measured, Measured):
            measured = Measured.from_dict(measured)
        object.__setattr__(self, "measured", measured)

    def __or__(self, other: Any) -> NoReturn:
        raise TypeError(
            "A `Policy` is no dict of rules, and can't be joined with one. Give the "
            "rules to it, `Policy('bfloat16', rules=default_amp_policy | {...})`, or "
            "to `amp`: `compute_dtype='bfloat16', amp_policy=default_amp_policy | "
            "{...}`. `PolicyMap` gives scopes policies of their own."
        )

    __ror__ = __or__

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, _ELSEWHERE.get(name, ""))

    # Trees.

    def cast_to_param(self, tree: _Tree) -> _Tree:
        """Casts the floating arrays of a pytree to `param_dtype`, and nothing else.

        Apply it once, to the parameters that training starts from. It warns of the
        states of optimizers and loss scales, which would lose what they count on.

        Args:
            tree: any pytree; JAX and NumPy arrays and `jax.ShapeDtypeStruct`s in it are
                cast if their dtype is real and floating.
        Returns:
            The tree, with other leaves (integers, keys, Python numbers) as they were.
        Raises:
            TypeError: the tree holds an NNX module, which is no pytree.

        >>> policy = Policy("bfloat16", param_dtype="bfloat16")
        >>> tree = policy.cast_to_param({"w": np.ones(2), "step": np.arange(2)})
        >>> tree["w"].dtype.name, tree["step"].dtype.name
        ('bfloat16', 'int64')
        """
        if self.param_dtype is not None:
            _warn_of_states(tree, self.param_dtype)
        return _cast_floats(tree, self.param_dtype)

    def cast_to_compute(self, tree: _Tree) -> _Tree:
        """Like `cast_to_param`, but to `compute_dtype`. `amp` does not need it."""
        return _cast_floats(tree, self.compute_dtype)

    def cast_to_output(self, tree: _Tree) -> _Tree:
        """Like `cast_to_param`, but to `output_dtype`. `amp` so casts its results."""
        return _cast_floats(tree, self.output_dtype)

    # Limits.

    def only(self, *keys: Any) -> Self:
        """This policy where one of `keys` matches, and the author's dtypes elsewhere.

        Args:
            keys: primitives, scopes, paths of scopes or compiled regular expressions,
                as keys of a policy dict.
        Returns:
            A policy.
        Raises:
            TypeError, ValueError: a key is of the wrong kind, there is none, or the
                policy is limited already.

        >>> from jax import lax
        >>> policy = Policy("bfloat16").only(lax.dot_general_p, "encoder")
        """
        return self._limited(Limit.by_keys("only", keys))

    def excluding(self, *keys: Any) -> Self:
        """This policy, but the author's dtypes where one of `keys` matches.

        Args:
            keys: as for `only`.
        Returns:
            A policy.
        Raises:
            TypeError, ValueError: as for `only`.

        >>> policy = Policy("bfloat16").excluding("norm", "eqx.nn.BatchNorm")
        """
        return self._limited(Limit.by_keys("excluding", keys))

    def where(self, predicate: Callable[[Site], bool]) -> Self:
        """This policy for the equations that `predicate` accepts; see `when`.

        Args:
            predicate: is called with a `Site` (with its `primitive`, `scope`, `params`,
                `avals`, ...) and returns a bool. It must be hashable; define it once.
        Returns:
            A policy.
        Raises:
            TypeError: `predicate` is not callable.
            ValueError: the policy is limited already.

        >>> def outside_of_norms(site):
        ...     return not any("Norm" in name for name in site.scope)
        >>> policy = Policy("bfloat16").where(outside_of_norms)
        """
        return self._limited(Limit.by_predicate(predicate))

    def _limited(self, limit: Limit) -> Self:
        if self.limit is not None:
            raise ValueError(
                f"This policy is limited by `{self.limit.kind}` already, so it can't "
                f"be limited by `{limit.kind}` too: give all keys at once, or say what "
                "you mean by one predicate, `policy.where(predicate)`."
            )
        return replace(self, limit=limit)

    # Data.

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain data that `json.dumps` takes.

        Returns:
            A dict of strings, numbers, lists and dicts.
        Raises:
            AmpError: the policy holds a function of yours, or a primitive that JAX does
                not export.

        >>> Policy("float16", "float32").to_dict()
        {'compute_dtype': 'float16', 'param_dtype': 'float32'}
        """
        data: dict[str, Any] = {k: dtype.name for k, dtype in self._dtypes().items()}
        if self.rules is not None:
            data["rules"] = encode_rules(self.rules)
        if self.limit is not None:
            data["limit"] = self.limit.to_dict()
        if self.measured is not None:
            data["measured"] = self.measured.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The policy of which `data` is the `to_dict`.

        Args:
            data: a dict, perhaps from JSON.
        Returns:
            A policy, equal to the one that was saved.
        Raises:
            TypeError, ValueError, AmpError: the data is not that of a policy, or names
                what this version of JAX or of the library does not have.

        >>> Policy.from_dict({"compute_dtype": "bfloat16"})
        Policy(compute_dtype='bfloat16')
        """
        known = (*DTYPE_FIELDS, "rules", "limit", "measured")
        if isinstance(data, Mapping) and "default_policy" in data:
            raise ValueError(
                "The data is that of a `PolicyMap`: read it by "
                "`PolicyMap.from_dict(data)`."
            )
        if not isinstance(data, Mapping) or not set(data) <= set(known):
            raise ValueError(
                f"The data of a policy is a dict with the keys {', '.join(known)}, but "
                f"got {data!r}."
            )
        rules, limit = data.get("rules"), data.get("limit")
        try:
            rules = None if rules is None else decode_rules(rules)
            limit = None if limit is None else Limit.from_dict(limit)
        except (KeyError, AttributeError) as e:
            raise ValueError(
                f"The data of a policy is malformed: {e!r} in {data!r}. Use what "
                "`to_dict` gave."
            ) from e
        return cls(**{**data, "rules": rules, "limit": limit})

    def _dtypes(self) -> dict[str, DType]:
        values = {name: getattr(self, name) for name in DTYPE_FIELDS}
        return {name: dtype for name, dtype in values.items() if dtype is not None}

    def __repr__(self) -> str:
        if self.rules is None and self.limit is None:
            fields = [f"{name}={value!r}" for name, value in self.to_dict().items()]
            return f"Policy({', '.join(fields)})"
        try:
            return f"Policy.from_dict({self.to_dict()!r})"
        except AmpError:  # a function in it: can be shown, but not written as code
            fields = [f"{name}={d.name!r}" for name, d in self._dtypes().items()]
            if self.rules is not None:
                name, own = own_rules(self.rules)
                fields.append(f"rules={name} | {own!r}" if name else f"rules={own!r}")
            if self.limit is not None:
                fields.append(f"limit={self.limit!r}")
            return f"Policy({', '.join(fields)})"

    # What `amp` asks.

    def lookup(self) -> Lookup:
        """The checked policy that finds rules; one object for equal policies."""
        rules = _default_as_given() if self.rules is None else self.rules
        rules = checked_policy(rules)
        found = rules if self.limit is None else limited(rules, self.limit)
        return found if self.measured is None else limited_to(self.measured, found)


DTYPE_FIELDS = ("compute_dtype", "param_dtype", "output_dtype")


# What the policies of Keras and jmp have, and what to write here.
_ELSEWHERE = {
    "variable_dtype": "Did you mean `param_dtype`?",
    "name": "A policy is printed as the code that makes it: `repr(policy)`.",
    "replace": "Write `dataclasses.replace(policy, compute_dtype=...)`.",
} | {
    f"with_{field}": f"Write `dataclasses.replace(policy, {field}=...)`."
    for field in DTYPE_FIELDS
}


@functools.cache
def _default() -> FrozenRules:
    return FrozenRules(default_amp_policy, in_order=True)


@functools.cache
def _default_as_given() -> FrozenRules:
    """The default policy, with its keys in the order in which users have them."""
    return FrozenRules(default_amp_policy)


def _as_dtype(as_dtype: Callable[..., DType], value: Any, argument: str) -> DType:
    try:
        return as_dtype(value, argument)
    except TypeError as e:
        if is_like_policy_name(value):
            raise TypeError(f"{e} A policy is made of its name by `get_policy`.") from e
        raise


def _warn_of_states(tree: Any, dtype: DType) -> None:
    """Warns if casting would round the state of an optimizer or of a loss scale."""
    states = (x for x in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(x))
    for state in states:
        dtypes = (x.dtype for x in jax.tree.leaves(state) if is_array_or_shape(x))
        if any(is_float(one) and bits(one) > bits(dtype) for one in dtypes):
            warn_or_raise(
                f"`cast_to_param` was given a `{type(state).__name__}`, too, and "
                f"rounds it to {dtype.name}: means of squares become zero there, and a "
                "loss scale overflows. Cast the parameters alone, `params = "
                "policy.cast_to_param(params)`, and make the state of them, "
                "`tx.init(params)`. To store a state in fewer bits, wrap the "
                "optimizer: `storage.low_bit_state(tx)`.",
                strict=False,
            )
            return


def _is_state(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] in ("optax", "jaxamp_like")


def _cast_floats(tree: Any, dtype: DType | None) -> Any:
    if dtype is None:
        return tree

    def leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=dtype) if is_float(x.dtype) else x
        if isinstance(x, np.ndarray | np.generic):
            return x.astype(dtype) if is_float(x.dtype) else x
        if isinstance(x, jax.Array):
            return cast(x, dtype) if is_float(x.dtype) else x
        if nnx_nodes([x]):
            raise TypeError(
                f"The tree holds the NNX module {type(x).__name__}, which is no pytree."
                " Cast its state: `nnx.update(model, policy.cast_to_param("
                "nnx.state(model)))`."
            )
        return x

    return jax.tree.map(leaf, tree)
