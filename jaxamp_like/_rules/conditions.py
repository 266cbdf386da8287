"""`when`: a rule that picks between two by looking at the equation, and predicates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from .._errors import AmpError, warn_or_raise, why_not_called
from .._primitives.contractions import at, dot_numbers, rest, summed_axes
from .._suggestions import did_you_mean
from . import Decision, Rule, Site
from .base import DelegatingRule
from .user_rules import as_rule, display_name, is_made_by_calling, short


@dataclass(frozen=True)
class When(DelegatingRule):
    """One rule where the predicate holds, another elsewhere; see `when`."""

    predicate: Callable[[Site], bool]
    rule: Rule
    otherwise: Rule

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise TypeError(
                "`predicate` must be callable with a `Site` and return a bool, but got "
                f"{self.predicate!r}. For example: `sums_more_than(4096)`."
            )
        if isinstance(self.predicate, Rule):
            raise TypeError(
                f"`predicate` is the rule {self.predicate!r}. The predicate comes "
                "first: `when(predicate, rule, otherwise)`."
            )
        if is_made_by_calling(self.predicate):
            raise TypeError(
                f"`predicate` is `{self.predicate.__name__}`, which makes a predicate "
                f"when it is called: write `{display_name(self.predicate)}`."
            )
        refuse_misfit(self.predicate, "predicate")
        super().__post_init__()

    @property
    def parts(self) -> tuple[Rule, ...]:
        return self.rule, self.otherwise

    def for_equation(self, params: dict[str, Any], avals: Sequence[Any]) -> Rule:
        rules = (rule.for_equation(params, avals) for rule in self.parts)
        return When(self.predicate, *rules)

    def decide(self, site: Site) -> Decision:
        if site.primitive is not None:
            for one, other in zip(self.parts, self.parts[::-1], strict=True):
                if not one.is_for(site.primitive.name):
                    return other.decide(site)
        holds = evaluate_predicate(self.predicate, site, "a `when` rule")
        decision = (self.rule if holds else self.otherwise).decide(site)
        why = f"{decision.why} ({'' if holds else 'not '}{name_of(self.predicate)})"
        return decision._replace(why=why)


def refuse_misfit(predicate: Callable[..., Any], argument: str) -> None:
    """Raises for a function that can't be called with a `Site` alone."""
    if misfit := why_not_called(predicate, (None,)):
        raise TypeError(
            f"`{argument}` is {short(predicate)}, which can't be called as a "
            f"predicate: {misfit}. A predicate takes a `Site`, which tells of one "
            "equation, and returns a bool. What computes is given to `amp`, and its "
            "scopes are keys of the policy."
        )


def evaluate_predicate(predicate: Callable[[Site], Any], site: Site, of: str) -> bool:
    """What a predicate of a user says of a site; `of` is its owner, in words.

    Raises:
        AmpError: it raises, or returns no bool."""
    where = f"The predicate `{name_of(predicate)}` of {of}"
    site = site._replace(scope=_Names(site.scope))
    try:
        answer = predicate(site)
    except Exception as e:
        what = str(e) if isinstance(e, AmpError) else f"{type(e).__name__}: {e}"
        raise AmpError(f"{where} failed. {what}") from e
    if not isinstance(answer, bool | np.bool_):
        raise AmpError(
            f"{where} must return a bool, but returned "
            f"{type(answer).__name__}: {answer!r}."
        )
    return bool(answer)


