"""Tells the runs of a job apart: a log may hold several, and dumps of yesterday may lie beside those of today."""

from __future__ import annotations

import re
from calendar import timegm
from dataclasses import dataclass, field
from time import gmtime
from typing import TYPE_CHECKING

from ddpdoctor.evidence.attach_folders import leave_out_folders
from ddpdoctor.evidence.dump_choice import choose_dumps
from ddpdoctor.model.evidence import (
    Exited,
    Failed,
    Finished,
    Launched,
    Moving,
    Reached,
    Restarted,
    Size,
    Stopped,
    Waiting,
)
from ddpdoctor.model.evidence_runs import EvidenceRun
from ddpdoctor.model.rank_words import first_names
from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.attached import AskedNodes, AttachedJob
    from ddpdoctor.model.evidence import Fact, Time
    from ddpdoctor.model.flight import FlightDump

_ENDS = (Failed, Exited, Stopped, Finished)
_OF_RANKS = (*_ENDS, Launched, Restarted, Waiting, Reached, Moving)
"""Facts of which a job is made. Others may tell of machines, before and after it."""
_SLURM = re.compile(r"slurm-(\d+)")
_DAY_S = 86_400
"""Our choice: what is further apart in time is of two jobs. Clocks of one job may be in different time zones."""
_HOUR_S = 3600
_YEAR_S = 365 * _DAY_S
_DATED_S = 10**9
"""Times below it have no date, or no year."""


@dataclass(slots=True, kw_only=True)
class Part:
    """The facts of one file, in their order there."""

    source: str
    attempt: int | None
    modified: float | None
    facts: list[Fact] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    attached: AttachedJob | AskedNodes | None = None
    span: tuple[float, float] | None = None
    """The first and the last time in its lines, in seconds since the epoch, if they have dates."""
    names: frozenset[tuple[str, str]] = frozenset()
    """What its lines call the job: ("SLURM_JOB_ID", "4711"), ("MASTER_PORT", "29511")."""


@dataclass(slots=True)
class _Job:
    """The files of one job, and what they have in common."""

    number: int = 0
    """That of Slurm in the names of its files, or 0."""
    parts: list[Part] = field(default_factory=list)
    names: dict[str, set[str]] = field(default_factory=dict)
    worlds: set[int] = field(default_factory=set)
    span: tuple[float, float] | None = None
    modified: float = 0

    def add(self, part: Part) -> None:
        """Take in a file."""
        self.parts.append(part)
        for kind, name in part.names:
            self.names.setdefault(kind, set()).add(name)
        self.worlds |= {world} if (world := _world(part)) is not None else set()
        self.modified = max(self.modified, part.modified or 0)
        span = _span(part)
        if span is not None and (self.span is None or span[0] > _DATED_S > self.span[0]):
            self.span = span
        elif span is not None and self.span is not None and (span[0] > _DATED_S) == (self.span[0] > _DATED_S):
            self.span = (min(span[0], self.span[0]), max(span[1], self.span[1]))

    @property
    def newness(self) -> tuple[float, float]:
        """What is greater for a later job: its end, or when its files were last written."""
        return (self.span[1] if self.span is not None else 0, self.modified)

    def contradicts(self, part: Part) -> bool:
        """Return whether a file is of another job: it has another name, or is from another time."""
        for kind, mine in self.names.items():
            names = {name for one, name in part.names if one == kind}
            if len(mine) == len(names) == 1 and mine != names:
                return True
        span = _span(part)
        gap_s = _gap(self.span, span) if self.span is not None and span is not None else 0
        is_other_world = bool(self.worlds) and _world(part) not in {None, *self.worlds}
        return gap_s > _DAY_S or (gap_s > _HOUR_S and is_other_world)


def gather_runs(parts: Sequence[Part]) -> tuple[tuple[EvidenceRun, ...], dict[str, str]]:
    """Return the runs, the last one last, and why whole files were left out of all runs.

    The runs of several files are counted from their ends: a file with one run belongs to the last run.
    """
    folders = {part.source: part.attached for part in parts if part.attached is not None}
    left_out = leave_out_folders(folders, [part.source for part in parts])
    parts = [part for part in parts if part.source not in left_out]
    last_attempt = max((part.attempt or 0 for part in parts), default=0)
    jobs = _jobs(parts)
    runs: list[EvidenceRun] = []
    for job in jobs:
        by_attempt = grouped((last_attempt if part.attempt is None else part.attempt, part) for part in job.parts)
        for attempt, those in sorted(by_attempt.items()):
            pieces = [_split(part.facts) for part in those]
            for back in range(max(map(len, pieces)), 0, -1):
                facts = [fact for one in pieces if len(one) >= back for fact in one[-back]]
                dumps, others = choose_dumps([dump for part in those for dump in part.dumps if back == 1])
                left_out |= others
                name = _name(job, attempt, facts, of_jobs=len(jobs), last_attempt=last_attempt)
                runs.append(EvidenceRun(facts=tuple(facts), dumps=tuple(dumps), number=len(runs), name=name))
    return tuple(runs), left_out


