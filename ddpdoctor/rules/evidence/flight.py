"""Compares what the flight recorders of several ranks hold: who is behind, who made another call, who waits for whom.

Numbers count within one process group, and groups are told apart by name and members. A ring loses its oldest entries,
so a call that is older than the first entry of a group is not missing. Dumps are not taken at one moment.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Circle, Differ, Fact, Inside, Moving, Operation, Reached, Waiting, Who
from ddpdoctor.model.sides import group_alike
from ddpdoctor.rules.evidence.flight_calls import comparable
from ddpdoctor.rules.evidence.flight_clusters import clusters_of
from ddpdoctor.rules.evidence.flight_transfers import compare_transfers
from ddpdoctor.rules.evidence.waits import find_circle

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpdoctor.model.flight import FlightCall, FlightDump, FlightGroup
    from ddpdoctor.rules.evidence.flight_clusters import Cluster

_FROM_ROOT = frozenset({"broadcast", "scatter", "reduce", "gather"})
"""A rank may complete it before all others have come."""


def compare_flight(dumps: Sequence[FlightDump], world: int | None) -> list[Fact]:
    """Return who is behind, who differs, who is inside, and what each rank waits in.

    Args:
        dumps: At most one for each rank; those without a rank are ignored.
        world: The number of ranks, if it is known.
    """
    by_rank = {dump.rank: dump for dump in dumps if dump.rank is not None}
    clusters = clusters_of(by_rank)
    timed_out = any(part.timed_out for one in clusters for part in one.parts.values())
    found: list[Fact] = []
    for cluster in clusters:
        moved = None if timed_out or _first_different_number(cluster) is not None else _contradiction(cluster)
        if moved is not None:
            return [moved]
    for cluster in clusters:
        found += _compare(cluster, by_rank, world)
        found += compare_transfers(cluster)
    found += _waits(clusters)
    links = {
        (rank, fact.operation, fact.who.rank) for fact in found if isinstance(fact, Absent) for rank in fact.waiters
    }
    circle = find_circle(links) or _crossed(clusters, found)
    return [*found, circle] if circle is not None else found


def _contradiction(cluster: Cluster) -> Moving | None:
    """Return that the job moved, if a rank has completed what another one, dumped before it, had not even made."""
    if cluster.is_aligned:
        return None
    for rank, part in cluster.parts.items():
        if _may_lack_entries(cluster, rank):
            continue
        for other, ahead in cluster.parts.items():
            if part.last < ahead.last_done and ahead.knows_ends and ahead.done:
                done = zip(ahead.seq[: ahead.done], ahead.which, strict=False)
                if any(number > part.last and not _from_root(ahead.calls[call]) for number, call in done):
                    return Moving(who=Who(rank=other), spot=cluster.dumps[other].spot)
    return None


def _from_root(block: tuple[FlightCall, ...]) -> bool:
    return any(call.op in _FROM_ROOT for call in block)


def _compare(cluster: Cluster, by_rank: Mapping[int, FlightDump], world: int | None) -> list[Fact]:
    target = _target(cluster)
    differ = _first_difference(cluster, target, len(cluster.members) if cluster.members else world)
    if differ is not None:
        return [differ]
    if target is None:
        return []
    number, waiters = target
    operation = cluster.operation(waiters[0], number)
    members = cluster.members or _guessed_members(cluster, by_rank, world)
    behind = [rank for rank in members if rank in by_rank and _is_behind(cluster, rank, number)]
    if behind:
        return [*_absences(cluster, behind, operation, waiters)]
    unseen = [rank for rank in members if rank not in by_rank]
    spot = cluster.dumps[waiters[0]].spot
    if unseen:
        return [
            Absent(who=Who(rank=rank), operation=operation, waiters=waiters, certain=False, spot=spot)
            for rank in unseen
        ]  # fmt: skip
    if len(waiters) < 2 or not all(cluster.parts[rank].knows_ends for rank in waiters):
        return []
    complete = set(waiters) >= set(members) and (cluster.members is not None or world is not None)
    said = f"all {len(waiters)} ranks called {operation.words()}, and none completed it"
    return [Inside(operation=operation, ranks=waiters, complete=complete, spot=spot, said=said)]


def _guessed_members(cluster: Cluster, by_rank: Mapping[int, FlightDump], world: int | None) -> tuple[int, ...]:
    """Return the members of a group that no dump lists: all ranks, if it is the only group, else those that used it."""
    only = all(len(dump.groups) <= 1 for dump in by_rank.values())
    if only and world is not None:
        return tuple(range(world))
    return tuple(sorted(by_rank if only else cluster.parts))


def _target(cluster: Cluster) -> tuple[int, tuple[int, ...]] | None:
    """Return the lowest number that some ranks wait in, and these ranks.

    What one rank has completed is done on all, save where a root may be ahead: the others have only not noticed yet.
    """
    over = max((_surely_done(cluster, rank) for rank in cluster.parts), default=0)
    lowest = min((part.last for part in cluster.parts.values()), default=0)
    pending: dict[int, int] = {}
    for rank, part in cluster.parts.items():
        number = next((seq for seq in part.seq[part.done :] if seq > over), None)
        if number is not None and (part.knows_ends or part.last > lowest):
            pending[rank] = number
    if not pending:
        return None
    first = min(pending.values())
    return first, tuple(sorted(rank for rank, number in pending.items() if number == first))


def _surely_done(cluster: Cluster, rank: int) -> int:
    """Return the last number that a rank has completed and that nobody can complete before all have come."""
    part = cluster.parts[rank]
    if not part.knows_ends:
        return 0
    for at in range(part.done - 1, max(part.done - 64, 0) - 1, -1):
        if not _from_root(part.calls[part.which[at]]):
            return part.seq[at]
    return 0


def _is_behind(cluster: Cluster, rank: int, number: int) -> bool:
    """Return whether a rank that was dumped has not made the call of this number."""
    part = cluster.parts.get(rank)
    return part is None or (part.last < number and not _may_lack_entries(cluster, rank))


def _may_lack_entries(cluster: Cluster, rank: int) -> bool:
    """Return whether newer calls of the group than the dump holds may have been made."""
    dump = cluster.dumps[rank]
    return bool(dump.damaged) or (dump.wrapped and not cluster.parts[rank].seq)


def _absences(cluster: Cluster, ranks: Sequence[int], operation: Operation, waiters: tuple[int, ...]) -> Iterator[Fact]:
    for rank in ranks:
        part, dump = cluster.parts.get(rank), cluster.dumps.get(rank, cluster.dumps[waiters[0]])
        certain = part is None or all(cluster.parts[one].knows_ends for one in waiters)
        last = f"made {cluster.operation(rank, part.last).words()} last" if part is not None and part.seq else ""
        at = next((frame for frame in reversed(part.last_frames) if frame.user), None) if part is not None else None
        line = f", in {at.function} ({at.file}:{at.line})" if at is not None and last else ""
        said = f"rank {rank} {last or 'made no call'}{line}" + ("" if last else f" of {cluster.words or 'the group'}")
        yield Absent(
            who=Who(rank=rank), operation=operation, waiters=waiters, certain=certain, spot=dump.spot, said=said
        )
        if part is not None:
            yield Reached(
                who=Who(rank=rank), spot=dump.spot, group=cluster.name, group_words=cluster.words,
                enqueued=None if cluster.is_aligned else part.last,
                completed=None if cluster.is_aligned else part.last_done,
            )  # fmt: skip


def _first_difference(cluster: Cluster, target: tuple[int, tuple[int, ...]] | None, size: int | None) -> Differ | None:
    """Return the first number under which ranks made different calls, if the group waits there or after it."""
    if target is None or cluster.is_aligned:
        return None
    first = _first_different_number(cluster)
    if first is None or first > target[0]:
        return None
    made = {rank: block for rank in cluster.parts if (block := cluster.block(rank, first)) is not None}
    sides = group_alike({rank: comparable(block) for rank, block in made.items()})
    operations = [cluster.operation(ranks[0], first) for _, ranks in sides]
    plain = len(sides[0][1]) > len(sides[1][1])
    odd = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    names = {tuple(call.op for call in made[ranks[0]]) for _, ranks in sides}
    aspect = "operation" if len(names) > 1 else "dtype" if len({one.dtype for one in operations}) > 1 else "shape"
    return Differ(
        sides=tuple((ranks, operation) for (_, ranks), operation in zip(sides, operations, strict=True)),
        odd=odd if plain else None, aspect=aspect, spot=cluster.dumps[odd[0]].spot,
        settled=size is None or 2 * len(sides[0][1]) > size,
        said=f"rank {odd[0]} made {cluster.operation(odd[0], first).words()}",
    )  # fmt: skip


def _first_different_number(cluster: Cluster) -> int | None:
    ids: dict[tuple[object, ...], int] = {}
    columns: dict[tuple[bytes, bytes], FlightGroup] = {}
    for part in cluster.parts.values():
        table = [ids.setdefault(comparable(block), len(ids)) for block in part.calls]
        which = array("I", map(table.__getitem__, part.which))
        columns.setdefault((part.seq.tobytes(), which.tobytes()), part)
    made: dict[int, int] = {}
    lowest: int | None = None
    for seqs, which_bytes in columns:
        numbers, calls = array("q"), array("I")
        numbers.frombytes(seqs)
        calls.frombytes(which_bytes)
        for number, call in zip(numbers, calls, strict=True):
            if lowest is not None and number >= lowest:
                break
            if made.setdefault(number, call) != call:
                lowest = number
    return lowest


def _waits(clusters: Sequence[Cluster]) -> list[Fact]:
    """Return what each rank waits in: the oldest call that has not completed."""
    oldest: dict[int, tuple[int, Waiting]] = {}
    for cluster in clusters:
        target = _target(cluster)
        for rank, part in cluster.parts.items():
            number = next(iter(part.seq[part.done : part.done + 1]), None)
            if target is None or number is None or number < target[0] or part.pending_ns is None:
                continue
            wait = Waiting(
                who=Who(rank=rank), spot=cluster.dumps[rank].spot, operation=cluster.operation(rank, number),
                timed_out=part.timed_out, limit_s=part.limit_s, frames=part.pending_frames,
            )  # fmt: skip
            former = oldest.get(rank)
            if former is None or part.pending_ns < former[0]:
                oldest[rank] = part.pending_ns, wait
    return [wait for _, wait in oldest.values()]


def _crossed(clusters: Sequence[Cluster], found: Sequence[Fact]) -> Circle | None:
    """Return ranks that made the pending calls of two groups in different orders, if all members are inside both."""
    inside = {fact.operation.group for fact in found if isinstance(fact, Inside)}
    whole = [one for one in clusters if one.name in inside]
    for at, one in enumerate(whole):
        for other in whole[at + 1 :]:
            both = [rank for rank in one.parts if rank in other.parts]
            orders = {rank: _order(one.parts[rank], other.parts[rank]) for rank in both}
            first = next((rank for rank in both if orders[rank] is True), None)
            second = next((rank for rank in both if orders[rank] is False), None)
            if first is not None and second is not None:
                links = ((first, _pending(one, first), second), (second, _pending(other, second), first))
                return Circle(links=links, spot=one.dumps[first].spot)
    return None


def _order(one: FlightGroup, other: FlightGroup) -> bool | None:
    if one.pending_ns is None or other.pending_ns is None:
        return None
    return one.pending_ns < other.pending_ns


def _pending(cluster: Cluster, rank: int) -> Operation:
    part = cluster.parts[rank]
    return cluster.operation(rank, part.seq[part.done])
