"""Data that is shared out badly is found, in jobs that finish; data that is shared out well gives no alarm."""

from pathlib import Path

import pytest

from tests.scenarios.running import JOBS, PATIENT, grids_of, run

pytestmark = pytest.mark.usefixtures("preloaded_python")

BADLY = "data_shared_badly"
WELL = "data_shared_out"


def marked() -> dict[int, tuple[str, list[int]]]:
    """Return by line which kind of fault a job has there, and the ranks to blame for it."""
    found = {}
    for number, line in enumerate((JOBS / f"{BADLY}.py").read_text().splitlines(), start=1):
        _, mark, words = line.partition("  # FAULT ")
        if mark:
            kind, _, rank = words.partition(" of rank ")
            found[number] = (kind, [int(rank)] if rank else [0, 1, 2])
    return found


def test_each_way_to_share_out_badly_is_found_at_its_line(tmp_path: Path) -> None:
    ran = run(BADLY, tmp_path, "--debug-level", "OFF", *PATIENT)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    found = {finding["where"][0]["line"]: finding for finding in ran.report["findings"]}
    assert {line: (finding["kind"], finding["ranks"]) for line, finding in found.items()} == marked()
    assert len(ran.report["findings"]) == len(found)
    for finding in found.values():
        assert finding["severity"] == "error"
        assert sorted({place["rank"] for place in finding["where"]}) == finding["ranks"]
        assert {Path(place["file"]).name for place in finding["where"]} == {f"{BADLY}.py"}
    (stray,) = (finding for finding in found.values() if "another sampler" in finding["summary"])
    assert len({place["line"] for place in stray["where"]}) == 2
    assert ran.report["verdict"]["code"] == "DD701"
    assert ran.status == 0
    grid = grids_of(ran.report)["what ranks took from loaders"]
    named = [{place["line"] for place in finding["where"]} for finding in ran.report["findings"]]
    drawn = {int(row.partition(":")[2].partition(",")[0]) for row in grid.rows}
    assert all(drawn & lines for lines in named)
    assert drawn <= set().union(*named)


def test_no_way_to_share_out_well_gives_an_alarm(tmp_path: Path) -> None:
    ran = run(WELL, tmp_path, "--debug-level", "OFF", *PATIENT, ranks=2)
    assert ran.report["job"]["status"] == "finished", ran.stderr
    assert ran.report["findings"] == []
    outcomes = {check["code"]: check["outcome"] for check in ran.report["checks"] if check["code"].startswith("DD7")}
    assert outcomes == dict.fromkeys(("DD701", "DD702", "DD703", "DD704"), "passed")


def test_ranks_that_run_out_of_batches_support_the_verdict(tmp_path: Path) -> None:
    ran = run("mismatch_uneven", tmp_path, "--debug-level", "OFF")
    assert ran.report["verdict"]["kind"] == "mismatch"
    (uneven,) = (finding for finding in ran.report["findings"] if finding["code"] == "DD704")
    assert (uneven["ranks"], uneven["severity"]) == ([2], "error")
    assert "batches of pass 1: 11 on ranks 0 and 1, 10 on rank 2" in uneven["evidence"]
