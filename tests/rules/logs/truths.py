"""What is true of a set of evidence, and whether `ddpdoctor analyze` says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.diagnose.logs import analyze
from ddpdoctor.model.errors import ExitStatus
from ddpdoctor.model.findings import Outcome, Report, Severity, now
from ddpdoctor.report.formats import render_json

ABSENT = ("stuck", "missing", "early-exit", "crash", "killed")
"""If only the absence of a rank is known, all of these are right."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What must come out. None: it does not matter."""

    kinds: tuple[str, ...] = ()
    """The verdict is one of them. Empty: no verdict is right, and a check says what to collect."""
    ranks: tuple[int, ...] | None = None
    hosts: tuple[str, ...] | None = None
    hosts_within: tuple[str, ...] | None = None
    where: str = ""
    confidence: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    """Patterns in the verdict."""
    mentions: tuple[str, ...] = ()
    """Patterns anywhere in the report."""
    not_ranks: tuple[int, ...] = ()
    or_cannot_tell: bool = False
    """No verdict is right too."""
    collect: tuple[str, ...] = ()
    never_says: tuple[str, ...] = ()
    silent: bool = False
    """Nothing is wrong."""
    ended: bool = True
    """And the evidence shows a good end, or two samples of a job that moves. Else it may hang since."""


Files = str | bytes | Mapping[str, str | bytes]


def analyzed(folder: Path, files: Files) -> Report:
    """Write the files, and analyze them as the command does."""
    for name, content in files.items() if isinstance(files, Mapping) else [("job.log", files)]:
        path = folder / "evidence" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return analyze([str(folder / "evidence")], ("ddpdoctor", "analyze"), now())


def hold(folder: Path, files: Files, truth: Truth) -> Report:
    """Write the files, analyze them as the command does, and compare the report with the truth."""
    report = analyzed(folder, files)
    status = report.exit_status(Severity.ERROR)
    everything = render_json(report)
    assert not [secret for secret in truth.never_says if secret in everything]
    assert not [check for check in report.checks if check.outcome is Outcome.CRASHED]
    _mentions(truth.mentions, _told(report))
    if truth.silent:
        loud = [one.summary for one in report.findings if one.severity is not Severity.INFO]
        assert not loud
        wanted = ExitStatus.OK if truth.ended else ExitStatus.INCONCLUSIVE
        assert status is wanted, [check.reason for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
        return report
    if report.verdict is None:
        _check_cannot_tell(report, truth, status)
    else:
        _check_verdict(report, truth, status)
    return report


def _told(report: Report) -> str:
    """Return what a reader gets to read in any form of the report."""
    parts = [text for one in report.findings for text in (one.summary, one.fix, *one.evidence)]
    return "\n".join([*parts, *(f"{check.reason} {check.seen}" for check in report.checks)])


def _check_cannot_tell(report: Report, truth: Truth, status: ExitStatus) -> None:
    reasons = [check.reason for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    assert truth.or_cannot_tell or not truth.kinds, f"no verdict: {reasons}"
    assert reasons
    assert status is ExitStatus.INCONCLUSIVE
    _mentions(truth.collect, "\n".join(map(str, reasons)))


def _check_verdict(report: Report, truth: Truth, status: ExitStatus) -> None:
    verdict = report.verdict
    assert verdict is not None
    told = f"{verdict.kind}, ranks {verdict.ranks}, hosts {verdict.hosts}: {verdict.summary}"
    assert verdict.kind in truth.kinds, told
    assert truth.ranks is None or verdict.ranks == truth.ranks, told
    assert truth.hosts is None or verdict.hosts == truth.hosts, told
    assert truth.hosts_within is None or set(verdict.hosts) <= set(truth.hosts_within), told
    assert not set(verdict.ranks) & set(truth.not_ranks), told
    assert not truth.confidence or verdict.confidence.value in truth.confidence, f"{verdict.confidence.value}: {told}"
    places = [f"{Path(place.file).name}:{place.line}" for place in verdict.where]
    assert not truth.where or truth.where in places, f"{places}: {told}"
    _mentions(truth.says, "\n".join([verdict.summary, *verdict.evidence]))
    if not truth.or_cannot_tell:
        _mentions(truth.collect, "\n".join([verdict.summary, *verdict.evidence, verdict.fix]))
    assert len(set(verdict.evidence)) == len(verdict.evidence), verdict.evidence
    assert status is ExitStatus.FOUND


def _mentions(patterns: tuple[str, ...], told: str) -> None:
    missing = [pattern for pattern in patterns if not re.search(pattern, told)]
    assert not missing, f"{missing} not in: {told[:3000]}"
