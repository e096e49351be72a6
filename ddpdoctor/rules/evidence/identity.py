"""Finds out which rank a fact is about: sources name ranks, processes, tasks, hosts or ranks within a group."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import MOST_RANKS, Fact, Launched, Seen, Size, Stacked, Trouble, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.evidence_runs import EvidenceRun


@dataclass(slots=True)
class _Names:
    """What each name of a process stands for. A name with two ranks says nothing."""

    ranks: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    hosts: dict[object, set[str]] = field(default_factory=lambda: defaultdict(set))

    def rank(self, *names: object) -> int | None:
        """Return the rank of the first name that stands for exactly one."""
        for name in names:
            if name is not None and len(found := self.ranks.get(name, set())) == 1:
                return next(iter(found))
        return None

    def host(self, *names: object) -> str:
        """Return the host of the first name that stands for exactly one."""
        for name in names:
            if name is not None and len(found := self.hosts.get(name, set())) == 1:
                return next(iter(found))
        return ""


def world_of(run: EvidenceRun) -> int | None:
    """Return the number of ranks of a run, or None if no source says it."""
    sizes = [fact.ranks for fact in run.facts if isinstance(fact, Size) and not fact.group]
    sizes += [dump.world_size for dump in run.dumps if dump.world_size]
    return max((size for size in sizes if size <= MOST_RANKS), default=None)


def resolve(facts: Sequence[Fact], world: int | None) -> tuple[Fact, ...]:
    """Return the facts with the global rank and the host of their processes, as far as other facts give them."""
    facts = [fact for fact in facts if not isinstance(fact, Size) or fact.ranks <= MOST_RANKS]
    names = _collect(facts)
    members = {fact.group: fact.members for fact in facts if isinstance(fact, Size) and fact.members}
    tasks, locals_ = _tasks_are_ranks(facts, world), _locals_are_ranks(facts, world)
    found = []
    gpus = _gpus(facts)
    hosts = frozenset(fact.who.host for fact in facts if fact.who.host)
    for fact in facts:
        who = _resolve(fact.who, names, members, tasks=tasks)
        if who.rank is None and locals_:
            who = replace(who, rank=who.local_rank)
        if isinstance(fact, Trouble) and not who.host:
            who = replace(who, host=_host_of_file(fact.spot.source, hosts))
        if isinstance(fact, Trouble) and fact.gpu and who.rank is None:
            who = _user_of(fact.gpu, who, gpus)
        found.append(fact if who == fact.who else replace(fact, who=who))
    return tuple(found)


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


def _user_of(gpu: str, who: Who, gpus: Mapping[tuple[str, str], int | None]) -> Who:
    """Return whose GPU it is. Without a host it must be the only one at this place."""
    if who.host:
        return replace(who, rank=gpus.get((who.host, gpu)))
    those = [(host, rank) for (host, bus), rank in gpus.items() if bus == gpu]
    return replace(who, host=those[0][0], rank=those[0][1]) if len(those) == 1 else who


def _host_of_file(source: str, hosts: AbstractSet[str]) -> str:
    """Return the host that the name of a file or of its folder names, if others tell of a host of this name."""
    words = {*re.split(r"[/_.\s]", source), *re.split(r"[/_.\s-]", source), *re.split(r"[/_\s]", source)}
    found = words & hosts
    return found.pop() if len(found) == 1 else ""


def _collect(facts: Iterable[Fact]) -> _Names:
    names = _Names()
    for who in {fact.who for fact in facts}:
        for name in _names(who):
            if who.rank is not None:
                names.ranks[name].add(who.rank)
            if who.host:
                names.hosts[name].add(who.host)
        if who.rank is not None and who.host:
            names.hosts["rank", who.rank].add(who.host)
        if who.address and who.host:
            names.hosts["address", who.address].add(who.host)
    return names


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


def _resolve(who: Who, names: _Names, members: Mapping[str, tuple[int, ...] | None], *, tasks: bool) -> Who:
    rank = who.rank
    if rank is None and who.group_rank is not None:
        rank = _of_group(who, members)
    if rank is None:
        rank = names.rank(*_names(who))
    if rank is None and tasks:
        rank = who.task
    host = who.host or names.host(("address", who.address) if who.address else None)
    if not host and rank is not None:
        host = names.host(("rank", rank))
    return replace(who, rank=rank, host=host)


def _of_group(who: Who, members: Mapping[str, tuple[int, ...] | None]) -> int | None:
    """Return the global rank of a rank within a group. In the default group they are equal."""
    if not who.group:
        return who.group_rank
    known = members.get(who.group)
    place = who.group_rank
    return known[place] if known and place is not None and place < len(known) else None


def _locals_are_ranks(facts: Iterable[Fact], world: int | None) -> bool:
    """Return whether local ranks are ranks, as they are on one node.

    Nothing may speak of a second node: another host, a rank that is no local rank, or one local rank in two places.
    """
    facts = [fact for fact in facts if fact.who != Who()]
    hosts, places = set(), defaultdict(set)
    for fact in facts:
        if fact.who.local_rank is not None:
            hosts.add(fact.who.host or fact.who.address)
            places[fact.who.local_rank].add(_writer(fact.spot.source))
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


def _writer(source: str) -> str:
    """Return the file, or below torchrun's --log-dir the folder of one rank."""
    folder = source.rpartition("/")[0]
    return folder if re.search(r"attempt_\d+/\d+$", folder) else source


def _tasks_are_ranks(facts: Iterable[Fact], world: int | None) -> bool:
    """Return whether Slurm's task numbers are ranks: with one task for each GPU they are, with one a node they are not.

    If nothing speaks against it they are taken for ranks.
    """
    facts = list(facts)
    if any(isinstance(fact, Launched) and fact.starts_several for fact in facts) or _are_elsewhere(facts):
        return False
    pairs = {(fact.who.task, fact.who.rank) for fact in facts if fact.who.task is not None}
    if any(rank is not None and rank != task for task, rank in pairs):
        return False
    locals_ = {fact.who.local_rank for fact in facts if fact.who.task is not None and fact.who.local_rank}
    return not locals_ and (world is None or max((task for task, _ in pairs if task is not None), default=0) < world)


def _are_elsewhere(facts: Iterable[Fact]) -> bool:
    """Return whether a file tells of a task, and of ranks, and the rank of this number wrote into other files only."""
    ranks, tasks = defaultdict(set), defaultdict(set)
    for fact in facts:
        if fact.who.rank is not None:
            ranks[fact.spot.source].add(fact.who.rank)
        elif fact.who.task is not None:
            tasks[fact.spot.source].add(fact.who.task)
    every = {rank for those in ranks.values() for rank in those}
    return any(ranks[source] and (those & every) - ranks[source] for source, those in tasks.items())
