"""Bodies that are rewritten, while what goes in and out keeps the author's dtypes."""

from typing import Any

from .._jax import Eqn, raw, rebind, subjaxprs
from .._rules import Fact, Precision, Site, author_dtype
from .base import Body, Planner, ProgramBinder, Step, author_facts, decision_of


def decide_pinned(planner: Planner, eqn: Eqn, site: Site):
    inner = tuple(
        planner.plan(jaxpr, author_facts(jaxpr), site.scope)
        for jaxpr in subjaxprs(eqn.params)
    )
    outs = (author and Fact(author, Precision.FULL) for author in site.out_authors)
    return decision_of(
        site, site.authors, outs, "its dtypes are part of a contract"
    ), inner


def bind_pinned(binder: ProgramBinder, step: Step, operands: list[Any]):
    plans = iter(step.inner)

    def rewrite(value):
        if isinstance(value, tuple):  # a NamedTuple of jaxprs, such as a linear solve's
            items = [rewrite(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not hasattr(raw(value), "eqns"):
            return value
        authors = tuple(author_dtype(v.aval) for v in raw(value).outvars)
        return binder.close(next(plans), value, authors)

    params = {name: rewrite(value) for name, value in step.eqn.params.items()}
    return rebind(step.eqn, operands, params)


def no_bodies(eqn: Eqn) -> list[Body]:
    return []
