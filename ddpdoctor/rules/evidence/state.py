"""The evidence of one run as the rules see it: facts joined by rank, comparisons between ranks, and what is lacking."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.evidence import (
    Absent,
    Circle,
    Differ,
    Exited,
    Fact,
    Failed,
    Finished,
    Inside,
    Launched,
    Link,
    Moving,
    Nature,
    Refused,
    Restarted,
    Size,
    Spot,
    Stacked,
    Stopped,
    Trouble,
    Waiting,
    Who,
)  # fmt: skip
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.evidence.calls import compare_calls
from ddpdoctor.rules.evidence.flight import compare_flight
from ddpdoctor.rules.evidence.handled import set_apart_handled
from ddpdoctor.rules.evidence.identity import number_stacks, resolve, world_of
from ddpdoctor.rules.evidence.ras_looks import join_reports
from ddpdoctor.rules.evidence.stacks import compare_stacks
from ddpdoctor.rules.evidence.watchdog import compare_waits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.evidence_runs import Evidence, EvidenceRun
    from ddpdoctor.rules.answers import Problem

Kind = TypeVar("Kind", bound=Fact)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is wrong, or why that cannot be told."""

    kind: str = ""
    """The kind of the rule that answers; empty: none does."""
    problem: Problem | None = None
    reason: str = ""
    """Why there is no verdict; empty: there is one, or nothing is wrong."""
    collect: tuple[str, ...] = ()
    """If there is no verdict: what to collect, as instructions, the most useful first."""


_OF_OTHERS = (Absent, Circle, Differ, Inside)
"""Facts about ranks whose own evidence need not have been given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that the rules look at."""

    evidence: Evidence
    run: EvidenceRun
    world: int | None
    facts: tuple[Fact, ...]
    """With ranks and hosts joined, and with what comparing them gave."""
    seen: frozenset[int]
    """The ranks of which evidence was given."""
    hosts: Mapping[int, str]
    """The hosts of ranks, as far as they are known."""
    ruling: Ruling = Ruling()
    _by_kind: dict[type, list[Any]] = field(default_factory=dict, init=False, repr=False)
    _by_rank: dict[tuple[int | None, type], list[Any]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Sort the facts, of which a large job has many thousands."""
        for fact in self.facts:
            self._by_kind.setdefault(type(fact), []).append(fact)
            self._by_rank.setdefault((fact.who.rank, type(fact)), []).append(fact)

    def all(self, kind: type[Kind]) -> list[Kind]:
        """Return all facts of a kind, in the order in which they were read."""
        return self._by_kind.get(kind, [])

    def of(self, rank: int, kind: type[Kind]) -> list[Kind]:
        """Return the facts of a kind about one rank."""
        return self._by_rank.get((rank, kind), [])

    def samples_of(self, rank: int) -> list[Stacked]:
        """Return the stacks of a rank itself, not those of its workers."""
        return [fact for fact in self.of(rank, Stacked) if not fact.worker]

    @property
    def unseen(self) -> tuple[int, ...]:
        """The ranks of the world of which no evidence was given; empty if the size of the world is unknown."""
        return tuple(rank for rank in range(self.world or 0) if rank not in self.seen)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait for others, or waited until a time limit."""
        found = {fact.who.rank for fact in self.all(Waiting)}
        found |= {fact.who.rank for fact in self.all(Failed) if fact.nature in {Nature.PEER_LOST, Nature.TIMED_OUT}}
        for fact in self.facts:
            found |= set(fact.ranks) if isinstance(fact, Inside) else set()
            found |= set(fact.waiters) if isinstance(fact, Absent) else set()
        return tuple(sorted(rank for rank in found if rank is not None))

    def refusals(self) -> list[tuple[Refused, list[int]]]:
        """Return what a look could not use, each once, with the ranks for which it is the same."""
        alike = grouped((replace(fact, who=Who(), spot=Spot(source="")), fact.who.rank) for fact in self.all(Refused))
        return [(fact, sorted({rank for rank in ranks if rank is not None})) for fact, ranks in alike.items()]

    def hosts_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts of ranks, sorted, without those that are unknown."""
        return tuple(sorted({self.hosts[rank] for rank in ranks if self.hosts.get(rank)}))

    def host_of(self, who: Who) -> str:
        """Return the name of somebody's host, else its address; empty if neither is known."""
        named = {fact.who.host for fact in self.facts if who.address and fact.who.address == who.address}
        named.discard("")
        return who.host or (named.pop() if len(named) == 1 else who.address)

    @property
    def ended_well(self) -> bool:
        """The job ended, or was seen making progress in two samples, and nothing went wrong before."""
        return (bool(self.all(Finished)) or self.moves) and not self.went_wrong

    @property
    def numbered_by(self) -> str:
        """What ranks are taken from, if no evidence tells a rank or the world size: local ranks, or Slurm's tasks."""
        if self.world is not None or any(fact.who.rank is not None for fact in self.run.facts):
            return ""
        ranked = [fact.who for fact in self.facts if fact.who.rank is not None]
        if not ranked:
            return ""
        return "Slurm's task" if any(who.task is not None for who in ranked) else "the local rank"

    @property
    def moves(self) -> bool:
        """Two samples show progress. What a log says of steps ends with the log."""
        return any(not fact.logged for fact in self.all(Moving))

    @property
    def went_wrong(self) -> bool:
        """Something tells of a failure, a wait or a difference."""
        bad = (Failed, Exited, Waiting, Trouble, Stopped, *_OF_OTHERS)
        if any(isinstance(fact, Link) for fact in self.facts) and not self.all(Finished):
            return True  # connections also close where a job ends well, but then it says so
        return any(isinstance(fact, bad) and not (isinstance(fact, Trouble) and not fact.fatal) for fact in self.facts)


def build_run_state(evidence: Evidence) -> RunState:
    """Join the facts of the last run, and compare its ranks."""
    run = evidence.runs[-1]
    world = world_of(run)
    read = join_reports(set_apart_handled(number_stacks(resolve(run.facts, world))))
    compared = [
        *compare_stacks(read, world), *compare_waits(read, world), *compare_calls(read),
        *compare_flight(run.dumps, world),
    ]  # fmt: skip
    found = [fact.ranks for fact in compared if isinstance(fact, Size) and not fact.group]
    world = max([world or 0, *found]) or None
    facts = resolve([*read, *compared], world)
    hosts: dict[int, set[str]] = defaultdict(set)
    for fact in facts:
        if fact.who.rank is not None and fact.who.host:
            hosts[fact.who.rank].add(fact.who.host)
    seen = {fact.who.rank for fact in facts if not isinstance(fact, (*_OF_OTHERS, Launched, Restarted))}
    seen |= {dump.rank for dump in run.dumps}
    seen |= {rank for fact in facts if isinstance(fact, Inside) for rank in fact.ranks}
    return RunState(
        evidence=evidence,
        run=run,
        world=world,
        facts=facts,
        seen=frozenset(rank for rank in seen if rank is not None),
        hosts={rank: next(iter(names)) for rank, names in hosts.items() if len(names) == 1},
    )


def last_samples(facts: Sequence[Fact]) -> dict[int, Stacked]:
    """Return the last stack of each rank's own main thread."""
    return {
        fact.who.rank: fact
        for fact in facts
        if isinstance(fact, Stacked) and fact.who.rank is not None and not fact.worker
    }
