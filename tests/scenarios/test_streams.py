"""A command whose output nobody reads ends as it would otherwise, and a job under wrap runs to its end."""

import os
import subprocess
import sys

import pytest

from tests.scenarios.running import clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")

SCRIPT = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('ran')\n"


def ddpdoctor(*words):
    return [sys.executable, "-m", "ddpdoctor", *map(str, words)]


@pytest.fixture
def job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return ddpdoctor("wrap", "--nproc-per-node=1", "--report-dir", tmp_path / "run", script, tmp_path / "ran")


def test_a_job_runs_where_streams_are_closed(job, tmp_path):
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *job], check=False, env=clean_environment())
    assert done.returncode == 0
    assert (tmp_path / "ran").read_text() == "ran"
    assert (tmp_path / "run" / "report.json").exists()


def unread(command):
    """Run a command whose stdout and stderr are a pipe that nobody reads; return its exit status."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(command, check=False, stdout=writing, stderr=writing, env=clean_environment()).returncode
    finally:
        os.close(writing)


def test_a_job_runs_where_nobody_reads_what_is_said(job, tmp_path):
    assert unread(job) == 0
    assert (tmp_path / "ran").read_text() == "ran"
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(("words", "status"), [(("explain", "DD601"), 0), (("explain", "nothing"), 2)])
def test_a_verb_ends_with_its_status_where_nobody_reads_it(words, status):
    assert unread(ddpdoctor(*words)) == status
