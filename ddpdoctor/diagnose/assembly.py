"""Builds a fleet from the messages of a job's processes. No I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ddpdoctor
from ddpdoctor.model.node import SECTIONS, Fleet, Node
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.sides import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.launch import Launch
    from ddpdoctor.model.node import NodeProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Each process sends this as soon as it reaches the store, so it can be named if it sends nothing more."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Rank 0 sends this to the others: the full name of its host, if known."""

    fqdn: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts from one process."""

    rank: int
    """The rank among the gathering processes."""
    machine: str
    container: str
    process: NodeProcess
    node: Node | None
    """Set only by the process that reads its host. It has no processes."""
    host: str
    version: str
    """The version of ddpdoctor."""


def assemble(launch: Launch, facts: Sequence[Facts], problems: Iterable[str] = ()) -> Fleet:
    """Return the fleet of these processes, sorted by rank. No process is lost or counted twice.

    Two processes with the same rank are both kept, so that the check of the ranks can find them.
    """
    arrived = sorted(facts, key=lambda one: one.rank)
    groups = [group for machine in _by(arrived, "machine") for group in _by_container(machine)]
    groups.sort(key=lambda group: group[0].rank)
    nodes = [_make_node(group, index) for index, group in enumerate(groups)]
    return Fleet(
        nodes=tuple(_name_apart(nodes, [group[0].rank for group in groups])),
        launcher=launch.launcher,
        world_size=launch.world_size,
        nnodes=launch.nnodes,
        missing=missing_ranks(launch, facts),
        problems=(*problems, *_other_versions(facts)),
    )


def missing_ranks(launch: Launch, facts: Iterable[Facts]) -> tuple[int, ...]:
    """Return the ranks that sent no facts."""
    return tuple(sorted(set(range(launch.world_size)) - {one.rank for one in facts}))


def describe_missing(missing: Sequence[int], hellos: Mapping[int, Hello], limit_s: float) -> tuple[str, ...]:
    """Say for each rank that did not answer whether it at least said hello."""
    started = [
        f"rank {rank} ({hellos[rank].host}, process {hellos[rank].pid}) started and did not answer within {limit_s:g} s"
        for rank in missing
        if rank in hellos
    ]
    unheard = [rank for rank in missing if rank not in hellos]
    if unheard:
        started.append(f"no message came from {rank_list(unheard)} within {limit_s:g} s")
    return tuple(started)


def _by(facts: Iterable[Facts], name: str) -> list[list[Facts]]:
    return list(grouped((getattr(one, name), one) for one in facts).values())


def _by_container(machine: list[Facts]) -> list[list[Facts]]:
    """Split the processes that share kernel, network and host name by container.

    A container is a separate node only if one of its processes reads the host. Under Apptainer, each task has its own
    mounts, and all tasks belong to the one that reads.
    """
    parts = _by(machine, "container")
    readers = [part for part in parts if any(one.node for one in part)]
    if len(readers) < 2:
        return [machine]
    rest = [one for part in parts if part not in readers for one in part]
    return [sorted([*readers[0], *rest], key=lambda one: one.rank), *readers[1:]]


def _make_node(group: list[Facts], index: int) -> Node:
    processes = tuple(one.process for one in group)
    node = next((one.node for one in group if one.node is not None), None)
    if node is None:
        unread = Unread(why=Why.TIMEOUT, reason=f"the process of {group[0].host} that reads the host did not answer")
        sections: dict[str, Any] = dict.fromkeys(SECTIONS, unread)
        node = Node(host=group[0].host, **sections)
    return replace(node, index=index, processes=processes)


def _name_apart(nodes: list[Node], first_ranks: list[int]) -> list[Node]:
    """Add the first rank to host names that several nodes share, because findings refer to hosts by name."""
    times = Counter(node.host for node in nodes)
    return [
        node if times[node.host] == 1 else replace(node, host=f"{node.host} (rank {rank})")
        for node, rank in zip(nodes, first_ranks, strict=True)
    ]


def _other_versions(facts: Iterable[Facts]) -> list[str]:
    others = grouped((one.version, one.rank) for one in facts if one.version != ddpdoctor.__version__)
    return [
        f"{rank_list(ranks)}: ddpdoctor {version}, and {ddpdoctor.__version__} on rank 0"
        for version, ranks in others.items()
    ]
