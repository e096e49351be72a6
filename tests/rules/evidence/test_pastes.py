"""Some ranks' lines of a job's log, and cuts of it, never make an innocent rank guilty."""

from collections import Counter
from pathlib import Path

import pytest

from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, now
from tests.rules.evidence.pastes import JOBS, grade, paste

SEEDS = 24


@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_no_paste_of_a_log_blames_an_innocent_rank_for_sure(make, tmp_path: Path) -> None:
    grades: Counter[tuple[bool, str]] = Counter()
    for seed in range(SEEDS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        job, is_whole = paste(make, seed, folder)
        try:
            verdict = analyze([str(folder)], ("ddpdoctor", "analyze"), now()).verdict
        except UserError:  # nothing is left in it
            verdict = None
        assert grade(job, verdict) != "false", f"{folder}: {verdict} but it was {sorted(job.culprits)}"
        assert verdict is None or verdict.confidence is not Confidence.LOW or " may " in verdict.summary, verdict
        grades[is_whole, grade(job, verdict)] += 1
    assert grades[False, "hedged"] <= SEEDS // 4
    assert grades[True, "hedged"] == 0
