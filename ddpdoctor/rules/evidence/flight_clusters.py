"""Sorts the groups of all dumps: groups of one name are one group only if they have the same members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.rules.evidence.flight_calls import operation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.evidence import Operation
    from ddpdoctor.model.flight import FlightCall, FlightDump, FlightGroup


@dataclass(slots=True)
class Cluster:
    """One process group, as the dumps of its members show it."""

    name: str
    members: tuple[int, ...] | None
    parts: dict[int, FlightGroup] = field(default_factory=dict)
    """By global rank."""
    dumps: dict[int, FlightDump] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """What a reader should see for the group."""
        first = next(iter(self.parts.values()))
        return first.desc if first.desc and first.desc != "undefined" else f"group {self.name}" if self.name else ""

    def block(self, rank: int, number: int) -> tuple[FlightCall, ...] | None:
        """Return the call that a rank made under a number, or None if its dump does not hold it."""
        part = self.parts[rank]
        at = number - part.seq[0] if part.seq else -1
        if not 0 <= at < len(part.seq) or part.seq[at] != number:
            at = next((index for index, seq in enumerate(part.seq) if seq == number), -1)
        return part.calls[part.which[at]] if at >= 0 else None

    def operation(self, rank: int, number: int) -> Operation:
        """Return the operation that a rank made under a number."""
        block = self.block(rank, number)
        return operation_of(block, number, self.name, self.words)


def clusters_of(by_rank: Mapping[int, FlightDump]) -> list[Cluster]:
    """Sort the groups of all dumps. A group whose members one dump does not say is the one of that name."""
    found: dict[tuple[str, tuple[int, ...] | None], Cluster] = {}
    listed: dict[str, set[tuple[int, ...]]] = {}
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
    return list(found.values())
