"""Real ranks that disagree or wait for each other: the kind, exactly the ranks, the line, and what is said of it."""

from pathlib import Path

import pytest

from tests.scenarios.running import PATIENT, marked_lines, numbers, rows_of, run

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.kept]

SEEDED = {
    job: (int(ranks), level, kind, list(numbers(blamed)), said)
    for job, ranks, level, kind, blamed, said in rows_of("disagree")
}


@pytest.mark.parametrize("job", SEEDED)
def test_the_ranks_that_disagree_are_found(job: str, tmp_path: Path) -> None:
    ranks, level, kind, blamed, said = SEEDED[job]
    verdict = run(job, tmp_path, "--debug-level", level, "--on-hang", "auto", ranks=ranks).report["verdict"]
    assert verdict is not None
    assert (verdict["kind"], verdict["ranks"]) == (kind, blamed), verdict
    assert {place["line"] for place in verdict["where"]} <= set(marked_lines(job)), verdict
    marked = (*marked_lines(job), *marked_lines(job, "SKIPPED"))
    assert any(said.format(line=line) in verdict["summary"] for line in marked), verdict
    if job == "mismatch_uneven":
        assert "rank 2 completed 10 optimizer steps and 10 batches" in verdict["evidence"]
    if job == "model_frozen":
        assert verdict["tensor"] == "0.weight"


@pytest.mark.parametrize(("job", "ranks"), [("clean_model_parallel", 4), ("clean_skips", 2)])
def test_ranks_that_may_differ_are_left_alone(job: str, ranks: int, tmp_path: Path) -> None:
    ran = run(job, tmp_path, "--debug-level", "OFF", *PATIENT, ranks=ranks)
    assert ran.report["verdict"] is None, ran.report["verdict"]
    assert ran.report["job"]["status"] == "finished", ran.stderr
