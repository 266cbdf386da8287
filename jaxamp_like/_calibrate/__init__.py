"""Choosing the policy by measurement; see `calibrate`.

In the order of imports: `candidates` (the low precisions), `rounding`, `places` (what
each rounds at a contraction), `budget`, `subject` (what is measured; `fingerprint`
tells it from others), `marks` (where a program might round), `choosing` (which of these
do, as an input), `costs`, `groups` (what is decided together), `prices`, `survey` (the
contractions of a program), `sizes` (what their shapes hold for), `program` (all of
this), `runs` (passes, each remembered in `state`), `search`, `policies` (choices as a
policy), `records`, `chart` and `result` (what was found), `account` (what is said),
`deciding`, `calibrate`."""

from .budget import Budget as Budget
from .calibrate import calibrate as calibrate
from .costs import Device as Device
from .result import Calibration as Calibration
