"""Compares the flight recorders of several ranks: which rank is behind, made another call, or waits for which.

Numbers count within one process group, and groups are told apart by name and members. A ring loses its oldest entries,
so a call that is older than the first entry of a group is not missing. Dumps are not taken at one moment.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.words import group_alike, rank_list
from ddpdoctor.rules.progress.waits import way_back

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


# Operations whose inputs must have equally many elements on all ranks.
SAME_IN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
    "reduce_scatter", "all_gather_coalesced", "reduce_scatter_coalesced",
})  # fmt: skip
SAME_OUT = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
})  # fmt: skip
_Ranks = tuple[int, ...]
_LAST_DONE = 2**20  # what the last completed call is numbered then: more than a ring holds
_PARTNER = {"send": "recv", "recv": "send"}
# A rank may complete it before all others have come.
_FROM_ROOT = frozenset({"broadcast", "scatter", "reduce", "gather"})


def find_circle(links: Iterable[tuple[int, lf.Operation, int | None]]) -> lf.Circle | None:
    """Return the shortest cycle of ranks that wait for each other, or None. Links: rank, its call, awaited rank."""
    waits: dict[int, dict[int, lf.Operation]] = {}
    for rank, operation, other in links:
        if other is not None and other != rank:
            waits.setdefault(rank, {}).setdefault(other, operation)
    if any(other not in waits for others in waits.values() for other in others):
        return None
    ranks = {rank: sorted(others) for rank, others in waits.items()}
    ways = [way for rank in sorted(waits) if (way := way_back(rank, ranks))]
    if not ways:
        return None
    shortest = min(ways, key=len)
    pairs = zip(shortest, [*shortest[1:], shortest[0]], strict=True)
    return lf.Circle(links=tuple((rank, waits[rank][to], to) for rank, to in pairs), spot=lf.Spot(source=""))


def comparable(block: Sequence[lf.FlightCall]) -> tuple[object, ...]:
    """Return what must be equal on all ranks. torch writes no sizes for a barrier."""
    found = []
    for call in block:
        same_in, same_out = call.op in SAME_IN, call.op in SAME_OUT
        numels_in, numels_out = call.numels_in if same_in else (), call.numels_out if same_out else ()
        found.append((call.op, numels_in, numels_out, call.dtype if same_in or same_out else ""))
    return tuple(found)


# Sorts the groups of all dumps: groups of one name are one group only if they have the same members


@dataclass(slots=True)
class Cluster:
    """One process group, as the dumps of its members show it."""

    name: str
    members: _Ranks | None
    parts: dict[int, lf.FlightGroup] = field(default_factory=dict)  # by global rank
    dumps: dict[int, lf.FlightDump] = field(default_factory=dict)
    # The dumps do not say the numbers: they are counted from the last completed call, which is the same on all.
    is_aligned: bool = False

    @property
    def words(self) -> str:
        first = next(iter(self.parts.values()))
        return first.desc if first.desc and first.desc != "undefined" else f"group {self.name}" if self.name else ""

    def block(self, rank: int, number: int) -> tuple[lf.FlightCall, ...] | None:
        """Return the call that a rank made under a number, or None if its dump does not hold it."""
        part = self.parts[rank]
        at = number - part.seq[0] if part.seq else -1
        if not 0 <= at < len(part.seq) or part.seq[at] != number:
            at = next((index for index, seq in enumerate(part.seq) if seq == number), -1)
        return part.calls[part.which[at]] if at >= 0 else None

    def operation(self, rank: int, number: int) -> lf.Operation:
        """Return the operation that a rank made under a number. If its dump does not hold it, only that is known."""
        block, part = self.block(rank, number) or (), self.parts[rank]
        is_pending = part.done < len(part.seq) and part.seq[part.done] == number
        found = lf.Operation(
            op=" and ".join(dict.fromkeys(call.op for call in block)), group=self.name, group_words=self.words,
            seq=None if self.is_aligned else number,
            made_by="backward" if is_pending and part.pending_in_backward else "",
        )  # fmt: skip
        if len(block) != 1:
            return found
        (call,) = block
        numel_in, numel_out = (sum(numels) if numels else None for numels in (call.numels_in, call.numels_out))
        shape = call.shape if len(call.numels_in) == 1 else None
        return replace(found, numel_in=numel_in, numel_out=numel_out, shape=shape, dtype=call.dtype)

    def pending(self, rank: int) -> lf.Operation:
        part = self.parts[rank]
        return self.operation(rank, part.seq[part.done])


def clusters_of(by_rank: Mapping[int, lf.FlightDump]) -> list[Cluster]:
    """Sort the groups of all dumps. If a dump does not list a group's members, the name identifies it."""
    found: dict[tuple[str, _Ranks | None], Cluster] = {}
    listed: dict[str, set[_Ranks]] = {}
    for dump in by_rank.values():
        for part in dump.groups:
            if part.members is not None:
                listed.setdefault(part.name, set()).add(part.members)
    for rank, dump in sorted(by_rank.items()):
        for part in dump.groups:
            members = part.members
            if members is None and len(listed.get(part.name, ())) == 1:
                members = next(iter(listed[part.name]))
            if members is not None and rank not in members:
                continue
            cluster = found.setdefault((part.name, members), Cluster(part.name, members))
            cluster.parts[rank] = part
            cluster.dumps[rank] = dump
    # Calls get new numbers where one counter served all groups and a ring has lost its oldest calls.
    for cluster in found.values():
        cluster.is_aligned = any(dump.one_counter and dump.wrapped for dump in cluster.dumps.values())
        for rank, part in cluster.parts.items() if cluster.is_aligned else ():
            first = _LAST_DONE + 1 - part.done
            cluster.parts[rank] = replace(part, seq=array("q", range(first, first + len(part.seq))))
    return list(found.values())


