"""Runs cases: `python -m tests.fuzz --cases 1000 --seed 0`.

The case of seed 7 is the same in every run of 7, so that a log of seeds is enough to
have a case again. What breaks a check is made small and printed as a file."""

# ruff: noqa: E402  (XLA's flags must be set before anything imports JAX)

import os

_FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import sys
from pathlib import Path

from .cases import KINDS
from .driver import Options, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--log", type=Path, help="file to append a line per finding to")
    parser.add_argument("--out", type=Path, help="folder for small failing cases")
    parser.add_argument(
        "--compiled", type=float, default=0.005, help="share also compiled"
    )
    parser.add_argument("--no-shrink", action="store_true", help="print cases as found")
    parser.add_argument("--planted", help="a fault to plant first; `list` names them")
    parser.add_argument("--stop", action="store_true", help="at the first finding")
    parser.add_argument(
        "--every", type=int, default=0, help="cases to a line of the log"
    )
    parser.add_argument("--resume", action="store_true", help="after what the log has")
    parser.add_argument(
        "--kind", choices=[*KINDS], help="of programs, if not of all kinds"
    )
    given = parser.parse_args()
    return run(Options(**vars(given)))


if __name__ == "__main__":
    sys.exit(main())
