"""Run folders, whole and of earlier versions, and what differs between two."""

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ddpdoctor.cli import analyze
from ddpdoctor.cli.report import read_run
from ddpdoctor.collect.run import read_job
from ddpdoctor.diagnose.compare import diff_reports
from ddpdoctor.diagnose.job import in_words_of, judge_folder, rebuild_report
from ddpdoctor.diagnose.live import cost_of, find_returning, job_key, sum_up
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import JobEnd
from ddpdoctor.model.findings import Finding, JobStatus, JobSummary, Judgment, Outcome, RankRow, Report, Severity
from ddpdoctor.model.live import Blamed, PassSeen, Start
from ddpdoctor.model.tuning import RunDifferences
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.report.blocks import read_content
from ddpdoctor.report.text import render_text
from tests.golden import words
from tests.pictures import finding
from tests.synthetic import FIRST_PID, Job, write_folder, write_hosts

# Run folders of jobs that never ran: the right verdict out of whole ones, and no traceback out of damaged ones.


def folder_of(tmp_path: Path, situation: str, world: int = 16, steps: int = 30, **more: Any) -> Path:
    write_folder(tmp_path / situation, Job(world=world, steps=steps, situation=situation, **more))
    return tmp_path / situation


def worst(folder: Path) -> Finding:
    return judge_folder(folder).findings[0]


def fault_of(row):
    """Return what is found first in the folder of a job, with the ranks and lines at fault."""
    situation, *more = row.split()
    with TemporaryDirectory() as folder:
        options = {name: int(value) for name, value in (word.split("=") for word in more)}
        found = worst(folder_of(Path(folder), situation, **options))
    return found.kind, found.ranks, [(place.rank, place.line) for place in found.where[:1]]


def test_a_job_that_ended_well_has_no_finding(tmp_path: Path) -> None:
    judgment = judge_folder(folder_of(tmp_path, "healthy"))
    assert judgment.findings == ()
    assert {check.outcome for check in judgment.checks} <= {Outcome.PASSED, Outcome.SKIPPED}


SETTINGS = {
    "wrap": "--hang-timeout", "pytest": "--ddpdoctor-timeout", "ddpdoctor.watch": "hang_timeout of ddpdoctor.watch",
    "DdpDoctorCallback": "hang_timeout of DdpDoctorCallback",
}  # fmt: skip


@pytest.mark.parametrize("entry", SETTINGS)
def test_advice_names_a_setting_as_the_way_in_has_it(tmp_path: Path, entry: str) -> None:
    folder = folder_of(tmp_path, "stuck", world=2)
    change(folder / "run.json", entry=entry)
    assert worst(folder).fix.endswith(f"if it is just slow, raise {SETTINGS[entry]}")
    report, text = show(folder)
    assert entry == "wrap" or "--hang-timeout" not in text + str([check.reason for check in report.checks])


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_advice_says_which_options_only_wrap_has() -> None:
    fix = "if this is intended, pass --allow-different bn.*; --check-every 1 shows the step"
    drift = finding("DD502", "buffer-drift", Severity.WARNING, fix=fix)
    judged = Judgment(findings=(drift,), checks=(), certain=False)
    (told,) = in_words_of("ddpdoctor.watch", judged).findings
    assert told.fix == drift.fix + " (--allow-different and --check-every are options of `ddpdoctor wrap`)"


def show(folder: Path) -> tuple[Report, str]:
    report = rebuild_report(folder)
    return report, render_text(report, width=100, color=False, run_dir=folder)


def status_of(watched: dict[str, Any]) -> tuple[str, int | None]:
    """Return the status of a job whose report was removed, and its exit status."""
    with TemporaryDirectory() as place:
        folder = folder_of(Path(place), "healthy", world=2)
        change(folder / "watch.json", **watched)
        report = rebuild_report(folder)
    job = report.job
    assert job is not None
    assert report.data["run"]["backend"] == "gloo"
    return job.status.value, job.exit_status


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated: 9000 of": lambda path: os.truncate(path, 9000),
    "its record cannot be read": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_ring_that_cannot_be_read_says_why(tmp_path: Path, said: str) -> None:
    folder = folder_of(tmp_path, "stuck")
    DAMAGES[said](next((folder / "rings").glob(f"{FIRST_PID + 5}-*.ring")))
    report, text = show(folder)
    assert [(f.code, f.ranks) for f in report.findings if said in f.summary] == [("DD901", (5,))]
    assert said in " ".join(text.split())