# Compares the pending sends and receives of ranks. They are matched by sender and receiver, in order


def compare_transfers(cluster: Cluster) -> Iterator[lf.Fact]:
    """Yield the peer that each rank waits for in its oldest pending send or receive, or that both ends are inside."""
    for rank, part in cluster.parts.items():
        if not part.transfers:
            continue
        transfer, members, dump = part.transfers[0], cluster.members, cluster.dumps[rank]
        peer = transfer.peer
        if members is not None:
            peer = members[peer] if peer is not None and peer < len(members) else None
        op, numel = transfer.op, transfer.numel
        operation = lf.Operation(op=op, group=cluster.name, group_words=cluster.words, peer=peer, numel_in=numel)
        yield lf.Waiting(who=lf.Who(rank=rank), spot=dump.spot, operation=operation, frames=transfer.frames)
        if peer is None:
            continue
        other = cluster.parts.get(peer)
        said = f"rank {rank} waits in {op} {'to' if op == 'send' else 'from'} rank {peer}"
        if other is None:
            yield _absent_rank(peer, operation, (rank,), dump, said, certain=False)
            continue
        there = cluster.dumps[peer]
        partner = _PARTNER[op], members.index(rank) if members else rank
        pending = next((transfer for transfer in other.transfers if (transfer.op, transfer.peer) == partner), None)
        any_source = any(transfer.op == partner[0] and transfer.peer is None for transfer in other.transfers)
        made = not dump.wrapped and not there.wrapped and other.made.get(partner, 0) >= transfer.nth
        if pending is None and not any_source and not made:
            yield _absent_rank(peer, operation, (rank,), there, said)
        elif pending is not None and op == "send":
            ends = tuple(sorted((rank, peer)))
            received = replace(operation, op="recv", peer=rank, numel_in=pending.numel)
            sides = (((rank,), operation), ((peer,), received))
            unequal = numel != pending.numel and None not in {numel, pending.numel}
            if unequal:
                yield lf.Differ(sides=sides, aspect="shape", odd=None, spot=dump.spot, said=said)
            else:
                yield lf.Inside(operation=operation, ranks=ends, complete=True, spot=dump.spot, said=said)


def _absent_rank(
    rank: int, operation: lf.Operation, waiters: _Ranks, dump: lf.FlightDump, said: str = "", **more: Any
) -> lf.Absent:  # fmt: skip
    return lf.Absent(who=lf.Who(rank=rank), operation=operation, waiters=waiters, spot=dump.spot, said=said, **more)


def compare_flight(dumps: Sequence[lf.FlightDump], world: int | None) -> list[lf.Fact]:
    """Return which ranks are behind, differ or are inside, and what each rank waits in. One dump per rank."""
    by_rank = {dump.rank: dump for dump in dumps if dump.rank is not None}
    clusters = clusters_of(by_rank)
    timed_out = any(part.timed_out for cluster in clusters for part in cluster.parts.values())
    found: list[lf.Fact] = []
    for cluster in clusters:
        moved = None if timed_out or _first_different_number(cluster) is not None else _contradiction(cluster)
        if moved is not None:
            return [moved]
    for cluster in clusters:
        found += _compare_cluster(cluster, by_rank, world)
        found += compare_transfers(cluster)
    found += _flight_waits(clusters)
    absent = [fact for fact in found if isinstance(fact, lf.Absent)]
    links = {(rank, fact.operation, fact.who.rank) for fact in absent for rank in fact.waiters}
    circle = find_circle(links) or _crossed(clusters, found)
    return [*found, circle] if circle is not None else found


