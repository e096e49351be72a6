"""The layout of a ring file, version 2: what a process writes about itself, and how to read it back.

A ring outlives the process that writes it, however that dies. It has five parts:

``header``
    identity, then cells (unsigned 64-bit) that say at any moment how far the process has come,
    then the last user line seen, as text under a sequence lock.
``journal``
    lines of JSON that are never overwritten: interned strings, call sites, notes. When it is full,
    later lines are dropped and counted.
``slots``
    fixed-size records of calls, written before the call and completed after it; the oldest are overwritten.
``steps``
    fixed-size records of training steps that have ended: how long each phase took, and how much of it was waiting.
    The oldest are overwritten.
``lines``
    a table of the user's lines that the sampler has met the main thread at, with how often, by phase of the step.

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds.
Version history: 1, the first. 2, steps and lines.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

MAGIC = b"DDPDOCR\n"
VERSION = 2
HEADER_SIZE = 4096
IDENTITY = struct.Struct("<8sIIQQQQQQQQQ")
"""magic, version, role, journal offset and size, slots offset and size of one, their count, pid, start ticks, counts of
steps and lines."""

ROLE_RANK = 1
ROLE_CHILD = 2

CELLS_OFFSET = 128
CELL = struct.Struct("<Q")
CELL_NAMES = (
    "journal_used",
    "slots_claimed",
    "calls_done",
    "steps",
    "batches",
    "epochs",
    "heartbeat_ns",
    "function_changes",
    "new_functions",
    "main_ended_ns",
    "wait_since_ns",
    "dropped",
    "started_ns",
    "started_wall_ns",
    "exited_ns",
    "initialized",
    "steps_recorded",
)
CELL_OFFSETS = {name: CELLS_OFFSET + 8 * i for i, name in enumerate(CELL_NAMES)}

PLACE_OFFSET = 1024
PLACE_HEAD = struct.Struct("<II")
PLACE_MAX = 2048

SLOT = struct.Struct("<QQQqIIIIIIiiII6q")
"""index, started, ended, seq, op, api, group, site, redop, dtype, peer, tensors, flags, ndim, dims."""
SLOT_SIZE = 128
SLOT_ENDED_OFFSET = 16
SLOT_FLAGS_OFFSET = 64
FLAGS = struct.Struct("<I")
MAX_DIMS = 6
NO_PEER = -1
NO_SEQ = -1

FLAG_ASYNC = 1
FLAG_FAILED = 2
FLAG_MAIN = 4
FLAG_P2P = 8

STEP = struct.Struct("<QQII8I")
"""number from 1, ended_ns, group, flags, then microseconds: the four phases, and the waiting in each of them."""
STEP_SIZE = STEP.size
STEP_REDUCED = 1
"""Flag of a step that ended with DDP's reduction; without it the step ended with an optimizer's step."""

BEFORE, FORWARD, BETWEEN, BACKWARD = range(4)
"""The phases of a step: since the step before, forward, from there to backward, backward with its reduction."""

LINE = struct.Struct("<III")
"""site, phase, how often it was met outside calls that need other ranks. A site of 0 is an entry not yet used."""
LINE_SIZE = 12

CONTROL_SIZE = 4096
CONTROL_REQUEST = 0
"""Offset of the number of the latest request for evidence, raised by the watcher."""
CONTROL_CLOSING = 8
"""Offset of the time at which the launcher began to stop its ranks, raised by the launcher."""
CONTROL_ACK = 16
"""Offset of the time at which the watcher had its evidence, raised by the watcher."""


class Shape(NamedTuple):
    """How large the parts of a ring are."""

    journal_bytes: int
    slots: int
    steps: int = 0
    lines: int = 0

    @property
    def slots_at(self) -> int:
        """The offset of the first record of a call."""
        return HEADER_SIZE + self.journal_bytes

    @property
    def steps_at(self) -> int:
        """The offset of the first record of a step."""
        return self.slots_at + self.slots * SLOT_SIZE

    @property
    def lines_at(self) -> int:
        """The offset of the table of lines."""
        return self.steps_at + self.steps * STEP_SIZE

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return self.lines_at + self.lines * LINE_SIZE


RANK_SHAPE = Shape(journal_bytes=512 * 1024, slots=4096, steps=256, lines=256)
CHILD_SHAPE = Shape(journal_bytes=24 * 1024, slots=32, lines=32)


PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


def is_library_path(file: str, roots: Tuple[str, ...]) -> bool:
    """Return whether a file of code belongs to Python or an installed package, given the standard library's folders."""
    return file.startswith(("<frozen", *roots)) or any(part in file for part in PACKAGE_FOLDERS)


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