def test_a_world_size_that_only_a_damaged_file_can_hold_is_not_believed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "stuck", world=4)
    next((folder / "rings").glob(f"{FIRST_PID + 2}-*.ring")).unlink()  # the agent alone knows of this rank
    log = folder / "agent.jsonl"
    assert '"world_size": 4' in log.read_text()
    log.write_text(log.read_text().replace('"world_size": 4', f'"world_size": {2**40}'))
    assert {rank.world_size for rank in read_job(folder).ranks} == {4, None}


def test_of_two_processes_with_one_pid_the_later_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "stuck", world=4)
    ring = next((folder / "rings").glob(f"{FIRST_PID}-*.ring"))
    data = bytearray(ring.read_bytes())
    ring_layout.IDENTITY.pack_into(
        data, 0, *ring_layout.IDENTITY.unpack_from(data)[:9], 3, *ring_layout.IDENTITY.unpack_from(data)[10:]
    )
    data[ring_layout.SLOT_SIZE * 50 :] = bytes(len(data) - ring_layout.SLOT_SIZE * 50)
    (folder / "rings" / f"{FIRST_PID}-3.ring").write_bytes(data)
    assert worst(folder).ranks == (1,)


def damaged_run_file(values: dict[str, Any]) -> Report:
    with TemporaryDirectory() as place:
        folder = folder_of(Path(place), "stuck", world=2)
        change(folder / "run.json", **values)
        try:
            return rebuild_report(folder)
        except UserError as error:
            raise UserError(error.message.replace(place, ""), help=error.help) from None


def test_each_host_of_a_job_has_a_run_folder_of_its_own(tmp_path: Path) -> None:
    first, second = write_hosts(tmp_path, Job(world=16, steps=30, situation="stuck"), 2)
    assert (worst(first).kind, worst(first).ranks) == ("stuck", (1,))
    assert [rank.rank for rank in read_job(second).ranks] == list(range(8, 16))


def test_counters_of_an_answer_that_was_given_before_the_training_began_do_not_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "short", world=4, tp=0)
    for path in (folder / "evidence").iterdir():
        answer = json.loads(path.read_text())
        for group in answer["groups"]:
            group["enqueued"] = 0
        path.write_text(json.dumps(answer))
    groups = [group for rank in read_job(folder).ranks for group in rank.groups]
    assert groups
    assert all(group.enqueued > 0 and not group.backend for group in groups)


# Run folders that an earlier version saved, of real jobs: they are still read, and judged again as they were.


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
ENDS = ("", "[]", "{}", '{"hung": 1}')


def reported(report: Report) -> tuple[object, ...]:
    """Return what a report says first: status, exit status, and the verdict with its sentence and lines."""
    assert report.job is not None
    verdict = report.verdict
    kind, ranks = (verdict.kind, verdict.ranks) if verdict is not None else (None, ())
    said = (verdict.code, verdict.where) if verdict is not None else ()
    return report.job.status.value, report.job.exit_status, kind, ranks, said, report.started_at


