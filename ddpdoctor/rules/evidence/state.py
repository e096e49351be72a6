"""The evidence of one run as the rules see it: facts joined by rank, comparisons between ranks, and what is lacking."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.evidence import (  # fmt: skip
    MOST_RANKS,
    Absent,
    Circle,
    Differ,
    Exited,
    Fact,
    Failed,
    Finished,
    Hint,
    Inside,
    Launched,
    Link,
    Moving,
    Nature,
    Reached,
    Refused,
    Restarted,
    Seen,
    Shown,
    Size,
    Spot,
    Stacked,
    Stopped,
    Trouble,
    Waiting,
    Who,
)
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.evidence.calls import compare_calls, compare_stacks, compare_waits
from ddpdoctor.rules.evidence.flight import compare_flight

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.evidence import Evidence, EvidenceRun
    from ddpdoctor.rules.answers import Problem

Named = TypeVar("Named", int, str)
RAS = "ras"  # the kind of note that every report gives
_OF_COUNTS = frozenset({"ras-ahead", "ras-unnamed"})
Kind = TypeVar("Kind", bound=Fact)
_OF_OTHERS = (Absent, Circle, Differ, Inside)  # facts about ranks whose own evidence need not have been given


def set_apart_handled(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts, with notes in place of the errors after which the same writer went on or ended well."""
    signs = [
        fact for fact in facts if isinstance(fact, Moving) or (isinstance(fact, Finished) and not fact.process_only)
    ]
    exits = [fact.who.rank for fact in facts if isinstance(fact, Exited) and fact.code is not None]
    found: list[Fact] = []
    for fact in facts:
        failed = fact if isinstance(fact, Failed) else None
        # Somebody who is late, at the start or later, holds up the whole job as long as it lasts.
        of_job = isinstance(fact, Absent) and fact.expected
        if isinstance(fact, Waiting):
            of_job = fact.in_init and not fact.timed_out
        # A process may have ended by this error; what it had still to print may come after the error.
        explains = failed is not None and any(rank in (fact.who.rank, None) or fact.who.rank is None for rank in exits)
        own = of_job or failed is not None or (isinstance(fact, Exited) and fact.who == Who())
        at_once = failed is not None and failed.alone  # one step is enough after a line that need not be a failure
        after = (
            sign.steady_from if isinstance(sign, Moving) and not at_once else sign.spot.line
            for sign in signs
            if sign.spot.source == fact.spot.source and (of_job or sign.who == fact.who)
        )
        here = fact.spot.line
        if own and not explains and here is not None and any(line is not None and line > here for line in after):
            said = f"{failed.type} was caught: {failed.message}".rstrip(": ") if failed is not None else fact.said
            note = f"{said}; the job went on"
            found.append(Hint(who=fact.who, spot=fact.spot, time=fact.time, said=fact.said, words=note, kind="handled"))
        else:
            found.append(fact)
    return tuple(found)


def world_of(run: EvidenceRun) -> int | None:
    """Return the number of ranks of a run, or None if no source says it."""
    sizes = [fact.ranks for fact in run.facts if isinstance(fact, Size) and not fact.group]
    sizes += [dump.world_size for dump in run.dumps if dump.world_size]
    return max((size for size in sizes if size <= MOST_RANKS), default=None)


