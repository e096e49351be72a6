"""Run folders that an earlier version saved, of real jobs: they are still read, and judged again as they were."""

import json
import tarfile
from pathlib import Path

import pytest

from ddpdoctor.cli import analyze
from ddpdoctor.cli.report import read_run
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import Report
from ddpdoctor.model.run import JobEnd
from ddpdoctor.report.text.report import render_text

SAVED = Path(__file__).parents[2] / "data" / "runs"
JOBS = {
    "crash": ("failed", 1, "crash", (0,)),
    "ctrl-c": ("interrupted", 130, None, ()),
    "drift": ("finished", 0, "param-drift", (0,)),
    "finished": ("finished", 0, None, ()),
    "hung": ("hung", 124, "early-exit", (1,)),
    "killed": ("failed", 1, "killed", (2,)),
    "terminated": ("interrupted", 1, "stuck", (1,)),
}


def reported(report: Report) -> tuple[object, ...]:
    """Return what a report says first: status, exit status, and the verdict with its sentence and lines."""
    assert report.job is not None
    verdict = report.verdict
    kind, ranks = (verdict.kind, verdict.ranks) if verdict is not None else (None, ())
    said = (verdict.code, verdict.where) if verdict is not None else ()
    return report.job.status.value, report.job.exit_status, kind, ranks, said, report.started_at


@pytest.fixture(params=JOBS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(SAVED / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def test_a_report_that_was_removed_is_drawn_as_it_was(saved: Path) -> None:
    before = read_run(saved)
    assert reported(before)[:4] == JOBS[saved.name]
    (saved / "report.json").unlink()
    again = read_run(saved)
    assert reported(again) == reported(before)
    assert status_line(again) == status_line(before)


def status_line(report: Report) -> str:
    return render_text(report, width=None, color=False, run_dir=None).splitlines()[1]


def test_what_the_user_ignored_stays_ignored_and_a_status_that_was_saved_is_taken(saved: Path) -> None:
    before = read_run(saved)
    (saved / "report.json").unlink()
    ignored = (before.verdict.code,) if before.verdict is not None else ()
    end = JobEnd(
        hung=False, interrupted=True, exit_status=77, started_at="then", ended_at="later", ignore=ignored
    )  # fmt: skip
    (saved / "end.json").write_text(json.dumps(encode(end)))
    again = read_run(saved)
    assert again.job is not None
    assert (again.job.status.value, again.job.exit_status) == ("interrupted", 77)
    assert (again.started_at, again.ended_at) == ("then", "later")
    assert not {finding.code for finding in again.findings} & set(ignored)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hung": 1}'])
def test_a_damaged_end_is_passed_over(tmp_path: Path, text: str) -> None:
    with tarfile.open(SAVED / "killed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    before = read_run(tmp_path / "killed")
    (tmp_path / "killed" / "report.json").unlink()
    (tmp_path / "killed" / "end.json").write_text(text)
    assert reported(read_run(tmp_path / "killed")) == reported(before)


def test_analyze_says_of_a_run_folder_what_wrap_said(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = analyze.run(analyze.Options(paths=(str(saved),), format="json"))
    report = json.loads(capsys.readouterr().out)
    _, _, kind, ranks = JOBS[saved.name]
    verdict = report["verdict"] or {"kind": None, "ranks": []}
    assert (verdict["kind"], tuple(verdict["ranks"])) == (kind, ranks)
    assert status == (1 if kind is not None else 0)
