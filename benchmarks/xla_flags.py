"""Flags of XLA for thousands of small programs that are run once, if ever.

Compiling takes most of their time. They are read when the first program is compiled, so
this module does not import JAX: whoever sets them does so before."""

import os
from importlib.metadata import version

QUICK = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",  # each part would cost as much again
)
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    # XLA's older emitters, four times as quick; later jaxlibs don't have them.
    QUICK = (*QUICK, "--xla_cpu_use_fusion_emitters=false")
else:
    # With these kernels, some contractions of 16 bits add up in 16 bits on CPUs.
    QUICK = (*QUICK, "--xla_cpu_experimental_ynn_fusion_type=")


def add(*flags: str) -> None:
    """Adds flags to those of the environment, which come first."""
    given = os.environ.get("XLA_FLAGS", "").split()
    known = {flag.split("=")[0] for flag in given}
    new = [flag for flag in flags if flag.split("=")[0] not in known]
    os.environ["XLA_FLAGS"] = " ".join([*given, *new])
