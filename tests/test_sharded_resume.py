"""A fully sharded step on two processes, killed and gone on with: the same to the bit.

Both run `sharded_process.py`, with four devices each, over Gloo; Orbax saves parts."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from tests.test_scale_processes import free_port

SCRIPT = pathlib.Path(__file__).with_name("sharded_process.py")
SECONDS = 240  # far more than it takes, also on a busy machine
NEVER, KILLED_AT = -1, 5


def run_two(folder, killed_at=NEVER):
    """What each of two processes printed; if one is killed, the other is then, too."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    environment.pop("XLA_FLAGS", None)
    given = [str(folder), str(killed_at)]
    logs = [folder.parent / f"{folder.name}-{killed_at}-{i}.txt" for i in (0, 1)]
    with contextlib.ExitStack() as files:
        processes = [
            subprocess.Popen(
                [sys.executable, SCRIPT, str(port), str(i), "2", *given],
                stdout=files.enter_context(log.open("w")),
                stderr=files.enter_context(log.with_suffix(".err").open("w")),
                env=environment,
            )
            for i, log in enumerate(logs)
        ]
    try:
        last = processes[-1].wait(SECONDS)
        if killed_at == NEVER:
            assert processes[0].wait(SECONDS) == last == 0, errors(logs)
        else:
            assert last < 0, errors(logs)
            time.sleep(1)  # so that the other waits for what never comes
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [list(filter(is_ours, log.read_text().splitlines())) for log in logs]


def is_ours(line):
    return not line.startswith("[Gloo]")


def errors(logs):
    return "\n".join(log.with_suffix(".err").read_text()[-2000:] for log in logs)


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
