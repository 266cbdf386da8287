"""Runs suites, and says which tests end otherwise under `amp`.

What ends so under `jax.jit`, too, is told apart from a finding."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
UNDER_AMP = ("empty", "bfloat16")
FINDING = "finding"

Outcomes = dict[str, list[str]]


def folder_of(suite: str) -> Path:
    """A path as it is; of a package, where it is installed."""
    if Path(suite).exists():
        return Path(suite).resolve()
    spec = importlib.util.find_spec(suite)
    if spec is None or spec.origin is None:
        sys.exit(f"{suite!r} is neither a path nor an installed package.")
    return Path(spec.origin).parent


def run(
    suite: Path,
    setting: str,
    out: Path,
    others: Sequence[str],
    tests: Sequence[str] = (),
) -> Outcomes:
    """How each test of a suite ends, or some of its `tests`."""
    out.unlink(missing_ok=True)  # of an earlier run
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "amp_plugin", "-q", "--tb=no"]
    root = suite if suite.is_dir() else suite.parent
    command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(root)]
    command += ["-o", "python_files=test_*.py *_test.py", "-W", "ignore"]
    chosen = [str(root / test) for test in tests] or [str(suite)]
    command += ["--amp", setting, "--outcomes", str(out), *others, *chosen]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False)
    return json.loads(out.read_text()) if out.exists() else {}


def judged(setting: str, written: list[str] | None, found: list[str]) -> str:
    """How a test ended beside how it ends as written, in a word or two."""
    if written is None:
        return "finding: not there as written"
    if found[0] == written[0]:
        return "same"
    kinds, _, _ = found[1].partition(":")
    if setting == "bfloat16" and "AssertionError" in kinds.split(","):
        return "numbers"
    return FINDING


def said(found: list[str]) -> str:
    """What a test raised, in a line."""
    kinds, _, message = found[1].partition(":")
    return f"{kinds.partition(',')[0]}:{message}"[:300]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.others", description=__doc__)
    parser.add_argument("suites", nargs="+", help="paths, or names of packages")
    parser.add_argument("--out", type=Path, default=Path("build/others"))
    parser.add_argument(
        "--settings", nargs="+", choices=UNDER_AMP, default=[*UNDER_AMP]
    )
    args, others = parser.parse_known_args()
    are_findings = False
    for name in args.suites:
        suite = folder_of(name)
        out = args.out.absolute() / suite.name
        out.mkdir(parents=True, exist_ok=True)
        written = run(suite, "as written", out / "written.json", others)
        if not written:
            sys.exit(f"pytest found no tests in {suite}, or could not run them.")
        for setting in args.settings:
            found = run(suite, setting, out / f"{setting}.json", others)
            verdicts = {
                test: judged(setting, written.get(test), outcome)
                for test, outcome in found.items()
            }
            verdicts |= {
                test: "finding: lost" for test in written.keys() - found.keys()
            }
            findings = [test for test in found if verdicts[test] == FINDING]
            if findings:
                jitted = run(suite, "jitted", out / "jitted.json", others, findings)
                for test in findings:
                    if jitted.get(test, written[test])[0] == found[test][0]:
                        verdicts[test] = "so under jit"
            count = Counter(verdicts.values())
            print(f"== {name}, {setting}: {dict(count)}")
            for test, verdict in sorted(verdicts.items()):
                if verdict.startswith("finding"):
                    are_findings = True
                    print(f"{verdict}: {test}: {said(found.get(test, ['', '']))}")
    return int(are_findings)


if __name__ == "__main__":
    sys.exit(main())