def read_identity(data: bytes) -> Tuple[int, Shape, int, int]:
    """Return role, shape, pid and start ticks.

    Raises:
        DamagedRingError: the bytes are no ring of this version, or their numbers do not fit together.
    """
    if len(data) < HEADER_SIZE:
        raise DamagedRingError("too short to be a ring")
    magic, version, role, journal_at, journal, slots_at, slot_size, count, pid, ticks, *more = IDENTITY.unpack_from(
        data
    )
    if magic != MAGIC:
        raise DamagedRingError("not a ring file")
    if version != VERSION:
        raise DamagedRingError("ring version %d, this program reads %d" % (version, VERSION))
    shape = Shape(journal, count, *more)
    if journal_at != HEADER_SIZE or slots_at != HEADER_SIZE + journal or slot_size != SLOT_SIZE or not count:
        raise DamagedRingError("the ring's header does not fit together")
    if len(data) < shape.total_bytes:
        raise DamagedRingError("truncated: %d of %d bytes" % (len(data), shape.total_bytes))
    return role, shape, pid, ticks


def read_cells(data: Any) -> Dict[str, int]:
    """Return the header's cells by name."""
    return dict(zip(CELL_NAMES, struct.unpack_from("<%dQ" % len(CELL_NAMES), data, CELLS_OFFSET)))


def read_place(data: bytes) -> Optional[Tuple[str, int, str]]:
    """Return the last user line seen as (file, line, function), or None where none was, or it was being written."""
    stamp, length = PLACE_HEAD.unpack_from(data, PLACE_OFFSET)
    if stamp == 0 or stamp % 2 or length > PLACE_MAX:
        return None
    start = PLACE_OFFSET + PLACE_HEAD.size
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
    strings, sites, notes = _read_journal(bytes(data[HEADER_SIZE : HEADER_SIZE + used]))
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
        fields = SLOT.unpack_from(data, offset + i * SLOT_SIZE)
        index, started, ended, seq, op, api, group, site, redop, dtype, peer, tensors, flags, ndim = fields[:14]
        if index == 0 or (index - 1) % count != i:
            continue
        names = [strings.get(n, "") for n in (op, api, group, redop, dtype)]
        shape = tuple(fields[14 : 14 + ndim]) if dtype and ndim <= MAX_DIMS else None
        found.append(
            Slot(
                index, started, ended, seq, names[0], names[1], names[2], sites.get(site), names[3], names[4],
                peer, tensors, flags, shape,
            )
        )  # fmt: skip
    found.sort(key=lambda slot: slot.number)
    return found


def _read_steps(data: bytes, shape: Shape, recorded: int, strings: Dict[int, str]) -> List[Step]:
    found = []
    for number in range(max(1, recorded - shape.steps + 1), recorded + 1):
        fields = STEP.unpack_from(data, shape.steps_at + (number - 1) % shape.steps * STEP_SIZE)
        if fields[0] == number:
            found.append(Step(fields[0], fields[1], strings.get(fields[2], ""), fields[3], fields[4:8], fields[8:]))
    return found


def _read_lines(data: bytes, shape: Shape, sites: Dict[int, Dict[str, Any]]) -> List[Line]:
    entries = (LINE.unpack_from(data, shape.lines_at + i * LINE_SIZE) for i in range(shape.lines))
    return [Line(sites[site], phase, times) for site, phase, times in entries if times and site in sites]
