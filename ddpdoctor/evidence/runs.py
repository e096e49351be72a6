"""Tells the runs of a job apart: a log may hold several, and dumps of yesterday may lie beside those of today."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.evidence.attach_folders import leave_out_folders
from ddpdoctor.evidence.dump_choice import choose_dumps
from ddpdoctor.model.evidence import Exited, Failed, Finished, Launched, Restarted, Stopped, Waiting
from ddpdoctor.model.evidence_runs import EvidenceRun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.attached import AskedNodes, AttachedJob
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.flight import FlightDump

_ENDS = (Failed, Exited, Stopped, Finished)
_JOB = re.compile(r"slurm-(\d+)")


@dataclass(slots=True, kw_only=True)
class Part:
    """The facts of one file, in their order there."""

    source: str
    attempt: int | None
    modified: float | None
    facts: list[Fact] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    attached: AttachedJob | AskedNodes | None = None


def gather_runs(parts: Sequence[Part]) -> tuple[tuple[EvidenceRun, ...], dict[str, str]]:
    """Return the runs, the last one last, and why whole files were left out of all runs.

    The runs of several files are counted from their ends: a file with one run belongs to the last run.
    """
    folders = {part.source: part.attached for part in parts if part.attached is not None}
    left_out = leave_out_folders(folders, [part.source for part in parts])
    parts = [part for part in parts if part.source not in left_out]
    by_job: dict[tuple[int, int], list[tuple[Part, list[list[Fact]]]]] = {}
    newest = max((_job(part) for part in parts), default=0)
    last_attempt = max((part.attempt or 0 for part in parts), default=0)
    for part in parts:
        job = _job(part) or newest
        attempt = last_attempt if part.attempt is None else part.attempt
        by_job.setdefault((job, attempt), []).append((part, _split(part.facts)))
    runs: list[EvidenceRun] = []
    for (job, attempt), those in sorted(by_job.items()):
        most = max(len(pieces) for _, pieces in those)
        for back in range(most, 0, -1):
            facts = [fact for _, pieces in those if len(pieces) >= back for fact in pieces[-back]]
            dumps, others = choose_dumps([dump for part, _ in those for dump in part.dumps if back == 1])
            left_out |= others
            name = _name(job, attempt, facts, of_jobs=len({key[0] for key in by_job}), last_attempt=last_attempt)
            runs.append(EvidenceRun(facts=tuple(facts), dumps=tuple(dumps), number=len(runs), name=name))
    return tuple(runs), left_out


def _job(part: Part) -> int:
    """Return the Slurm job whose log this is, or 0 if its name does not say."""
    found = _JOB.search(part.source.rpartition("/")[2])
    return int(found[1][:15]) if found else 0


def _split(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Split the facts of one file at each new launch that follows the end of the run before it."""
    pieces: list[list[Fact]] = [[]]
    ended = False
    for fact in facts:
        if isinstance(fact, Restarted) or (isinstance(fact, Launched) and ended):
            pieces.append([])
            ended = False
        pieces[-1].append(fact)
        ended = ended or isinstance(fact, _ENDS) or (isinstance(fact, Waiting) and fact.timed_out)
    return pieces


def _name(job: int, attempt: int, facts: Sequence[Fact], *, of_jobs: int, last_attempt: int) -> str:
    words = [f"job {job}"] if of_jobs > 1 else []
    words += [f"attempt {attempt}"] if last_attempt else []
    begins = next((fact.spot for fact in facts if fact.spot.line is not None), None)
    words += [f"from {begins.source}:{begins.line}"] if begins is not None and not words else []
    return ", ".join(words)
