"""One command runs every benchmark: no record without it, no setting out of date."""

import argparse
import importlib
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.__main__ import GPU, JOBS, RESULTS, ROOT, listed, main, run

pytestmark = pytest.mark.quick

ALL = [*JOBS.items(), *((f"gpu, {name}", job) for name, job in GPU.items())]
every_job = pytest.mark.parametrize("job", [job for _, job in ALL], ids=dict(ALL))


class Parsed(Exception):
    pass


@every_job
@pytest.mark.parametrize("quick", (False, True))
def test_a_command_takes_its_settings(job, quick, tmp_path, monkeypatch):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    module = importlib.import_module(f"benchmarks.{job.module}")
    arguments = job.arguments(tmp_path, quick)
    if arguments:
        with pytest.raises(Parsed):
            module.main(arguments)


def test_every_record_is_written_by_a_job():
    for jobs in (JOBS, GPU):
        written = [file for job in jobs.values() for file in job.files]
        assert len(written) == len({*written})
    written = [file for _, job in ALL for file in job.files]
    recorded = {path.name for path in RESULTS.iterdir()}
    assert recorded <= {*written}


@every_job
def test_pages_exist(job):
    assert all((ROOT / page).exists() for page in job.pages)


def test_a_page_that_links_to_a_record_is_among_those_of_its_job():
    pages = [Path("README.md"), Path("benchmarks/README.md")]
    pages += [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    owners = {file: job for _, job in reversed(ALL) for file in job.files}
    for page in pages:
        links = re.findall(r"results/([\w.-]+\.\w+)\)", (ROOT / page).read_text())
        for record in links:
            assert page.as_posix() in owners[record].pages, (page, record)


def test_the_list_names_records_and_pages(capsys):
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert "front-bfloat16.json" in shown and "docs/quantised.md" in shown
    assert listed(GPU).row_count == len(GPU)


def test_what_is_printed_is_kept_and_a_failure_told(tmp_path, monkeypatch, capsys):
    real = subprocess.Popen
    code = "import sys; print('a table'); sys.exit('{}' in sys.argv[1:])"

    def popen(command, **options):
        program = code.format("float16")
        return real([command[0], "-c", program, *command[3:]], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert run(JOBS["rewrite-bfloat16"], tmp_path, quick=True) == 0
    assert (tmp_path / "rewrite-bfloat16.txt").read_text() == "a table\n"
    names = ["roofline-bfloat16", "roofline-float16"]
    assert main(["--quick", "--out", str(tmp_path), "--only", *names]) == 1
    assert "roofline-float16: FAILED with 1; it needs XLA's" in capsys.readouterr().out
    assert not (tmp_path / "roofline-float16.txt").exists()