def _jobs(parts: Sequence[Part]) -> list[_Job]:
    """Return the jobs whose files these are, the last one last. What tells of no job is taken to the last one."""
    jobs: dict[int, _Job] = {}
    others: list[Part] = []
    for part in parts:
        found = _SLURM.search(part.source.rpartition("/")[2])
        if found is None:
            others.append(part)
        else:
            number = int(found[1][:15])
            jobs.setdefault(number, _Job(number)).add(part)
    told = list(jobs.values())
    rest: list[Part] = []
    for part in sorted(others, key=lambda part: (_span(part) or (0, 0))[::-1]):
        is_of_ranks = not part.dumps and any(isinstance(fact, _OF_RANKS) for fact in part.facts)
        if not is_of_ranks or (_span(part) is None and not part.names):
            rest.append(part)
            continue
        fitting = [job for job in told if not job.contradicts(part)]
        if not fitting:
            told.append(_Job())
        max(fitting or told[-1:], key=lambda job: (job.number, *job.newness)).add(part)
    are_numbered = all(job.number for job in told)
    told.sort(key=lambda job: (job.number,) if are_numbered else job.newness)
    told = told or [_Job()]
    for part in rest:
        told[-1].add(part)
    places = {part.source: place for place, part in enumerate(parts)}
    for job in told:
        job.parts.sort(key=lambda part: places[part.source])
    return told if parts else []


def _span(part: Part) -> tuple[float, float] | None:
    """Return the first and the last time in a file. Those of torch's own log have no year."""
    if part.span is not None or part.dumps or part.attached is not None:
        return part.span
    times = [fact.time.seconds for fact in part.facts if fact.time is not None and fact.time.clock.endswith("no year")]
    return (min(times), max(times)) if times else None


def _gap(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return how many seconds lie between two spans. If one has no year, the years do not count."""
    if (one[0] > _DATED_S) == (other[0] > _DATED_S):
        gap_s = max(one[0] - other[1], other[0] - one[1], 0)
        return gap_s if one[0] > _DATED_S else min(gap_s, max(_YEAR_S - gap_s, 0))
    dated, plain = (one, other) if one[0] > _DATED_S else (other, one)
    begin = gmtime(dated[0])
    first = timegm((1970, begin.tm_mon, begin.tm_mday, begin.tm_hour, begin.tm_min, begin.tm_sec, 0, 0, 0))
    gap_s = max(first - plain[1], plain[0] - (first + dated[1] - dated[0]), 0)
    return min(gap_s, max(_YEAR_S - gap_s, 0))


def _world(part: Part) -> int | None:
    return max((fact.ranks for fact in part.facts if isinstance(fact, Size) and not fact.group), default=None)


def _split(facts: Sequence[Fact]) -> list[list[Fact]]:
    """Split the facts of one file at each new launch that follows the end of the run before it."""
    pieces: list[list[Fact]] = [[]]
    ended = False
    last: Time | None = None
    for fact in facts:
        is_later = (
            last is not None
            and fact.time is not None
            and fact.time.clock == last.clock
            and fact.time.seconds - last.seconds > _DAY_S
        )
        if isinstance(fact, Restarted) or (ended and (isinstance(fact, Launched) or is_later)):
            pieces.append([])
            ended = False
        pieces[-1].append(fact)
        last = fact.time or last
        ended = ended or isinstance(fact, _ENDS) or (isinstance(fact, Waiting) and fact.timed_out)
    return pieces


def _name(job: _Job, attempt: int, facts: Sequence[Fact], *, of_jobs: int, last_attempt: int) -> str:
    words = []
    if of_jobs > 1:
        words.append(
            f"job {job.number}" if job.number else f"the job of {first_names([p.source for p in job.parts], 2)}"
        )
    words += [f"attempt {attempt}"] if last_attempt else []
    begins = next((fact.spot for fact in facts if fact.spot.line is not None), None)
    words += [f"from {begins.source}:{begins.line}"] if begins is not None and not words else []
    return ", ".join(words)
