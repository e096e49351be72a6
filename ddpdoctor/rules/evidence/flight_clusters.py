"""Sorts the groups of all dumps: groups of one name are one group only if they have the same members."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.rules.evidence.flight_calls import operation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.evidence import Operation
    from ddpdoctor.model.flight import FlightCall, FlightDump, FlightGroup

_LAST_DONE = 2**20
"""What the last completed call is numbered then: more than a ring holds."""


@dataclass(slots=True)
class Cluster:
    """One process group, as the dumps of its members show it."""

    name: str
    members: tuple[int, ...] | None
    parts: dict[int, FlightGroup] = field(default_factory=dict)
    """By global rank."""
    dumps: dict[int, FlightDump] = field(default_factory=dict)
    is_aligned: bool = False
    """The dumps do not say the numbers: they are counted from the last completed call, which is the same on all."""

    def align(self) -> None:
        """Give the calls new numbers where one counter served all groups and a ring has lost its oldest calls."""
        if not any(dump.one_counter and dump.wrapped for dump in self.dumps.values()):
            return
        self.is_aligned = True
        for rank, part in self.parts.items():
            first = _LAST_DONE + 1 - part.done
            self.parts[rank] = replace(part, seq=array("q", range(first, first + len(part.seq))))

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
        return operation_of(block, None if self.is_aligned else number, self.name, self.words)


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
    for cluster in found.values():
        cluster.align()
    return list(found.values())
