"""What can be done with the runs of real jobs afterwards: compared by `diff`, and handed on by `bundle`."""

import json
from pathlib import Path

import pytest

from tests import forking
from tests.scenarios.running import PATIENT, clean_environment, run

pytestmark = pytest.mark.usefixtures("preloaded_python")


def ddpdoctor(*words: object, cwd: Path):
    return forking.run("-m", "ddpdoctor", *map(str, words), cwd=cwd, env=clean_environment())


def test_a_run_that_failed_is_compared_with_one_that_worked_and_handed_on(tmp_path: Path) -> None:
    worked = run("clean_plain", tmp_path / "worked", *PATIENT, ranks=2)
    failed = run("crash_hardware", tmp_path / "failed", *PATIENT, ranks=2, NCCL_IB_DISABLE="1")

    done = ddpdoctor("diff", worked.folder, failed.folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ddpdoctor: the runs differ in NCCL_IB_DISABLE: not set in A, 1 in B")
    told = json.loads(ddpdoctor("diff", worked.folder, failed.folder, "--format", "json", cwd=tmp_path).stdout)
    names = [one["name"] for one in told["data"]["run_differences"]["differences"]]
    assert names[:2] == ["DD604 crash", "NCCL_IB_DISABLE"]

    done = ddpdoctor("bundle", failed.folder, "--yes", "-o", "run.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    opened = ddpdoctor("report", "run.zip", "--format", "json", cwd=tmp_path)
    verdict = json.loads(opened.stdout)["verdict"]
    assert (verdict["code"], verdict["ranks"]) == ("DD604", [1])
    assert "hunter2" not in opened.stdout


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    for second, hint in (("nowhere", "the report cannot be read"), ("report.json", "the same run")):
        done = ddpdoctor("diff", "report.json", second, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert hint in done.stderr
