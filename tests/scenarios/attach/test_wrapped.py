"""Jobs that run under ``wrap``: their own records are used, which know the calls of each rank."""

import contextlib
import json
import os
from pathlib import Path

import pytest

from tests.scenarios.attach.running import ROOT, SCRIPT, marked, sleeps
from tests.scenarios.running import doctor, has_called, start, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")
UNDER_WRAP = "the job runs under `ddpdoctor wrap`; its run folder is {run}"
OWN = "the verdict comes from the records of the `ddpdoctor wrap` that runs the job"


@contextlib.contextmanager
def wrapped(script, run, *args, ranks=2):
    """Run a job under a ``wrap`` that has much more patience than a test."""
    process = start(script, run, "--hang-timeout", "500", ranks=ranks, args=args)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def attached(output, *options):
    done = doctor("attach", *options, "--folder", output, "--format", "json", cwd=output, PYTHONPATH=str(ROOT))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def pids_of(run):
    return [int(path.name.partition("-")[0]) for path in (run / "rings").glob("*.ring")]


def test_the_rank_at_fault_is_named_from_its_records_and_the_job_goes_on(tmp_path):
    job, run = tmp_path / "job", tmp_path / "run"
    job.mkdir()
    os.mkfifo(job / "release")
    with wrapped("attached", Path(os.path.relpath(run)), "plain", str(job)) as process:
        assert wait_for(lambda: all((job / f"at_{rank}").exists() for rank in range(2)))
        assert wait_for(lambda: all(map(sleeps, pids_of(run))))
        status, report = attached(tmp_path, "--pid", str(pids_of(run)[0]))
        with (job / "release").open("w"):
            pass
        assert process.wait(200) == 0

    verdict = report["verdict"]
    assert (status, verdict["code"], verdict["ranks"], verdict["confidence"]) == (1, "DD601", [1], "high")
    assert f"wait_for_the_test ({SCRIPT.name}:{marked('FAULT')})" in verdict["summary"]
    assert [line for line in verdict["evidence"] if line.startswith("rank 0 waits in all_reduce of float32[1]")]
    assert report["data"]["evidence"]["notes"] == [UNDER_WRAP.format(run=run), OWN]
    assert [lane["detail"][-1]["kind"] for lane in report["data"]["timeline"]["lanes"]] == ["wait", "host"]
    assert report["data"]["waits"]["links"] == [[0, 1]]
    source = report["data"]["source"]
    assert "FAULT" in source["lines"][source["blamed"] - source["first"]]


def test_groups_whose_members_the_records_do_not_have_are_not_judged_by_them(tmp_path):
    run = tmp_path / "run"
    with wrapped("deadlock_groups", run, ranks=3):
        assert wait_for(lambda: has_called(run, "barrier"))
        assert wait_for(lambda: all(map(sleeps, pids_of(run))))
        _, report = attached(tmp_path, "--pid", str(pids_of(run)[0]))

    # Only the lines of the ranks differ, and that is little.
    assert report["data"]["evidence"]["notes"] == [UNDER_WRAP.format(run=run)]
    assert (report["verdict"] or {"confidence": "low"})["confidence"] == "low"


def test_a_wrapped_job_that_moves_has_no_verdict(tmp_path):
    job, run = tmp_path / "job", tmp_path / "run"
    job.mkdir()
    os.mkfifo(job / "release")
    with wrapped("attached", run, "moving", str(job)) as process:
        assert wait_for(lambda: all((job / f"at_{rank}").exists() for rank in range(2)))
        status, report = attached(tmp_path, "--pid", str(pids_of(run)[0]))
        (job / "end").touch()
        assert process.wait(200) == 0

    assert (status, report["verdict"], report["data"]["evidence"]["moves"]) == (0, None, True)
    assert report["data"]["evidence"]["notes"] == [UNDER_WRAP.format(run=run)]
