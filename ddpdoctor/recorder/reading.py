"""Reads a ring file back, whatever state it is in; ``wire`` says how it is laid out.

Apart from the layout because no process that is recorded needs it.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from . import wire


class DamagedRingError(ValueError):
    """The file is no ring, or not a whole one."""


class Slot(NamedTuple):
    """One recorded call; strings are resolved by ``Ring``."""

    number: int
    started_ns: int
    ended_ns: int
    seq: int
    op: str
    api: str
    group: str
    site: Optional[Dict[str, Any]]
    redop: str
    dtype: str
    peer: int
    tensors: int
    flags: int
    shape: Optional[Tuple[int, ...]]


class Step(NamedTuple):
    """One recorded training step; durations in microseconds, by phase."""

    number: int
    ended_ns: int
    group: str
    flags: int
    phases_us: Tuple[int, ...]
    waits_us: Tuple[int, ...]


class Line(NamedTuple):
    """One line of the user's, and how often the main thread was met there in a phase of the step."""

    site: Dict[str, Any]
    phase: int
    times: int


class RingContent(NamedTuple):
    """All that a ring holds."""

    role: int
    pid: int
    start_ticks: int
    cells: Dict[str, int]
    place: Optional[Tuple[str, int, str]]
    notes: List[Dict[str, Any]]
    slots: List[Slot]
    steps: List[Step]
    lines: List[Line]


def read_identity(data: bytes) -> Tuple[int, wire.Shape, int, int]:
    """Return role, shape, pid and start ticks.

    Raises:
        DamagedRingError: the bytes are no ring of this version, or their numbers do not fit together.
    """
    if len(data) < wire.HEADER_SIZE:
        raise DamagedRingError("too short to be a ring")
    magic, version, role, journal_at, journal, slots_at, slot_size, count, pid, ticks, *more = (
        wire.IDENTITY.unpack_from(data)
    )
    if magic != wire.MAGIC:
        raise DamagedRingError("not a ring file")
    if version != wire.VERSION:
        raise DamagedRingError("ring version %d, this program reads %d" % (version, wire.VERSION))
    shape = wire.Shape(journal, count, *more)
    if (
        journal_at != wire.HEADER_SIZE
        or slots_at != wire.HEADER_SIZE + journal
        or slot_size != wire.SLOT_SIZE
        or not count
    ):
        raise DamagedRingError("the ring's header does not fit together")
    if len(data) < shape.total_bytes:
        raise DamagedRingError("truncated: %d of %d bytes" % (len(data), shape.total_bytes))
    return role, shape, pid, ticks


def read_cells(data: Any) -> Dict[str, int]:
    """Return the header's cells by name."""
    return dict(zip(wire.CELL_NAMES, struct.unpack_from("<%dQ" % len(wire.CELL_NAMES), data, wire.CELLS_OFFSET)))


def read_place(data: bytes) -> Optional[Tuple[str, int, str]]:
    """Return the last user line seen as (file, line, function), or None where none was, or it was being written."""
    stamp, length = wire.PLACE_HEAD.unpack_from(data, wire.PLACE_OFFSET)
    if stamp == 0 or stamp % 2 or length > wire.PLACE_MAX:
        return None
    start = wire.PLACE_OFFSET + wire.PLACE_HEAD.size
    parts = bytes(data[start : start + length]).decode("utf-8", "replace").split("\0")
    if len(parts) != 3 or not parts[0].isdigit():
        return None
    return parts[2], int(parts[0]), parts[1]


def read_ring(data: bytes) -> RingContent:
    """Decode a whole ring.

    Raises:
        DamagedRingError: see ``read_identity``. Single damaged lines and slots are passed over.
    """
    role, shape, pid, ticks = read_identity(data)
    cells = read_cells(data)
    used = min(cells["journal_used"], shape.journal_bytes)
    strings, sites, notes = _read_journal(bytes(data[wire.HEADER_SIZE : wire.HEADER_SIZE + used]))
    slots = _read_slots(data, shape.slots_at, shape.slots, strings, sites)
    steps = _read_steps(data, shape, cells["steps_recorded"], strings)
    return RingContent(role, pid, ticks, cells, read_place(data), notes, slots, steps, _read_lines(data, shape, sites))


def _read_journal(text: bytes) -> Tuple[Dict[int, str], Dict[int, Dict[str, Any]], List[Dict[str, Any]]]:
    strings: Dict[int, str] = {0: ""}
    sites: Dict[int, Dict[str, Any]] = {}
    notes: List[Dict[str, Any]] = []
    for line in text.split(b"\n"):
        try:
            entry = json.loads(line) if line else None
        except ValueError:
            continue
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("s"), int):
            strings[entry["s"]] = str(entry.get("v", ""))
        elif isinstance(entry.get("c"), int):
            sites[entry["c"]] = entry
        else:
            notes.append(entry)
    return strings, sites, notes


def _read_slots(
    data: bytes, offset: int, count: int, strings: Dict[int, str], sites: Dict[int, Dict[str, Any]]
) -> List[Slot]:
    found = []
    for i in range(count):
        fields = wire.SLOT.unpack_from(data, offset + i * wire.SLOT_SIZE)
        index, started, ended, seq, op, api, group, site, redop, dtype, peer, tensors, flags, ndim = fields[:14]
        if index == 0 or (index - 1) % count != i:
            continue
        names = [strings.get(n, "") for n in (op, api, group, redop, dtype)]
        shape = tuple(fields[14 : 14 + ndim]) if dtype and ndim <= wire.MAX_DIMS else None
        found.append(
            Slot(
                index, started, ended, seq, names[0], names[1], names[2], sites.get(site), names[3], names[4],
                peer, tensors, flags, shape,
            )
        )  # fmt: skip
    found.sort(key=lambda slot: slot.number)
    return found


def _read_steps(data: bytes, shape: wire.Shape, recorded: int, strings: Dict[int, str]) -> List[Step]:
    found = []
    for number in range(max(1, recorded - shape.steps + 1), recorded + 1):
        fields = wire.STEP.unpack_from(data, shape.steps_at + (number - 1) % shape.steps * wire.STEP_SIZE)
        if fields[0] == number:
            found.append(Step(fields[0], fields[1], strings.get(fields[2], ""), fields[3], fields[4:8], fields[8:]))
    return found


def _read_lines(data: bytes, shape: wire.Shape, sites: Dict[int, Dict[str, Any]]) -> List[Line]:
    entries = (wire.LINE.unpack_from(data, shape.lines_at + i * wire.LINE_SIZE) for i in range(shape.lines))
    return [Line(sites[site], phase, times) for site, phase, times in entries if times and site in sites]
