"""The connections that NCCL's log names, joined over all processes: which ranks, on which hosts, and how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import MachineSeen, NcclPaths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.evidence import NcclEdge, Who
    from ddpdoctor.model.node import Node

    from .state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """A connection between two ranks."""

    process: NcclPaths
    edge: NcclEdge
    own: int
    """The global rank, as far as it is known; else the one in the communicator. So is ``peer``."""
    peer: int
    inside: bool | None
    """Both ranks are on one host; None: that cannot be told."""

    @property
    def pair(self) -> tuple[int, int]:
        """The ranks, the lower one first."""
        return min(self.own, self.peer), max(self.own, self.peer)

    @property
    def host(self) -> str:
        """The host of the process that says it."""
        return self.process.who.host


class NcclJob:
    """All that NCCL's log says of a job's connections."""

    def __init__(self, state: RunState) -> None:
        self.processes = state.all(NcclPaths)
        self.machines: dict[str, Node] = {_short(one.node.host): one.node for one in state.all(MachineSeen)}
        self._members: dict[tuple[str, int], list[Who]] = {}
        for process in self.processes:
            for member in process.members:
                self._members.setdefault((member.communicator, member.rank), []).append(process.who)

    @property
    def hosts(self) -> list[str]:
        """The hosts of the processes."""
        return sorted({process.who.host for process in self.processes})

    @cached_property
    def links(self) -> tuple[RankLink, ...]:
        """All connections."""
        return tuple(self._links())

    def of_host(self, host: str) -> list[NcclPaths]:
        """Return the processes of a host."""
        return [process for process in self.processes if process.who.host == host]

    def machine(self, host: str) -> Node | None:
        """Return what `check-env` found on a host, or None."""
        return self.machines.get(_short(host))

    def setting(self, name: str, hosts: tuple[str, ...] = ()) -> str | None:
        """Return the value of a variable in the environment of a process on these hosts, by default on any."""
        values = (one.settings.get(name) for one in self.processes if not hosts or one.who.host in hosts)
        return next((value for value in values if value is not None), None)

    def _links(self) -> Iterator[RankLink]:
        for process in self.processes:
            for edge in process.edges:
                # The line does not name its communicator. What it says counts where all that fit say the same.
                fitting = [m for m in process.members if m.rank == edge.own and edge.peer < m.ranks]
                peers = [self._peer(member.communicator, edge.peer) for member in fitting]
                known = [who for who in peers if who is not None]
                inside = {_is_one_host(process.who, who) for who in known} if len(known) == len(peers) else set()
                ranks = {who.rank for who in known}
                named = len(ranks) == 1 and None not in ranks and process.who.rank is not None
                yield RankLink(
                    process=process,
                    edge=edge,
                    own=process.who.rank if named and process.who.rank is not None else edge.own,
                    peer=next(rank for rank in ranks if rank is not None) if named else edge.peer,
                    inside=inside.pop() if len(inside) == 1 else None,
                )

    def _peer(self, communicator: str, rank: int) -> Who | None:
        """Return who has this rank in a communicator, or None if several or none are known."""
        found = self._members.get((communicator, rank), [])
        return found[0] if len(found) == 1 else None


def _is_one_host(first: Who, second: Who) -> bool:
    """Return whether two processes are on one host. Containers on several machines may have one name."""
    if first.address and second.address and first.address != second.address:
        return False
    return bool(first.host) and first.host == second.host


def _short(host: str) -> str:
    """Return a host's name as NCCL writes it: without its domain."""
    return host.partition(".")[0]