@pytest.fixture(params=JOBS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpacked(request.param, tmp_path)


def unpacked(name: str, folder: Path) -> Path:
    with tarfile.open(SAVED / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.mark.parametrize(("name", "end"), [*((name, None) for name in JOBS), *(("hung", end) for end in ENDS)])
def test_a_report_that_was_removed_is_drawn_as_it_was_and_a_damaged_end_is_passed_over(
    tmp_path: Path, name: str, end: str | None
) -> None:
    saved = unpacked(name, tmp_path)
    before = read_run(saved)
    assert reported(before)[:4] == JOBS[name]
    (saved / "report.json").unlink()
    if end is not None:
        (saved / "end.json").write_text(end)
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


def test_analyze_says_of_a_run_folder_what_wrap_said(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = analyze.run(analyze.Options(paths=(str(saved),), format="json"))
    report = json.loads(capsys.readouterr().out)
    _, _, kind, ranks = JOBS[saved.name]
    verdict = report["verdict"] or {"kind": None, "ranks": []}
    assert (verdict["kind"], tuple(verdict["ranks"])) == (kind, ranks)
    assert status == (1 if kind is not None else 0)


# What differs between two runs, from their reports.


HUNG = replace(finding("DD601", "stuck", ranks=(1,)), summary="rank 1 is stuck")


def job(*, environment=(), torch="2.13.0", step_ms=10.0, command=("train.py",), ranks=2, verdict=None, **data):
    rows = tuple(RankRow(rank=n, local_rank=n, host="a", pid=None, state="exit status 0") for n in range(ranks))
    return Report(
        command=("ddpdoctor", "wrap", "--report-dir", f"run-{step_ms}", *command),
        started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z",
        job=JobSummary(world_size=ranks, nnodes=1, status=JobStatus.FINISHED, exit_status=0), verdict=verdict,
        findings=() if verdict is None else (verdict,), checks=(), ranks=rows, tool_version="1",
        data={
            "run": {"torch_version": torch, "environment": dict(environment), "debug_level": "OFF"},
            "steps": [{"rank": n, "step_ms": step_ms, "waited_ms": 1.0} for n in range(ranks)], **data,
        },
    )  # fmt: skip


def machine(**facts):
    return Report(
        command=("ddpdoctor", "check-env"), started_at="2026-01-02T03:04:05Z", ended_at="2026-01-02T03:04:06Z",
        job=None, verdict=None, findings=(), checks=(), ranks=(), tool_version="1",
        data={"hosts": ["a"], "nodes": [{"host": "a", "pid": 7, "processes": [{"variables": {}}], **facts}]},
    )  # fmt: skip


def measured(plateau, tensors, delivered):
    stream = {"model": 1, "kinds": ["parameter"], "clock": "end", "tensors": tensors}
    return job(
        curves=[{"collective": "all_reduce", "plateau_gb_s": plateau}], consistency={"streams": [stream]},
        shares={"delivered": delivered},
    )  # fmt: skip


def differences(row):
    first, second = eval(row)
    report = diff_reports(("A", first), ("B", second))
    facts = decode(RunDifferences, report.data["run_differences"])
    seen = [(one.topic.value, one.name, one.first, one.second) for one in facts.differences]
    return [read_content(report).headline, *seen, "not compared: " + ", ".join(facts.not_compared)]


# What the failures of a job cost, how far apart they are, and who returns in their verdicts.


ZERO = datetime(2026, 3, 14, 10, tzinfo=timezone.utc)


def at(minutes):
    return None if minutes is None else ZERO + timedelta(minutes=minutes)


def start(
    began=0, first=1, last=9, ended=10, *, steps=90, status=JobStatus.FAILED, epochs=None, blamed=(), hosts=2,
    first_epoch=None,
):  # fmt: skip
    passes = tuple(PassSeen(epoch=epoch, steps=count) for epoch, count in (epochs or {}).items())
    known = next(iter(epochs), None) if epochs and first_epoch is None else first_epoch
    return Start(
        run="run", attempt=0, status=status, began_at=at(began), first_step_at=at(first), last_progress_at=at(last),
        ended_at=at(ended), steps=steps, passes=passes, first_epoch=known, hosts=hosts, blamed=blamed,
    )  # fmt: skip


STARTED_AGAIN = start(began=12, first=14)


def epochs(before, after):
    """A start that saw so many steps of each epoch, and one after it."""
    return [start(epochs=before), start(began=12, epochs=after)]


SAVED_AT_80 = replace(start(epochs={0: 45, 1: 45}), saved_step=80)
LATE_EPOCHS = start(epochs={7: 30, 8: 30}, first_epoch=0, steps=270)


def costs(row):
    starts = eval(row)
    return [cost_of(starts, number) for number in range(len(starts) - 1)]


def returning(row):
    """Find who returns in the verdicts of starts, of which each has a rank and its host."""
    lines, _, hosts = row.partition(" | ")
    ways = {True: JobStatus.INTERRUPTED, False: JobStatus.FAILED}
    return find_returning([
        start(blamed=(Blamed(rank=int(rank), host=host),), hosts=1 if hosts else 2, status=ways[bool(ended)])
        for rank, host, *ended in map(str.split, lines.split(", "))
    ])  # fmt: skip


test_words = words(
    __name__, fault=fault_of, status=status_of, damaged_run_file=damaged_run_file, differences=differences, cost=costs,
    history=lambda row: replace(sum_up(("train.py",), eval(row), at(100)), starts=()), returning=returning,
)  # fmt: skip


def test_starts_of_one_job_have_one_command_line_but_for_what_varies():
    one = job_key(("/a/ddpdoctor", "wrap", "--report-dir", "r1", "--master_port=1", "train.py", "--lr", "1"))
    other = job_key(("/b/ddpdoctor", "wrap", "--report-dir=r2", "--master-port", "2", "train.py", "--lr", "1"))
    assert one == other == ("ddpdoctor", "wrap", "train.py", "--lr", "1")
    assert job_key(("/b/ddpdoctor", "wrap", "train.py", "--lr", "2")) != one
