"""A fully sharded step on two processes, killed and gone on with: the same to the bit.

Both run `sharded_process.py`, with four devices each, over Gloo; Orbax saves parts."""

import pathlib
from itertools import pairwise

import pytest

from tests.processes import run_all

SCRIPT = pathlib.Path(__file__).with_name("sharded_process.py")
NEVER, KILLED_AT = -1, 5


def run_two(folder, killed_at=NEVER):
    """The lines that each of two processes wrote."""
    killed = killed_at != NEVER
    said = run_all(SCRIPT, 2, folder, killed_at, killed=killed)
    return [text.splitlines() for text in said]


@pytest.mark.rest
def test_killed_and_resumed(tmp_path):
    through, broken = tmp_path / "through", tmp_path / "broken"
    for folder in (through, broken):
        folder.mkdir()
    first, second = run_two(through)
    assert first == second and len(first) == 1 + 8
    (_, before) = run_two(broken, KILLED_AT)
    assert before == first[: 1 + KILLED_AT]  # nothing of the step that it died in
    resumed, other = run_two(broken)
    assert resumed == other
    assert resumed[0] == "from 4" and resumed[1:] == first[1 + 4 :]
    scales = [float(line.split()[2]) for line in first[1:]]
    # It grew, and float16 overflowed.
    assert any(b > a for a, b in pairwise(scales))
    assert any(b < a for a, b in pairwise(scales))
