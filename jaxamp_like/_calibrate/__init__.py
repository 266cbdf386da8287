"""Choosing the policy by measurement; see `calibrate`.

In the order of imports: `marks` (where a program might round), `threaded` (which of
these do, as an input), `groups` (what is decided together), `costs`, `budget`,
`subject` (what is measured; `fingerprint` tells it from others), `runs` (passes, each
remembered in `state`), `sizes` (what the shapes of contractions hold for), `search`,
`policies` (choices as a policy), `evidence` and its views (`page`, `views`), `result`,
`deciding`, `calibrate`."""

from .budget import Budget as Budget
from .calibrate import calibrate as calibrate
from .costs import Device as Device
from .result import Calibration as Calibration
