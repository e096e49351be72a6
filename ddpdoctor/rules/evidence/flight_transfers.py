"""Compares the pending sends and receives of ranks. They are matched by sender and receiver, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Differ, Fact, Inside, Operation, Waiting, Who

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.flight import FlightTransfer
    from ddpdoctor.rules.evidence.flight_clusters import Cluster

_PARTNER = {"send": "recv", "recv": "send"}


def compare_transfers(cluster: Cluster) -> list[Fact]:
    """Return for whom each rank waits in its oldest pending send or receive, or that both ends are inside."""
    found: list[Fact] = []
    for rank, part in cluster.parts.items():
        if part.transfers:
            first = part.transfers[0]
            found += _compare(cluster, rank, first)
    return found


def _compare(cluster: Cluster, rank: int, transfer: FlightTransfer) -> Iterator[Fact]:
    peer = _global(cluster, transfer.peer)
    spot = cluster.dumps[rank].spot
    operation = Operation(
        op=transfer.op, group=cluster.name, group_words=cluster.words, peer=peer, numel_in=transfer.numel
    )
    yield Waiting(who=Who(rank=rank), spot=spot, operation=operation, frames=transfer.frames)
    if peer is None:
        return
    other = cluster.parts.get(peer)
    said = f"rank {rank} waits in {transfer.op} {'to' if transfer.op == 'send' else 'from'} rank {peer}"
    if other is None:
        yield Absent(who=Who(rank=peer), operation=operation, waiters=(rank,), certain=False, spot=spot, said=said)
        return
    own_place = cluster.members.index(rank) if cluster.members else rank
    partner = _PARTNER[transfer.op], own_place
    wrapped = cluster.dumps[rank].wrapped or cluster.dumps[peer].wrapped
    pending = next((one for one in other.transfers if (one.op, one.peer) == partner), None)
    any_source = any(one.op == partner[0] and one.peer is None for one in other.transfers)
    came = pending is not None or any_source or (not wrapped and other.made.get(partner, 0) >= transfer.nth)
    if not came:
        where = cluster.dumps[peer].spot
        yield Absent(who=Who(rank=peer), operation=operation, waiters=(rank,), certain=True, spot=where, said=said)
    elif pending is not None and transfer.op == "send":
        yield _both_inside(cluster, rank, peer, (transfer, pending), operation, said)


def _both_inside(
    cluster: Cluster, rank: int, peer: int, ends: tuple[FlightTransfer, FlightTransfer], operation: Operation, said: str
) -> Fact:
    """Return that sizes differ, or that both ends are inside an equal transfer."""
    sent, received = ends
    spot = cluster.dumps[rank].spot
    if sent.numel != received.numel and None not in {sent.numel, received.numel}:
        other = Operation(
            op="recv", group=cluster.name, group_words=cluster.words, peer=rank, numel_in=received.numel
        )  # fmt: skip
        sides = (((rank,), operation), ((peer,), other))
        return Differ(sides=sides, aspect="shape", odd=None, spot=spot, said=said)
    return Inside(operation=operation, ranks=tuple(sorted((rank, peer))), complete=True, spot=spot, said=said)


def _global(cluster: Cluster, place: int | None) -> int | None:
    """Return the global rank of a rank in the group, or None if its members are unknown."""
    if place is None or cluster.members is None:
        return place if cluster.members is None else None
    return cluster.members[place] if place < len(cluster.members) else None
