"""Several real processes that train together, over Gloo, each on a share of devices."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

SECONDS = 240  # far more than it takes, also on a busy machine
AFTER_A_KILL = 1  # second, in which those that live on wait for what never comes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_all(script, count, folder, *given, killed=False):
    """What each process wrote to the file that it was given, as text.

    It is a file of its own, since Gloo writes to the standard output when it likes,
    also into the middle of a line. If the last process is to be `killed`, by itself, so
    are the others, a little later; if they waited for each other for ever, all are."""
    port = str(free_port())
    environment = os.environ | {"PYTHONPATH": str(script.parents[1])}
    environment.pop("XLA_FLAGS", None)
    folder = pathlib.Path(folder)
    said = [folder.parent / f"{folder.name}-{i}.txt" for i in range(count)]
    for file in said:
        file.write_text("")
    with contextlib.ExitStack() as files:
        logs = [
            files.enter_context(file.with_suffix(".log").open("w+")) for file in said
        ]
        processes = [
            subprocess.Popen(
                [sys.executable, script, port, str(i), str(count), said[i], folder]
                + list(map(str, given)),
                stdout=log,
                stderr=log,
                env=environment,
            )
            for i, log in enumerate(logs)
        ]
        try:
            last = processes[-1].wait(SECONDS)
            if killed:
                time.sleep(AFTER_A_KILL)
            else:
                statuses = [process.wait(SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for log in logs:
            log.seek(0)
        logged = "\n".join(log.read()[-3000:] for log in logs)
    assert last < 0 if killed else not any(statuses), logged
    return [file.read_text() for file in said]
