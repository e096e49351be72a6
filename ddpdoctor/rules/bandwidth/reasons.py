"""What could explain a low bandwidth: how reasons are weighed, and the data they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.bandwidth import Bench, Member, NcclLog
    from ddpdoctor.model.node import Fleet, Node


class Effect(IntEnum):
    """How much a reason can explain, the most first. The factors come from the reason's source, or are our choice."""

    OTHER_WAY = 0
    """Data takes another path that is several times slower: host memory instead of NVLink, TCP instead of RDMA."""
    LIMIT = 1
    """Part of the path carries less: a link with half of its lanes, ranks that take turns on a processor."""
    SHARED = 2
    """Other users take a part of it."""
    SMALL = 3
    """Worth some percent, or more for small messages."""
    CONTEXT = 4
    """Nothing is wrong: it explains what the figure measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A reason and how much it can explain."""

    effect: Effect
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchNode:
    """A node of the bench and the ranks on it."""

    node: Node
    members: tuple[Member, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, sorted."""
        return tuple(sorted(member.rank for member in self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchView:
    """All data that reasons come from."""

    bench: Bench
    places: tuple[BenchNode, ...] = ()
    """Empty if the machines were not inspected."""

    @property
    def nccl(self) -> bool:
        """Whether NCCL was measured, not Gloo."""
        return self.bench.settings.backend == "nccl"

    @property
    def between_hosts(self) -> bool:
        """Whether data went from host to host."""
        return max(len(self.places), len({member.host for member in self.bench.members})) > 1

    @property
    def best_gb_s(self) -> float | None:
        """The highest bus bandwidth that was measured."""
        return max((one.busbw_gb_s for one in self.bench.results if one.busbw_gb_s is not None), default=None)

    def logs(self, place: BenchNode) -> tuple[NcclLog, ...]:
        """Return the NCCL logs of the ranks on a node."""
        return tuple(log for log in self.bench.nccl_logs if log.rank in place.ranks)


def view(bench: Bench, fleet: Fleet | None) -> BenchView:
    """Match ranks with machines. Machines without a rank of the bench are left out."""
    if fleet is None:
        return BenchView(bench=bench)
    found = (BenchNode(node=node, members=_members(bench, node, alone=len(fleet.nodes) == 1)) for node in fleet.nodes)
    return BenchView(bench=bench, places=tuple(place for place in found if place.members))


def _members(bench: Bench, node: Node, *, alone: bool) -> tuple[Member, ...]:
    """Return the ranks of a node. A single machine that was inspected without a launcher holds all ranks."""
    ranks = set(node.ranks)
    return tuple(member for member in bench.members if member.rank in ranks or (alone and not ranks))


def weigh(
    effect: Effect, place: BenchNode, text: str, source: str, *, fix: str = "", ranks: tuple[int, ...] = ()
) -> Weighed:
    """Return a reason on one machine, and the ranks that it concerns if not all."""
    return Weighed(
        effect=effect, reason=Reason(text=text, source=source, hosts=(place.node.host,), ranks=ranks, fix=fix)
    )


def order(found: Iterable[Weighed]) -> tuple[Reason, ...]:
    """Return the reasons, those that explain most first. The same reason on several hosts or ranks is merged."""
    drawn: dict[object, Reason] = {}
    for one in sorted(found, key=lambda weighed: weighed.effect):
        reason = one.reason
        former = drawn.setdefault((one.effect, reason.text, reason.source, reason.fix), reason)
        hosts = tuple(dict.fromkeys([*former.hosts, *reason.hosts]))
        ranks = tuple(sorted({*former.ranks, *reason.ranks}))
        drawn[one.effect, reason.text, reason.source, reason.fix] = replace(former, hosts=hosts, ranks=ranks)
    return tuple(drawn.values())