class _Names(tuple[str, ...]):
    """The names of a scope, which say so if they are compared with a single one."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            warn_or_raise(
                f"A predicate compares `site.scope` with the string {other!r}, but it "
                "is a tuple of names, the outermost first. Write "
                f"`{other!r} in site.scope`, or compare it with a tuple.",
                strict=False,
            )
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return tuple.__hash__(self)


def when(
    predicate: Callable[[Site], bool],
    rule: Rule | DTypeLike | Callable[..., Any],
    otherwise: Rule | DTypeLike | Callable[..., Any],
) -> Rule:
    """Uses `rule` for the equations of which `predicate` holds, and else `otherwise`.

    The predicate is called with a `Site` each time that a function is traced: it reads
    the equation's `primitive`, `params`, `scope`, the `avals` (shapes and the author's
    dtypes) of operands and results (`out_avals`), and the `compute_dtype`. It must be
    hashable, as every rule; define it once, since two lambdas never are equal, and a
    policy that is equal to one used before is not traced again.

    Ready ones: `sums_more_than`, `smaller_than`, `not_divisible_by`, `param_is`.

    The ops before the equation are decided before the predicate is asked. Those that
    follow their inputs may run low for the equation's sake if one of the two rules
    reads low. The carry of a loop that passes through the equation is low only if both
    rules compute low.

    Args:
        predicate: tells by a bool whether `rule` is to be used.
        rule: a rule, a dtype that stands for `use_precision(dtype)`, or a casting
            callback.
        otherwise: likewise.
    Returns:
        A rule to put in a policy.
    Raises:
        TypeError: an argument is of the wrong kind.
        AmpError: when a function is traced, if the predicate raises or returns no bool.

    >>> from jax import lax
    >>> from jaxamp_like import default_amp_policy
    >>> from jaxamp_like.rules import use_compute_precision
    >>> careful = when(sums_more_than(4096), "float32", use_compute_precision)
    >>> policy = default_amp_policy | {lax.dot_general_p: careful}

    MXNet's conditional list (`CONDITIONAL_FP32_FUNCS`) does the same for one parameter
    of an op."""
    return When(predicate, as_rule(rule, "rule"), as_rule(otherwise, "otherwise"))


@dataclass(frozen=True, repr=False)
class Predicate:
    """A ready predicate: equal to another with the same arguments."""

    test: Callable[..., bool]
    args: tuple[Any, ...]

    def __call__(self, site: Site) -> bool:
        return self.test(site, *self.args)

    def __repr__(self) -> str:
        args = ", ".join(map(repr, self.args))
        return f"{self.test.__name__.lstrip('_')}({args})"


def sums_more_than(terms: int) -> Predicate:
    """Holds where each element of the result is a sum of more than `terms` terms.

    For a contraction that is the length of the contracted axes, for a convolution the
    size of a filter, for `reduce_sum`, `cumsum` and the like (products too) the length
    of the axes that are summed over. Any other op sums nothing. An axis whose length is
    symbolic counts as long.

    Args:
        terms: the most terms of which it does not hold.
    Returns:
        A predicate for `when`.
    Raises:
        ValueError: `terms` is no positive integer.

    >>> sums_more_than(4096)
    sums_more_than(4096)
    """
    return Predicate(_sums_more_than, (positive(terms, "terms"),))


def smaller_than(elements: int) -> Predicate:
    """Holds where no operand and no result has `elements` elements or more.

    For ops that are too small for low precision to pay for its casts. An array with a
    symbolic dimension counts as large.

    Args:
        elements: the least number of elements of which it does not hold.
    Returns:
        A predicate for `when`.
    Raises:
        ValueError: `elements` is no positive integer.

    >>> smaller_than(1024)
    smaller_than(1024)
    """
    return Predicate(_smaller_than, (positive(elements, "elements"),))


def not_divisible_by(divisor: int = 8) -> Predicate:
    """Holds where a side of a matrix product is no multiple of `divisor`.

    Tensor cores work on tiles: 16-bit products whose sides are no multiples of 8 run
    slower or not on them at all. The sides of a contraction are its rows, its columns
    and the contracted length; those of a convolution its channels, in (of one group)
    and out. Any other op has no sides. A symbolic side counts as a multiple.

    Args:
        divisor: what the sides should be multiples of.
    Returns:
        A predicate for `when`.
    Raises:
        ValueError: `divisor` is no positive integer.

    >>> not_divisible_by()
    not_divisible_by(8)

    NVIDIA, "Train With Mixed Precision" (user's guide), on tensor core shapes."""
    return Predicate(_not_divisible_by, (positive(divisor, "divisor"),))


def param_is(name: str, *values: Any) -> Predicate:
    """Holds where the primitive's parameter `name` is one of `values`.

    MXNet's AMP has this as its conditional list. Under the key of a scope, ops that
    have no such parameter are passed over; under that of a primitive, that is an error.

    Args:
        name: as in the printed jaxpr, such as "y" of `integer_pow`.
        values: what it is compared with.
    Returns:
        A predicate for `when`.
    Raises:
        TypeError: `name` is no string.
        ValueError: no values are given.

    >>> param_is("y", 2, 3)
    param_is('y', 2, 3)
    """
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be a string, such as 'y' of `integer_pow`, but got {name!r}."
        )
    if not values:
        raise ValueError("`param_is` needs a value to compare with: `param_is('y', 2)`")
    return Predicate(_param_is, (name, *values))


def _sums_more_than(site: Site, terms: int) -> bool:
    axes = _summed(site)
    if not all(isinstance(d, int) for d in axes):
        return True
    return bool(axes) and prod(axes) > terms


def _smaller_than(site: Site, elements: int) -> bool:
    shapes = [getattr(aval, "shape", ()) for aval in (*site.avals, *site.out_avals)]
    return all(
        all(isinstance(d, int) for d in shape) and prod(shape) < elements
        for shape in shapes
    )


def _not_divisible_by(site: Site, divisor: int) -> bool:
    return any(
        all(isinstance(d, int) for d in side) and prod(side) % divisor != 0
        for side in _sides(site)
    )


def _param_is(site: Site, name: str, *values: Any) -> bool:
    if name in site.params:
        return any(bool(site.params[name] == value) for value in values)
    if site.by_scope:
        return False
    raise AmpError(
        f"`{site.primitive}` has no parameter {name!r}, only: "
        f"{', '.join(site.params) or 'none'}.{did_you_mean(name, site.params)}"
    )


def _summed(site: Site) -> tuple[Any, ...]:
    """The lengths of the axes over which each element of the result is a sum."""
    name, params = site.primitive.name, site.params
    shape = getattr(site.avals[0], "shape", ()) if site.avals else ()
    if dot_numbers(params) is not None or name == "conv_general_dilated":
        return summed_axes(params, site.avals)
    if name in ("reduce_sum", "reduce_prod"):
        return at(shape, params["axes"])
    if name in ("cumsum", "cumprod", "cumlogsumexp"):
        return (shape[params["axis"]],)
    if name == "reduce_window_sum":
        return tuple(params["window_dimensions"])
    return ()


def _sides(site: Site) -> list[tuple[Any, ...]]:
    """The sides of a matrix product, each as the dimensions that make it up."""
    if (dot := dot_numbers(site.params)) is not None:
        contracted, batch = dot
        ragged = site.params.get("ragged_dot_dimension_numbers")
        groups = getattr(ragged, "rhs_group_dimensions", ())  # a matrix for each
        lhs, rhs = (site.avals[i].shape for i in (0, 1))
        rows = rest(lhs, (*contracted[0], *batch[0]))
        columns = rest(rhs, (*contracted[1], *batch[1], *groups))
        return [rows, columns, at(lhs, contracted[0])]
    if site.primitive.name == "conv_general_dilated":
        out, into, *_ = site.params["dimension_numbers"].rhs_spec
        return [(site.avals[1].shape[axis],) for axis in (out, into)]
    return []


def positive(value: Any, argument: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer, but got {value!r}.")
    return value


def name_of(predicate: Any) -> str:
    return getattr(predicate, "__name__", None) or repr(predicate)