def _contradiction(cluster: Cluster) -> lf.Moving | None:
    """Return that the job moved, if a rank has completed a call that a rank dumped earlier had not even made."""
    if cluster.is_aligned:
        return None
    for rank, part in cluster.parts.items():
        if _may_lack_entries(cluster, rank):
            continue
        for other, ahead in cluster.parts.items():
            if part.last < ahead.last_done and ahead.knows_ends and ahead.done:
                done = zip(ahead.seq[: ahead.done], ahead.which, strict=False)
                if any(number > part.last and not _from_root(ahead.calls[call]) for number, call in done):
                    return lf.Moving(who=lf.Who(rank=other), spot=cluster.dumps[other].spot)
    return None


def _from_root(block: tuple[lf.FlightCall, ...]) -> bool:
    return any(call.op in _FROM_ROOT for call in block)


def _compare_cluster(cluster: Cluster, by_rank: Mapping[int, lf.FlightDump], world: int | None) -> list[lf.Fact]:
    target = _target(cluster)
    differ = _first_difference(cluster, target, len(cluster.members) if cluster.members else world)
    if differ is not None:
        return [differ]
    if target is None:
        return []
    number, waiters = target
    late = _late(cluster, number)
    if late:
        return [*late]
    operation = cluster.operation(waiters[0], number)
    # The members of a group that no dump lists: all ranks, if it is the only group, else those that used it.
    only = all(len(dump.groups) <= 1 for dump in by_rank.values())
    guessed = tuple(range(world)) if only and world is not None else tuple(sorted(by_rank if only else cluster.parts))
    members = cluster.members or guessed
    parts = {rank: cluster.parts.get(rank) for rank in members if rank in by_rank}
    # Those whose dumps show that they have not made the call
    short = [rank for rank, part in parts.items() if part is None or part.last < number]
    behind = [rank for rank in short if parts[rank] is None or not _may_lack_entries(cluster, rank)]
    if behind:
        return [*_absences(cluster, behind, operation, waiters)]
    unseen = [rank for rank in members if rank not in by_rank]
    dump = cluster.dumps[waiters[0]]
    if unseen:
        return [_absent_rank(rank, operation, waiters, dump, certain=False) for rank in unseen]
    if len(waiters) < 2 or not all(cluster.parts[rank].knows_ends for rank in waiters):
        return []
    complete = set(waiters) >= set(members) and (cluster.members is not None or world is not None)
    said = f"all {len(waiters)} ranks called {operation.words()}, and none completed it"
    return [lf.Inside(operation=operation, ranks=waiters, complete=complete, spot=dump.spot, said=said)]


def _late(cluster: Cluster, number: int) -> list[lf.Absent]:
    """Return the ranks that made a call when others had waited there for longer than its limit, up to a pending call.

    All complete that call. But torch ends those that had waited, so that the late ones wait for them in a later call.
    Each rank's clock is compared with itself: with the time of its call before.
    """
    limit_s = min((part.limit_s for part in cluster.parts.values() if part.limit_s is not None), default=None)
    if limit_s is None or cluster.is_aligned or len(cluster.parts) < 2:
        return []
    parts = cluster.parts.items()
    made, ended = (
        {rank: dict(zip(reversed(part.seq), reversed(getattr(part, column)), strict=False)) for rank, part in parts}
        for column in ("last_made_ns", "last_ended_ns")
    )
    common = set.intersection(*map(set, made.values()))
    for seq in sorted(seq for seq in common if seq <= number and seq - 1 in common):
        after_s = {rank: (times[seq] - times[seq - 1]) / 1e9 for rank, times in made.items()}
        soonest_s = min(after_s.values())
        late = sorted(rank for rank in after_s if after_s[rank] - soonest_s > limit_s)
        early = sorted(rank for rank in after_s if after_s[rank] - soonest_s < limit_s / 2)
        took_ns = {rank: ended[rank].get(seq, 0) - made[rank][seq] for rank in early}
        waited = tuple(rank for rank in early if not 0 < took_ns[rank] < limit_s * 1e9)
        if late and waited:
            operation = cluster.operation(waited[0], seq)
            limit = f"later than {rank_list(waited)}, whose limit was {limit_s:g} s"
            said = {n: f"rank {n} made {operation.words()} {after_s[n] - soonest_s:.1f} s {limit}" for n in late}
            return [_absent_rank(n, operation, waited, cluster.dumps[n], said[n], late=True) for n in late]
    return []