def resolve(facts: Sequence[Fact], world: int | None) -> tuple[Fact, ...]:
    """Return the facts with the global rank and the host of their processes, as far as other facts give them."""
    facts = [fact for fact in facts if not isinstance(fact, Size) or fact.ranks <= MOST_RANKS]
    ranks: dict[object, set[int]] = defaultdict(set)  # what each name of a process stands for
    named: dict[object, set[str]] = defaultdict(set)
    for who in {fact.who for fact in facts}:
        for name in _names(who):
            ranks[name] |= {who.rank} if who.rank is not None else set()
            named[name] |= {who.host} if who.host else set()
        if who.rank is not None and who.host:
            named["rank", who.rank].add(who.host)
        if who.address and who.host:
            named["address", who.address].add(who.host)
    members = {fact.group: fact.members for fact in facts if isinstance(fact, Size) and fact.members}
    tasks, locals_ = _tasks_are_ranks(facts, world), _locals_are_ranks(facts, world)
    found = []
    gpus = _gpus(facts)
    hosts = frozenset(fact.who.host for fact in facts if fact.who.host)
    for fact in facts:
        who = fact.who
        rank, place = who.rank, who.group_rank
        if rank is None and place is not None:  # in the default group both are equal
            known = members.get(who.group)
            rank = place if not who.group else known[place] if known and place < len(known) else None
        if rank is None:
            rank = _only(ranks, *_names(who))
        if rank is None and tasks:
            rank = who.task
        host = who.host or (_only(named, ("address", who.address)) if who.address else None) or ""
        if not host and rank is not None:
            host = _only(named, ("rank", rank)) or ""
        if rank is None and locals_:
            rank = who.local_rank
        if isinstance(fact, Trouble) and not host:
            # The name of the file or of its folder may name a host, if others tell of a host of this name.
            source = fact.spot.source
            words = {*re.split(r"[/_.\s]", source), *re.split(r"[/_.\s-]", source), *re.split(r"[/_\s]", source)}
            host = next(iter(words & hosts)) if len(words & hosts) == 1 else ""
        if isinstance(fact, Trouble) and fact.gpu and rank is None:
            # Without a host it must be the only GPU at this place.
            users = [(on, user) for (on, bus), user in gpus.items() if bus == fact.gpu and host in (on, "")]
            host, rank = users[0] if len(users) == 1 else (host, None)
        who = replace(who, rank=rank, host=host)
        found.append(fact if who == fact.who else replace(fact, who=who))
    return tuple(found)


def _only(table: Mapping[object, set[Named]], *names: object) -> Named | None:
    """Return what the first name stands for that stands for exactly one. A name with two ranks says nothing."""
    return next((next(iter(table[name])) for name in names if len(table.get(name, ())) == 1), None)


