"""Run folders of jobs that never ran: the right verdict out of whole ones, and no traceback out of damaged ones."""

import contextlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.collect.run.nodes import read_job
from ddpdoctor.diagnose.build import rebuild_report
from ddpdoctor.diagnose.progress import in_words_of, judge_folder
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Outcome, Report, Severity
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.report.text.report import render_text
from tests.synthetic import FIRST_PID, LINES, SITUATIONS, STUCK_LINE, Job, reversed_ranks, write_folder, write_hosts

JUNK: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, "x", "", [], [1], {}, {"a": 1})


def folder_of(tmp_path: Path, situation: str, world: int = 16, steps: int = 30, **more: Any) -> Path:
    write_folder(tmp_path / situation, Job(world=world, steps=steps, situation=situation, **more))
    return tmp_path / situation


def worst(folder: Path) -> Finding:
    return judge_folder(folder).findings[0]


@pytest.mark.parametrize("culprit", [0, 3, 15])
@pytest.mark.parametrize(
    ("situation", "kind", "line"),
    [("stuck", "stuck", STUCK_LINE), ("short", "mismatch", LINES["barrier"]), ("crash", "crash", STUCK_LINE)],
)
def test_one_rank_of_many_is_found(tmp_path: Path, situation: str, kind: str, line: int, culprit: int) -> None:
    found = worst(folder_of(tmp_path, situation, culprit=culprit))
    assert (found.kind, found.ranks, found.where[0].line) == (kind, (culprit,), line)


def test_groups_in_opposite_order_are_a_deadlock(tmp_path: Path) -> None:
    found = worst(folder_of(tmp_path, "deadlock"))
    assert found.kind == "deadlock"
    assert set(reversed_ranks(Job(world=16, steps=0, situation="deadlock"))) <= set(found.ranks)


def test_a_job_that_ended_well_has_no_finding(tmp_path: Path) -> None:
    judgment = judge_folder(folder_of(tmp_path, "healthy"))
    assert judgment.findings == ()
    assert {check.outcome for check in judgment.checks} <= {Outcome.PASSED, Outcome.SKIPPED}


@pytest.mark.parametrize("situation", ["stuck", "short"])
def test_a_history_longer_than_the_ring_changes_nothing(tmp_path: Path, situation: str) -> None:
    found = worst(folder_of(tmp_path, situation, world=4, steps=700, tp=2))
    assert found.ranks == (1,)


def test_of_two_ranks_the_one_that_departs_from_a_long_history_is_blamed(tmp_path: Path) -> None:
    found = worst(folder_of(tmp_path, "short", world=2, steps=129, tp=0))
    assert (found.kind, found.ranks) == ("mismatch", (1,))


@pytest.mark.parametrize(
    ("entry", "advice"),
    [
        ("wrap", "if it is just slow, raise --hang-timeout"),
        ("pytest", "if it is just slow, raise --ddpdoctor-timeout"),
        ("ddpdoctor.watch", "if it is just slow, raise hang_timeout of ddpdoctor.watch"),
        ("DdpDoctorCallback", "if it is just slow, raise hang_timeout of DdpDoctorCallback"),
    ],
)
def test_advice_names_a_setting_as_the_way_in_has_it(tmp_path: Path, entry: str, advice: str) -> None:
    folder = folder_of(tmp_path, "stuck", world=2)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "entry": entry}))
    assert worst(folder).fix.endswith(advice)
    report, text = show(folder)
    assert entry == "wrap" or "--hang-timeout" not in text + str([check.reason for check in report.checks])


def test_advice_says_which_options_only_wrap_has() -> None:
    drift = Finding(
        code="DD502", kind="buffer-drift", severity=Severity.WARNING, confidence=Confidence.HIGH, summary="it differs",
        fix="if this is intended, pass --allow-different bn.*; --check-every 1 shows the step",
    )  # fmt: skip
    judged = Judgment(findings=(drift,), checks=(), certain=False)
    (told,) = in_words_of("ddpdoctor.watch", judged).findings
    assert told.fix == drift.fix + " (--allow-different and --check-every are options of `ddpdoctor wrap`)"


