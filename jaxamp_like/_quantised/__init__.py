"""Contractions of rounded operands: rules that quantise, and what they are made of.

A format of numbers is a file with one rule, in `FORMATS`: how operands are rounded and
scaled, which of the three contractions reads what, where it is native, and what a user
may choose. `rule` is what formats have in common, `passes` how the three contractions
of rounded operands are made, `linear` how such a contraction is transposed, `axes`
which scales can be carried past its sums, `gathered` what is rounded before devices
gather it, `delayed` how scales follow from steps
before. The package stands above `_rules` and below `_policies`."""

from collections.abc import Mapping

from .float8 import Float8, float8 as float8
from .int4 import Int4, int4 as int4
from .int8 import Int8, int8 as int8
from .mxfp8 import Mxfp8, mxfp8 as mxfp8
from .nvfp4 import Nvfp4, nvfp4 as nvfp4
from .rule import Quantising
from .worth import worth_eight_bits as worth_eight_bits

FORMATS: Mapping[str, type[Quantising]] = {
    one.name: one for one in (Int8, Float8, Mxfp8, Nvfp4, Int4)
}
"""The formats, by the names that policies, candidates and reports have for them."""
