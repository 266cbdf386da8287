"""Values by number: equal numbers mean equal values, told from the program alone.

What is made by the same operation of the same values has one number, after Alpern,
Wegman, Zadeck, "Detecting equality of variables in programs" (1988)."""

from collections.abc import Hashable

import numpy as np

from .._jax import Eqn, Literal, has_effect


def operation_of(eqn: Eqn) -> Hashable:
    """The operation of an equation: with its operands, it determines the results.

    It is `None` if it can't be hashed, or if the equation has effects."""
    made = (eqn.primitive.name, *eqn.params.items())
    try:
        hash(made)
    except TypeError:
        return None
    return None if has_effect(eqn) else made


def value_of(literal: Literal) -> Hashable:
    """The value of a literal, as something that can be compared and hashed."""
    value = np.asarray(literal.val)
    return "literal", value.dtype.name, value.shape, value.tobytes()
