"""Each kind of fault, seeded in a real job, is found: the kind, the ranks to blame, the line.

Every kind has three causes or more, in different places of a script, on two, three and four ranks, and under both
debug levels. Where the level changes what the ranks go through, a job runs under both.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.report.formats import draw_tree, parse_report
from ddpdoctor.report.verbs.job import job_content
from tests.scenarios.running import PATIENT, Ran, marked_lines, numbers, rows_of, run, words_of

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]

BOTH = ("DETAIL", "OFF")


@dataclass(frozen=True)
class Seeded:
    """A job of ``jobs/``, how many ranks it is run with, and what has to be said of it."""

    job: str
    ranks: int
    kind: str
    blamed: tuple[int, ...]
    levels: tuple[str, ...]


FAULTS = [
    Seeded(job, int(ranks), kind, numbers(blamed), tuple(levels.split()))
    for job, ranks, kind, blamed, levels in rows_of("faults")
]
LIVE = {"stuck_loader_worker", "stuck_evaluation", "exit_hang_child"}
"""Their lines are those of children, or of a moment, that the run folder does not have once the job has ended."""
RUNS = [
    pytest.param(seeded, level, id=f"{seeded.job}-{level}", marks=[pytest.mark.live] * (seeded.job in LIVE))
    for seeded in FAULTS for level in seeded.levels
]  # fmt: skip
HANGS = ("stuck", "stopped", "missing", "exit-hang")
END = ("early-exit", "crash", "killed")
"""After these a job ends by itself, or is stopped however long its hang timeout is."""
MAY_RESUME = ("stuck", "exit_hang", "stopped_debugger")
"""Jobs whose names begin so are not stopped unless that is asked for; all others are."""


@pytest.mark.parametrize(("seeded", "level"), RUNS)
def test_the_fault_is_found(seeded: Seeded, level: str, tmp_path: Path) -> None:
    on_hang = "kill" if seeded.job.startswith(MAY_RESUME) else "auto"
    patience = PATIENT if seeded.kind in END else ()
    ran = run(seeded.job, tmp_path, "--debug-level", level, "--on-hang", on_hang, *patience, ranks=seeded.ranks)
    verdict = ran.report["verdict"]
    assert verdict is not None, ran.stderr
    assert (verdict["kind"], tuple(verdict["ranks"])) == (seeded.kind, seeded.blamed), verdict
    lines = marked_lines(seeded.job)
    if lines:
        places = {(Path(place["file"]).name, place["line"]) for place in verdict["where"]}
        assert places & {(Path(words_of(seeded.job)[0]).name, line) for line in lines}, verdict
    assert len(verdict["where"]) <= 2 * len(seeded.blamed) + 2
    if seeded.kind in HANGS:
        assert (ran.status, ran.report["job"]["status"]) == (124, "hung")
    else:
        assert ran.status not in (0, 2, 3)
    hold_to_pictures(seeded, ran)


def hold_to_pictures(seeded: Seeded, ran: Ran) -> None:
    """Fail where the timeline lacks a rank, or the fault; a rank that holds up others has more to it."""
    data = ran.report["data"]
    lanes = {lane["rank"]: lane for lane in data["timeline"]["lanes"]}
    assert set(lanes) == {row["rank"] for row in ran.report["ranks"]}
    never = {row["rank"] for row in ran.report["ranks"] if row["state"] == "never started"}
    there = set(seeded.blamed) & set(lanes) - never
    faults = [moment for moment in data["timeline"]["moments"] if moment["fault"]]
    assert [moment["ranks"] for moment in faults] == ([list(seeded.blamed)] if there else [])
    if seeded.job == "stuck_lock":
        hold_to_pictures_of_lock(ran, lanes, faults[0]["at_ms"])


def hold_to_pictures_of_lock(ran: Ran, lanes: dict[int, dict[str, Any]], fault_ms: float) -> None:
    """Rank 1 takes a lock at step 20, and ranks 0 and 2 wait for it in backward."""
    data = ran.report["data"]
    *_, waited = lanes[0]["detail"]
    *_, held_up = lanes[1]["detail"]
    assert (waited["kind"], waited["label"], waited["end_ms"]) == ("wait", "backward", None)
    assert (held_up["kind"], held_up["end_ms"], held_up["place"].endswith(" in load")) == ("host", None, True)
    assert (held_up["start_ms"], data["timeline"]["classes"]) == (fault_ms, [[0, 2], [1]])
    assert {span["kind"] for span in lanes[0]["detail"]} >= {"forward", "backward", "host", "wait"}
    steps = [span for span in lanes[1]["coarse"] if span["kind"] == "step"]
    assert steps[0]["number"] == 1
    assert steps[-1]["number"] in {19, 20}  # a step is recorded when the next one begins
    assert [one["ranks"] for one in data["waits"]["classes"]] == [[0, 2], [1]]
    assert data["waits"]["links"] == [[0, 1]]
    source = data["source"]
    assert "FAULT" in source["lines"][source["blamed"] - source["first"]]
    assert len(source["lines"]) == 5
    assert json.loads((ran.folder / "source.json").read_text()) == source  # also without report.json and the script
    head = next(line for line in ran.stderr.splitlines() if line.endswith("DD601 stuck, rank 1 v"))
    rows = ran.stderr.splitlines()[ran.stderr.splitlines().index(head) + 1 :]
    assert rows[0].startswith("> rank 1")
    assert set(rows[0][len(head) :]) == {"."}
    assert (len(rows[1]), rows[1][-1]) == (len(rows[0]), "w")  # a busy machine lets its last calls end after the fault
    _, _, _, tree = job_content(parse_report((ran.folder / "report.json").read_text())).pictures
    blamed = next(line for line in draw_tree(tree) if line.startswith("> "))
    assert "stuck.py" in blamed
    assert "in load" in blamed


def test_a_rank_that_its_own_watchdog_ends_is_a_victim(tmp_path: Path) -> None:
    ran = run("own_limit", tmp_path, *PATIENT, ranks=3)
    verdict = ran.report["verdict"]
    assert (verdict["kind"], verdict["ranks"], ran.report["job"]["status"]) == ("stuck", [2], "failed")
    assert verdict["where"][0]["line"] in marked_lines("own_limit")
    assert any("a time limit of the script ended it" in said for said in verdict["evidence"])


def test_the_world_that_a_script_makes_is_judged(tmp_path: Path) -> None:
    verdict = run("stuck_spawn", tmp_path, ranks=1).report["verdict"]
    assert (verdict["kind"], verdict["ranks"]) == ("stuck", [1]), verdict
    assert verdict["where"][0]["line"] in marked_lines("stuck_spawn")


@pytest.mark.parametrize("kind", sorted({seeded.kind for seeded in FAULTS} - {"mismatch"}))
def test_the_table_covers_each_kind(kind: str) -> None:
    rows = [seeded for seeded in FAULTS if seeded.kind == kind]
    assert len(rows) >= 3
    assert {row.ranks for row in rows} == {2, 3, 4}
    assert {level for row in rows for level in row.levels} == set(BOTH)
