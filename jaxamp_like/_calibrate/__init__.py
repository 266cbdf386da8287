"""Choosing the policy by measurement; see `calibrate`.

The modules, in the order in which they import each other: `candidates` (the low
precisions), `rounding`, `contraction_roundings` (what each candidate rounds at a
contraction), `budget`, `measured_function` (what is measured; `fingerprint` tells it
from others), `marks` (where a program might round), `choosing` (an input says which
marks do round), `costs`, `groups` (what is decided together), `prices`, `search`,
`survey` (the contractions of a program), `sizes` (which sizes of theirs a policy may go
by), `program` (all of this), `runs` (passes, each remembered in `state`), `policies`
(choices as a policy), `kept` (the bytes that one keeps), `records`, `chart` and
`result` (what was found), `trials` (what the user is told), `deciding` (what is tried,
and in which order), `progress`, `calibrate`."""

from .budget import Budget as Budget
from .calibrate import calibrate as calibrate
from .costs import Device as Device
from .result import Calibration as Calibration
