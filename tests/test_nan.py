"""NaNs and infs are lost nowhere, as XLA compiles programs for users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.rest


def test_none_is_lost():
    script = Path(__file__).parent / "nan_process.py"
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == ""