def show(folder: Path) -> tuple[Report, str]:
    report = rebuild_report(folder)
    return report, render_text(report, width=100, color=False, run_dir=folder)


@pytest.mark.parametrize(
    ("watched", "status", "exit_status"),
    [
        ({"ended": True, "launcher_status": 1}, "failed", 1),
        ({"ended": True, "launcher_status": -9}, "failed", 137),
        ({"ended": True, "launcher_status": 1, "interrupted_by": "SIGTERM"}, "interrupted", 1),
        ({"ended": False, "launcher_status": None}, "interrupted", None),
    ],
)
def test_a_report_that_was_removed_is_drawn_with_the_status_of_the_job(
    tmp_path: Path, watched: dict[str, Any], status: str, exit_status: int | None
) -> None:
    folder = folder_of(tmp_path, "healthy", world=2)
    watch = json.loads((folder / "watch.json").read_text())
    (folder / "watch.json").write_text(json.dumps({**watch, **watched}))
    job = rebuild_report(folder).job
    assert job is not None
    assert (job.status.value, job.exit_status) == (status, exit_status)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


def make_version_1(path: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, len(ring_layout.MAGIC), 1)
    path.write_bytes(data)


def make_foreign(path: Path) -> None:
    path.write_bytes(b"PNG" * 9000)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, "truncated: 9000 of"),
        (make_version_1, "ring version 1, this program reads"),
        (make_foreign, "not a ring file"),
        (make_folder, "its record cannot be read"),
    ],
)
def test_a_ring_that_cannot_be_read_says_why(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = folder_of(tmp_path, "stuck")
    damage(next((folder / "rings").glob(f"{FIRST_PID + 5}-*.ring")))
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


@pytest.mark.parametrize(
    ("name", "value"), [("command", 3), ("check_every", "50"), ("check_every", True), ("nproc", 2**70), ("host", None)]
)
def test_a_damaged_run_file_is_named(tmp_path: Path, name: str, value: object) -> None:
    folder = folder_of(tmp_path, "stuck", world=2)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, name: value}))
    with pytest.raises(UserError, match=rf"run\.json is damaged: {name}: ") as refused:
        rebuild_report(folder)
    assert refused.value.status == 2


def mangle(dice: random.Random, value: Any) -> Any:
    if dice.random() < 0.04:
        return dice.choice(JUNK)
    if isinstance(value, dict):
        return {key: mangle(dice, item) for key, item in value.items() if dice.random() > 0.02}
    return [mangle(dice, item) for item in value] if isinstance(value, list) else value


def spoil(dice: random.Random, path: Path) -> None:
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and dice.random() < 0.7:
        lines = [json.dumps(mangle(dice, json.loads(line))) for line in data.decode().splitlines()]
        path.write_text("\n".join(lines))
    elif path.suffix == ".ring" and dice.random() < 0.8:
        spoilt = bytearray(data)
        first = dice.choice(
            [0, 128, 1024, ring_layout.HEADER_SIZE, ring_layout.RANK_SHAPE.slots_at, ring_layout.RANK_SHAPE.steps_at]
        )
        for _ in range(dice.choice([1, 5, 50])):
            spoilt[dice.randrange(first, first + 2000)] = dice.randrange(256)
        path.write_bytes(spoilt)
    else:
        path.write_bytes(data[: dice.randrange(len(data) + 1)])


def test_no_damage_ends_in_a_traceback(tmp_path: Path) -> None:
    dice = random.Random(7)
    for situation in SITUATIONS:
        folder_of(tmp_path, situation, world=4, steps=6, tp=2)
    for number in range(60):
        folder = tmp_path / f"spoilt-{number}"
        shutil.copytree(tmp_path / dice.choice(SITUATIONS), folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in dice.sample(files, dice.choice([1, 2, 4])):
            spoil(dice, path)
        judge_folder(folder)
        with contextlib.suppress(UserError):
            show(folder)
        shutil.rmtree(folder)


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
