"""Some ranks' lines of a job's log, and cuts of it, never make an innocent rank guilty."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ddpdoctor.cli.output import render
from ddpdoctor.diagnose.evidence import analyze
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.findings import Confidence, Severity, now
from ddpdoctor.report.text.report import render_text, render_verdict
from tests.evidence_texts import old_watchdog, steps, text, work
from tests.rules.evidence.pastes import JOBS, grade, paste

CALL = work(71)
SEEDS = [range(12), pytest.param(range(12, 24), marks=pytest.mark.full)]


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"from {seeds.start}")
@pytest.mark.parametrize("make", JOBS, ids=lambda make: make.__name__)
def test_no_paste_of_a_log_blames_an_innocent_rank_for_sure(make, seeds: range, tmp_path: Path) -> None:
    grades: Counter[tuple[bool, str]] = Counter()
    for seed in seeds:
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
    assert grades[False, "hedged"] <= len(seeds) // 4
    assert grades[True, "hedged"] == 0


@pytest.mark.parametrize("form", ["text", "json", "markdown", "html", "junit", "sarif", "github", "an agent's"])
def test_every_format_says_how_sure_it_is(form: str, tmp_path: Path) -> None:
    lines = [
        f"{rank}: {line}" for rank in range(4) for line in [*steps(9), *(old_watchdog(rank, CALL) if rank else [])]
    ]
    (tmp_path / "job.log").write_text(text(lines))
    report = analyze([str(tmp_path)], ("ddpdoctor", "analyze"), now())
    assert report.verdict is not None
    assert (report.verdict.ranks, report.verdict.confidence) == ((0,), Confidence.LOW)
    written = {
        "text": lambda: render_text(report, width=None, color=False, run_dir=None),
        "an agent's": lambda: render_verdict(report),
    }.get(form, lambda: render(report, form, fail_on=Severity.ERROR))()
    assert re.search(r"confidence\W{1,6}low", written)
    assert "rank 0 may not have called" in " ".join(written.split())