def _target(cluster: Cluster) -> tuple[int, _Ranks] | None:
    """Return the lowest number that some ranks wait in, and these ranks.

    What one rank has completed is done on all, unless a root may be ahead: the others have just not noticed yet.
    """
    over = 0  # the last number that nobody can have completed before all had come
    for part in cluster.parts.values():
        done = range(part.done - 1, max(part.done - 64, 0) - 1, -1) if part.knows_ends else ()
        over = max(over, next((part.seq[at] for at in done if not _from_root(part.calls[part.which[at]])), 0))
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


def _may_lack_entries(cluster: Cluster, rank: int) -> bool:
    """Return whether newer calls of the group than the dump holds may have been made."""
    dump = cluster.dumps[rank]
    return bool(dump.damaged) or (dump.wrapped and not cluster.parts[rank].seq)


def _absences(cluster: Cluster, ranks: list[int], operation: lf.Operation, waiters: _Ranks) -> Iterator[lf.Fact]:
    for rank in ranks:
        part, dump = cluster.parts.get(rank), cluster.dumps.get(rank, cluster.dumps[waiters[0]])
        certain = part is None or all(cluster.parts[waiter].knows_ends for waiter in waiters)
        last = f"made {cluster.operation(rank, part.last).words()} last" if part is not None and part.seq else ""
        at = next((frame for frame in reversed(part.last_frames) if frame.user), None) if part is not None else None
        line = f", in {at.function} ({at.file}:{at.line})" if at is not None and last else ""
        said = f"rank {rank} {last or 'made no call'}{line}" + ("" if last else f" of {cluster.words or 'the group'}")
        yield _absent_rank(rank, operation, waiters, dump, said, certain=certain)
        if part is not None:
            enqueued, completed = (None, None) if cluster.is_aligned else (part.last, part.last_done)
            yield lf.Reached(
                who=lf.Who(rank=rank), spot=dump.spot, group=cluster.name, group_words=cluster.words, enqueued=enqueued,
                completed=completed,
            )  # fmt: skip


def _first_difference(cluster: Cluster, target: tuple[int, _Ranks] | None, size: int | None) -> lf.Differ | None:
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
    dtypes = {operation.dtype for operation in operations}
    aspect = "operation" if len(names) > 1 else "dtype" if len(dtypes) > 1 else "shape"
    return lf.Differ(
        sides=tuple((ranks, operation) for (_, ranks), operation in zip(sides, operations, strict=True)),
        odd=odd if plain else None, aspect=aspect, spot=cluster.dumps[odd[0]].spot,
        settled=size is None or 2 * len(sides[0][1]) > size,
        said=f"rank {odd[0]} made {cluster.operation(odd[0], first).words()}",
    )  # fmt: skip


def _first_different_number(cluster: Cluster) -> int | None:
    ids: dict[tuple[object, ...], int] = {}
    columns: dict[tuple[bytes, bytes], lf.FlightGroup] = {}
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


def _flight_waits(clusters: Sequence[Cluster]) -> list[lf.Fact]:
    """Return what each rank waits in: the oldest call that has not completed."""
    oldest: dict[int, tuple[int, lf.Waiting]] = {}
    for cluster in clusters:
        target = _target(cluster)
        for rank, part in cluster.parts.items():
            number = next(iter(part.seq[part.done : part.done + 1]), None)
            if target is None or number is None or number < target[0] or part.pending_ns is None:
                continue
            wait = lf.Waiting(
                who=lf.Who(rank=rank), spot=cluster.dumps[rank].spot, operation=cluster.operation(rank, number),
                timed_out=part.timed_out, limit_s=part.limit_s, frames=part.pending_frames,
            )  # fmt: skip
            former = oldest.get(rank)
            if former is None or part.pending_ns < former[0]:
                oldest[rank] = part.pending_ns, wait
    return [wait for _, wait in oldest.values()]


def _crossed(clusters: Sequence[Cluster], found: Sequence[lf.Fact]) -> lf.Circle | None:
    """Return ranks that made the pending calls of two groups in different orders, if all members are inside both."""
    inside = {fact.operation.group for fact in found if isinstance(fact, lf.Inside)}
    whole = [cluster for cluster in clusters if cluster.name in inside]
    for at, cluster in enumerate(whole):
        for other in whole[at + 1 :]:
            both = [rank for rank in cluster.parts if rank in other.parts]
            pending = {rank: (cluster.parts[rank].pending_ns, other.parts[rank].pending_ns) for rank in both}
            orders = {n: own < theirs for n, (own, theirs) in pending.items() if own is not None and theirs is not None}
            first = next((rank for rank, order in orders.items() if order), None)
            second = next((rank for rank, order in orders.items() if not order), None)
            if first is not None and second is not None:
                links = ((first, cluster.pending(first), second), (second, other.pending(second), first))
                return lf.Circle(links=links, spot=cluster.dumps[first].spot)
    return None
