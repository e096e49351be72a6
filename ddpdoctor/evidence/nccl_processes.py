"""Finds each process's rank and GPU in NCCL's log, and how far its communicators are set up."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import MOST_RANKS, Operation, Seen, Size, Waiting, Who
from ddpdoctor.model.nccl_warnings import plain_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact, Spot, Time

MOST_PROCESSES = 65_536
"""Our choice: more processes than any job has. Further processes are ignored."""
_INIT = re.compile(
    r"comm (?P<pointer>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+) (?:.*?cudaDev (?P<gpu>\d+))?"
    r"(?:.*?busId (?P<bus>[0-9a-f]+))?(?:.*?commId (?P<id>0x[0-9a-f]+))?.*?- (?P<phase>Init (?:START|COMPLETE)|"
    r"Abort COMPLETE|Destroy COMPLETE)"
)
_BOOTSTRAP = re.compile(
    r"Bootstrap ?: Using (?:\[\d+\])?(?P<interface>[\w.@-]+):(?P<address>[0-9A-Fa-f.:]+?)(?:%\w+)?<\d+>"
)


@dataclass(slots=True)
class Communicator:
    """One communicator in one process."""

    key: str
    """Equal in all processes if the log says so, else "" ."""
    rank: int
    ranks: int
    spot: Spot
    time: Time | None
    said: str
    ready: bool = False


@dataclass(slots=True)
class NcclProcess:
    """One process in the log."""

    who: Who
    spot: Spot
    interface: str = ""
    communicators: dict[str, Communicator] = field(default_factory=dict)
    """By pointer. Destroyed communicators are removed."""
    largest: Communicator | None = None
    bus: str = ""
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each communicator it ever had: its rank, and the number of ranks."""
    reported: bool = False


class NcclProcesses:
    """All processes of one log."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int], NcclProcess] = {}

    def __iter__(self) -> Iterator[NcclProcess]:
        return iter(self._all.values())

    def get(self, host: str, pid: int, line: Line) -> NcclProcess | None:
        """Return the process that wrote a line, or None if there are too many."""
        found = self._all.get((host, pid))
        if found is None and len(self._all) < MOST_PROCESSES:
            who = replace(line.who, host=host, pid=pid)
            found = self._all[host, pid] = NcclProcess(who=who, spot=line.spot())
        if found is not None and found.who.rank is None and line.who.rank is not None:
            found.who = replace(found.who, rank=line.who.rank)
        return found

    def who(self, process: NcclProcess) -> Who:
        """Return a process, with its global rank if that is known by now."""
        largest = process.largest
        if process.who.rank is not None or largest is None or not self._is_world(largest):
            return process.who
        return replace(process.who, rank=largest.rank)

    def _is_world(self, one: Communicator) -> bool:
        """Return whether a communicator seems to have all ranks: it is the largest, and there are no more processes."""
        if one.ranks < 2 or len(self._all) > one.ranks:
            return False
        others = [process.largest for process in self._all.values() if process.largest is not None]
        return all(other.ranks < one.ranks or other.key == one.key for other in others)

    def world(self) -> int | None:
        """Return the size of the communicator that has all ranks, or None."""
        for process in self._all.values():
            if process.largest is not None and self._is_world(process.largest):
                return process.largest.ranks
        return None

    def read(self, process: NcclProcess, text: str, line: Line) -> None:
        """Take in a line about a communicator or the bootstrap network."""
        found = _INIT.search(text)
        if found is not None:
            _note(process, found, line)
            return
        found = _BOOTSTRAP.search(text)
        if found is not None:
            process.interface = found["interface"]
            process.who = replace(process.who, address=plain_address(found["address"]))

    def tell(self) -> Iterator[Fact]:
        """Return the rank of each process, and which processes wait in the set-up of a communicator."""
        world = self.world()
        for process in self._all.values():
            who = self.who(process)
            largest = process.largest
            if not process.reported:
                process.reported = True
                spot, time = (largest.spot, largest.time) if largest else (process.spot, None)
                yield Seen(who=who, spot=spot, time=time, said=largest.said if largest else "", gpu=process.bus)
                if world and largest is not None and largest.ranks == world:
                    yield Size(spot=spot, ranks=world)
                    world = None
            yield from _unready(process, who)


def _note(process: NcclProcess, found: re.Match[str], line: Line) -> None:
    pointer, phase = found["pointer"], found["phase"]
    if not phase.startswith("Init"):
        process.communicators.pop(pointer, None)
        return
    rank, ranks = int(found["rank"]), int(found["ranks"])
    if not rank < ranks <= MOST_RANKS:
        return
    key = f"comm {found['id']}" if found["id"] else ""
    one = Communicator(key=key, rank=rank, ranks=ranks, spot=line.spot(), time=line.time, said=quote(line.text))
    one.ready = phase == "Init COMPLETE"
    former = process.communicators.get(pointer)
    if not one.key and former is not None:
        one.key = former.key
    process.communicators[pointer] = one
    process.members[one.key or f"of {ranks}"] = (rank, ranks)
    if process.largest is None or ranks > process.largest.ranks:
        process.largest = one
    if found["bus"]:
        process.bus = bus_of(found["bus"])


def bus_of(number: str) -> str:
    """Return "4e:00" for NCCL's bus id 4e000: domain, bus, device and function in hexadecimal digits."""
    digits = number.lower().removeprefix("0x").zfill(5)
    return f"{digits[-5:-3]}:{digits[-3:-1]}"


def _unready(process: NcclProcess, who: Who) -> Iterator[Fact]:
    for one in process.communicators.values():
        if not one.ready:
            words = f"the communicator {one.key.removeprefix('comm ')} of {one.ranks} ranks".replace("  ", " ")
            operation = Operation(op="init", group=one.key, group_words=words)
            yield Waiting(who=who, spot=one.spot, time=one.time, said=one.said, operation=operation, in_init=True)
