"""Contractions of 8-bit operands: rules that quantise, and what they are made of.

`formats` says how numbers become 8 bits and a scale, `axes` which scales a contraction
can carry past its sums, `linear` how a contraction whose operands are quantised is
differentiated, `delayed` how scales follow from steps before, `rule` what `float8` and
`int8` have in common. Above `_rules`, below `_policies`."""

from .float8 import float8 as float8
from .int8 import int8 as int8
from .worth import worth_eight_bits as worth_eight_bits
