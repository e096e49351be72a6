"""The calls in NCCL's log (NCCL_DEBUG_SUBSYS=COLL): what each rank called at which number of a communicator.

``opCount`` is hexadecimal and counts per communicator, which has another pointer in every process. Several calls of one
group call share a number, so a call is told by its number and its place among those.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import MOST_QUOTED, quote
from ddpdoctor.model.evidence import Called, Operation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.nccl_processes import Communicator, NcclProcess, NcclProcesses
    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact, Spot

MOST_OPEN = 512
"""Our choice: how many numbers of a communicator are kept for which ranks are missing or differ."""
MOST_COMMUNICATORS = 4096
KEPT = 4
"""How many last calls of each process are kept."""
MOST_SHOWN = 4096
_CALL = re.compile(
    r"(?P<op>[A-Z]\w+): opCount (?P<number>[0-9a-f]{1,16}) sendbuff \S+ recvbuff \S+ count (?P<count>\d+) datatype "
    r"(?P<dtype>\d+) op (?P<redop>\d+) root (?P<root>\d+) comm (?P<pointer>0x[0-9a-f]+)(?: \[nranks=(?P<ranks>\d+)\])?"
)
_OPS = {
    "AllReduce": "all_reduce", "Broadcast": "broadcast", "Reduce": "reduce", "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
"""Sends and receives are left out: they differ between ranks as a rule."""
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
"""ncclDataType_t."""


@dataclass(frozen=True, slots=True)
class _Call:
    op: str
    count: int
    dtype: int
    redop: int
    root: int


@dataclass(slots=True)
class _Made:
    """One call of one process."""

    process: NcclProcess
    rank: int | None
    call: _Call
    number: int
    spot: Spot
    said: str
    """The line. Only a call that is shown becomes a fact."""


@dataclass(slots=True)
class _Track:
    """The calls of one communicator in all processes of this log."""

    group: str
    ranks: int
    open: dict[tuple[int, int], dict[int, _Made]] = field(default_factory=dict)
    last: dict[int, deque[_Made]] = field(default_factory=dict)
    """By process."""


class Calls:
    """All calls of one log."""

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._place: dict[tuple[int, str], tuple[int, int]] = {}
        self._order: dict[int, dict[str, int]] = {}

    def read(self, process: NcclProcess, text: str, line: Line) -> None:
        """Take in a call."""
        found = _CALL.search(text)
        if found is None or found["op"] not in _OPS:
            return
        pointer, number = found["pointer"], int(found["number"], 16)
        communicator = process.communicators.get(pointer)
        track = self._track(process, pointer, communicator, int(found["ranks"] or 0))
        if track is None:
            return
        call = _Call(
            _OPS[found["op"]], int(found["count"]), int(found["dtype"]), int(found["redop"]), int(found["root"])
        )  # fmt: skip
        former, place = self._place.get((id(process), pointer), (-1, 0))
        place = place + 1 if former == number else 0
        self._place[id(process), pointer] = (number, place)
        rank = communicator.rank if communicator is not None else None
        made = _Made(process, rank, call, number, line.spot(), line.text[: 2 * MOST_QUOTED])
        track.last.setdefault(id(process), deque(maxlen=KEPT)).append(made)
        _compare(track, (number, place), made)

    def _track(self, process: NcclProcess, pointer: str, known: Communicator | None, ranks: int) -> _Track | None:
        if known is not None and known.key:
            key, ranks = known.key, known.ranks
        else:  # the order in which a process uses its communicators is the same in all, as a rule
            order = self._order.setdefault(id(process), {})
            key = f"comm no. {order.setdefault(pointer, len(order))} of {ranks} ranks"
        if key not in self._tracks and len(self._tracks) < MOST_COMMUNICATORS:
            self._tracks[key] = _Track(group=key, ranks=ranks)
        return self._tracks.get(key)

    def tell(self, processes: NcclProcesses) -> Iterator[Fact]:
        """Return the first calls that differ, and the last calls of each process."""
        shown = 0
        for track in self._tracks.values():
            odd = next((made for _, made in sorted(track.open.items(), key=lambda item: item[0]) if _differ(made)), {})
            last = [one for calls in track.last.values() for one in calls]
            for one in dict.fromkeys(map(_Same, [*odd.values(), *last])):
                if shown < MOST_SHOWN:
                    shown += 1
                    yield _fact(track, one.made, processes)


@dataclass(slots=True)
class _Same:
    """A call that is equal only to itself."""

    made: _Made

    def __hash__(self) -> int:
        return id(self.made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.made is self.made


def _compare(track: _Track, at: tuple[int, int], made: _Made) -> None:
    """Keep a call until all ranks have made it. Drop it if all ranks made the same call."""
    entry = track.open.setdefault(at, {})
    entry[id(made.process)] = made
    if len(entry) == track.ranks and not _differ(entry):
        del track.open[at]
    elif len(track.open) > MOST_OPEN:
        oldest = next((key for key, those in track.open.items() if not _differ(those)), None)
        track.open.pop(oldest if oldest is not None else max(track.open))


def _differ(entry: dict[int, _Made]) -> bool:
    calls = iter(entry.values())
    first = next(calls, None)
    return first is not None and any(one.call != first.call for one in calls)


def _fact(track: _Track, made: _Made, processes: NcclProcesses) -> Called:
    call = made.call
    return Called(
        who=processes.who(made.process),
        spot=made.spot,
        said=quote(made.said),
        operation=Operation(
            op=call.op,
            group=track.group,
            group_words=f"NCCL's communicator {track.group.removeprefix('comm ')}",
            seq=made.number,
            numel_in=call.count,
            dtype=_DTYPES[call.dtype] if call.dtype < len(_DTYPES) else "",
        ),
    )