def number_stacks(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts with ranks for processes of which only stacks tell: a launcher starts ranks in order.

    Processes of one host are in the order of their pids, those of several files with equal pids in that of the names.
    """
    own = [fact for fact in facts if isinstance(fact, Stacked) and not fact.worker]
    if any(fact.who.rank is not None for fact in own):
        return tuple(facts)
    hosts = {fact.who.host for fact in own}
    pids = {(fact.spot.source, fact.who.pid) for fact in own if fact.who.pid is not None}
    names = sorted(pids, key=lambda name: (name[1], _natural(name[0])))
    if len(hosts) > 1 or len({pid for _, pid in pids}) < len(pids):
        names.sort(key=lambda name: (_natural(name[0]), name[1]))
    if len(names) < 2 or len({pid for _, pid in pids}) not in {1, len(pids)}:
        return tuple(facts)
    ranks: dict[tuple[str, int | None], int] = {name: rank for rank, name in enumerate(names)}
    return tuple(
        replace(fact, who=replace(fact.who, rank=ranks.get((fact.spot.source, fact.who.pid))))
        if isinstance(fact, Stacked) and fact.who.rank is None
        else fact
        for fact in facts
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what puts "n10" behind "n9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _gpus(facts: Iterable[Fact]) -> dict[tuple[str, str], int | None]:
    """Return the rank on each GPU of a host. A GPU that several ranks had, one after the other, is nobody's."""
    found: dict[tuple[str, str], int | None] = {}
    for fact in facts:
        if isinstance(fact, Seen) and fact.gpu and fact.who.rank is not None:
            key = (fact.who.host, fact.gpu)
            found[key] = fact.who.rank if found.get(key, fact.who.rank) == fact.who.rank else None
    return found


def _names(who: Who) -> list[tuple[object, ...]]:
    """Return the names of a process, the most exact first."""
    names: list[tuple[object, ...]] = []
    where = who.host or who.address
    if who.pid is not None:
        names += [("pid", where, who.pid)] if where else []
        names.append(("pid", who.pid))
    if who.local_rank is not None:
        names += [("local", where, who.local_rank)] if where else []
        names.append(("local", who.local_rank))
    return names


def _locals_are_ranks(facts: Iterable[Fact], world: int | None) -> bool:
    """Return whether local ranks are ranks, as they are on one node.

    Nothing may speak of a second node: another host, a rank that is no local rank, or one local rank in two places.
    """
    facts = [fact for fact in facts if fact.who != Who()]
    hosts, places = set(), defaultdict(set)
    for fact in facts:
        if fact.who.local_rank is not None:
            hosts.add(fact.who.host or fact.who.address)
            source = fact.spot.source
            folder = source.rpartition("/")[0]
            places[fact.who.local_rank].add(folder if re.search(r"attempt_\d+/\d+$", folder) else source)
    size = max(places, default=-1) + 1
    ranks = {fact.who.rank for fact in facts if fact.who.rank is not None}
    pairs = {(fact.who.rank, fact.who.local_rank) for fact in facts if None not in {fact.who.rank, fact.who.local_rank}}
    alone = len(hosts - {""}) < 2 and all(len(those) == 1 for those in places.values())
    return (
        alone
        and all(rank == local for rank, local in pairs)
        and all(rank < size for rank in ranks)
        and (world is None or world < 2 * size)
    )


def _tasks_are_ranks(facts: Iterable[Fact], world: int | None) -> bool:
    """Return whether Slurm's task numbers are ranks: with one task for each GPU they are, with one a node they are not.

    If nothing speaks against it they are taken for ranks.
    """
    facts = list(facts)
    if any(isinstance(fact, Launched) and fact.starts_several for fact in facts):
        return False
    # No file may tell of a task, and of ranks, if the rank of this number wrote into other files only.
    ranks, tasks = defaultdict(set), defaultdict(set)
    for fact in facts:
        if fact.who.rank is not None:
            ranks[fact.spot.source].add(fact.who.rank)
        elif fact.who.task is not None:
            tasks[fact.spot.source].add(fact.who.task)
    every = {rank for those in ranks.values() for rank in those}
    if any(ranks[source] and (those & every) - ranks[source] for source, those in tasks.items()):
        return False
    pairs = {(fact.who.task, fact.who.rank) for fact in facts if fact.who.task is not None}
    if any(rank is not None and rank != task for task, rank in pairs):
        return False
    locals_ = {fact.who.local_rank for fact in facts if fact.who.task is not None and fact.who.local_rank}
    return not locals_ and (world is None or max((task for task, _ in pairs if task is not None), default=0) < world)


def join_reports(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts with what the last two reports say together. Counts differ for an instant in any job."""
    sources = list(dict.fromkeys(fact.spot.source for fact in facts if isinstance(fact, Hint) and fact.kind == RAS))
    if len(sources) < 2:
        return tuple(facts)
    former, last = (_numbers(facts, source) for source in sources[-2:])
    stale = [fact for fact in facts if _is_of_counts(fact) and fact.spot.source in sources[:-1]]
    left = [fact for fact in facts if not any(fact is one for one in stale)]
    if former and (former.keys().isdisjoint(last) or any(last[key] > former[key] for key in former.keys() & last)):
        spot = next(fact.spot for fact in reversed(facts) if fact.spot.source == sources[-1])
        moved = Moving(spot=spot, said="the counts of operations grew between two reports")
        return (*(fact for fact in left if not _is_of_counts(fact)), moved)
    stood = former.keys() & last.keys()
    return tuple(replace(fact, certain=True) if stood and isinstance(fact, Absent) else fact for fact in left)


def _numbers(facts: Iterable[Fact], source: str) -> dict[str, int]:
    """Return the lowest number of each operation in which ranks of a communicator differ."""
    found: dict[str, int] = {}
    for fact in facts:
        if fact.spot.source != source or not _is_of_counts(fact):
            continue
        if isinstance(fact, Reached) and fact.enqueued is not None:
            found[fact.group] = min(found.get(fact.group, fact.enqueued), fact.enqueued)
        elif isinstance(fact, Waiting) and fact.operation.seq is not None:
            found[fact.operation.words()] = fact.operation.seq
    return found


def _is_of_counts(fact: Fact) -> bool:
    if isinstance(fact, Absent):
        return fact.shown is Shown.COUNTS
    if isinstance(fact, Reached):
        return fact.group.startswith("comm ")
    if isinstance(fact, Waiting):
        return fact.operation.group.startswith("comm ") and not fact.timed_out and not fact.in_init
    return isinstance(fact, Hint) and fact.kind in _OF_COUNTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What is wrong, or why that cannot be told."""

    kind: str = ""  # the kind of the rule that answers; empty: none does
    problem: Problem | None = None
    reason: str = ""  # why there is no verdict; empty: there is one, or nothing is wrong
    collect: tuple[str, ...] = ()  # if there is no verdict: what to collect, as instructions, the most useful first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Everything that the rules look at."""

    evidence: Evidence
    run: EvidenceRun
    world: int | None
    facts: tuple[Fact, ...]  # with ranks and hosts joined, and with what comparing them gave
    seen: frozenset[int]  # the ranks of which evidence was given
    hosts: Mapping[int, str]  # the hosts of ranks, as far as they are known
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
