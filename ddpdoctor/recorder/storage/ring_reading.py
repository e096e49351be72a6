"""Reads a ring file back, whatever state it is in. ``ring_layout`` describes its layout.

It is a module of its own because no recorded process needs it.
"""

from __future__ import annotations

import os
import struct
from array import array
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from . import ring_layout
from .files import open_plain
from .group_json import parse_group_json
from .kept_steps import is_sampled
from .slots import Slots, bytes_used, read_slots

MAX_RING_BYTES = 8 * 2**20
"""More than any recorder makes (1 MiB). A header with a larger size is damaged."""
_NUMBERS = ("at", "pid", "ppid", "code", "rank", "world_size")
"""Fields that are numbers or null in every note."""
_NUMBER = (int, type(None))


class DamagedRingError(ValueError):
    """The file is no ring, or is incomplete."""


class LineCount(NamedTuple):
    """One of the user's lines, and how often the main thread was sampled there in a phase of the step."""

    site: Dict[str, Any]
    phase: int
    times: int


class RingContent(NamedTuple):
    """The decoded content of a ring."""

    role: int
    pid: int
    start_ticks: int
    cells: Dict[str, int]
    place: Optional[Tuple[str, int, str]]
    notes: List[Dict[str, Any]]
    slots: Slots
    strings: Dict[int, str]
    steps: List[array[int]]
    """The columns of ``ring_layout.STEP``, in order; empty if there are no steps. The group is a key of ``strings``."""
    lines: List[LineCount]
    kept: List[array[int]] = []  # noqa: RUF012 - a named tuple's default, never changed
    """The columns of the steps kept from the whole run, each step once, by number."""
    totals: List[Tuple[int, ...]] = []  # noqa: RUF012 - likewise
    """For each of ``ring_layout.PARTS``: its sum in microseconds, then its histogram. Empty up to version 3."""


def read_identity(data: Any, size: Optional[int] = None) -> Tuple[int, ring_layout.RingShape, int, int]:
    """Return role, shape, pid and start ticks. ``data`` is a ring, or the header of a ring of ``size`` bytes.

    Raises:
        DamagedRingError: the bytes are no ring of a known version, or its numbers are inconsistent.
    """
    size = len(data) if size is None else size
    if len(data) < ring_layout.HEADER_SIZE:
        raise DamagedRingError("too short to be a ring")
    magic, version, role, journal_at, journal, slots_at, slot_size, count, pid, ticks, *more = (
        ring_layout.IDENTITY.unpack_from(data)
    )
    if magic != ring_layout.MAGIC:
        raise DamagedRingError("not a ring file")
    if version not in ring_layout.READ_VERSIONS:
        known = ", ".join(map(str, ring_layout.READ_VERSIONS))
        raise DamagedRingError("ring version %d, this program reads %s" % (version, known))
    steps, lines, kept = more
    shape = ring_layout.RingShape(journal, count, steps, lines, kept, _step_record(version).size)
    if (
        journal_at != ring_layout.HEADER_SIZE
        or slots_at != ring_layout.HEADER_SIZE + journal
        or slot_size != ring_layout.SLOT_SIZE
        or not count
    ):
        raise DamagedRingError("the ring's header does not fit together")
    if shape.total_bytes > MAX_RING_BYTES:
        raise DamagedRingError("the ring's header promises %d bytes" % shape.total_bytes)
    if size < shape.total_bytes:
        raise DamagedRingError("truncated: %d of %d bytes" % (size, shape.total_bytes))
    return role, shape, pid, ticks


def read_cells(data: Any) -> Dict[str, int]:
    """Return the header's cells by name."""
    version = ring_layout.IDENTITY.unpack_from(data)[1]
    names = ring_layout.CELL_NAMES_OF_VERSION_2 if version == ring_layout.READ_VERSIONS[0] else ring_layout.CELL_NAMES
    return dict(zip(names, struct.unpack_from("<%dQ" % len(names), data, ring_layout.CELLS_OFFSET)))


def read_place(data: bytes) -> Optional[Tuple[str, int, str]]:
    """Return the last user line as (file, line, function), or None if there is none or it is being written."""
    stamp, length = ring_layout.PLACE_HEAD.unpack_from(data, ring_layout.PLACE_OFFSET)
    if stamp == 0 or stamp % 2 or length > ring_layout.PLACE_MAX:
        return None
    start = ring_layout.PLACE_OFFSET + ring_layout.PLACE_HEAD.size
    parts = bytes(data[start : start + length]).decode("utf-8", "replace").split("\0")
    if len(parts) != 3 or not parts[0].isdigit():
        return None
    return parts[2], int(parts[0]), parts[1]


def uses_nccl(data: Any) -> bool:
    """Return whether the default group of a process uses NCCL. The ring may be being written."""
    used = min(read_cells(data)["journal_used"], len(data) - ring_layout.HEADER_SIZE)
    notes = _read_journal(bytes(data[ring_layout.HEADER_SIZE : ring_layout.HEADER_SIZE + used]))[2]
    backend = next((str(note.get("backend")) for note in reversed(notes) if note["k"] == "initialized"), "")
    return "nccl" in backend.lower()


def read_ring_file(path: Any) -> RingContent:
    """Decode the ring in a file, which may be written, truncated or deleted meanwhile.

    Only the used parts are read. The file is not mapped, because truncating a mapped file would kill its reader.

    Raises:
        DamagedRingError: see ``read_identity``. Single damaged lines and slots are skipped.
        OSError: the file cannot be read.
    """
    fd = open_plain(path, os.O_RDONLY)
    try:
        header = os.pread(fd, ring_layout.HEADER_SIZE, 0)
        role, shape, pid, ticks = read_identity(header, os.fstat(fd).st_size)
        claimed = read_cells(header)["slots_claimed"]
        records = os.pread(fd, bytes_used(claimed, shape.slots), shape.slots_at)
        rest = os.pread(fd, shape.total_bytes - shape.steps_at, shape.steps_at)
        # The journal is read last, so that it has the names of everything in the records.
        header = os.pread(fd, ring_layout.HEADER_SIZE, 0)
        if len(header) < ring_layout.HEADER_SIZE or len(rest) < shape.total_bytes - shape.steps_at:
            raise DamagedRingError("cut short while it was read")
        cells = read_cells(header)
        journal = os.pread(fd, min(cells["journal_used"], shape.journal_bytes), ring_layout.HEADER_SIZE)
    finally:
        os.close(fd)
    strings, sites, notes = _read_journal(journal)
    slots = read_slots(records, claimed, shape.slots, strings, sites)
    record = _step_record(ring_layout.IDENTITY.unpack_from(header)[1])
    steps = _read_steps(rest, shape.steps, cells["steps_recorded"], record)
    lines = _read_lines(rest[shape.lines_at - shape.steps_at : shape.kept_at - shape.steps_at], sites)
    kept = _read_kept(rest[shape.kept_at - shape.steps_at :], shape.kept, cells)
    totals = list(ring_layout.TOTAL.iter_unpack(rest[shape.totals_at - shape.steps_at :]))
    return RingContent(role, pid, ticks, cells, read_place(header), notes, slots, strings, steps, lines, kept, totals)


def _step_record(version: int) -> struct.Struct:
    return ring_layout.STEP if version == ring_layout.VERSION else ring_layout.OLD_STEP


def _read_journal(text: bytes) -> Tuple[Dict[int, str], Dict[int, Dict[str, Any]], List[Dict[str, Any]]]:
    strings: Dict[int, str] = {0: ""}
    sites: Dict[int, Dict[str, Any]] = {}
    notes: List[Dict[str, Any]] = []
    for entry in _read_entries(text.split(b"\n")):
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("s"), int):
            strings[entry["s"]] = str(entry.get("v", ""))
        elif isinstance(entry.get("c"), int):
            sites[entry["c"]] = entry
        elif isinstance(entry.get("k"), str) and all(isinstance(entry.get(name), _NUMBER) for name in _NUMBERS):
            notes.append(entry)
    return strings, sites, notes


def _read_entries(lines: List[bytes]) -> List[Any]:
    """Parse lines of JSON all at once, which is faster. If that fails, parse each and skip the damaged ones."""
    written = [line for line in lines if line]
    try:
        entries = parse_group_json(b"[%s]" % b",\n".join(written))
    except ValueError:
        entries = []
    if len(entries) == len(written):
        return list(entries)
    return [entry for entry in map(_read_entry, written) if entry is not None]


def _read_entry(line: bytes) -> Any:
    try:
        return parse_group_json(line)
    except ValueError:
        return None


def _read_steps(data: bytes, space: int, recorded: int, record: struct.Struct) -> List[array[int]]:
    rows = record.iter_unpack(data[: min(recorded, space) * record.size])
    oldest = max(0, recorded - space)
    return _columns(row for i, row in enumerate(rows) if oldest < row[0] <= recorded and (row[0] - 1) % space == i)


def _read_kept(data: bytes, space: int, cells: Dict[str, int]) -> List[array[int]]:
    """Return the sampled and the longest steps. Places of a sample that was thinned may hold steps that left it."""
    rows = list(ring_layout.STEP.iter_unpack(data[: space * ring_layout.STEP_SIZE]))
    sampled, longest = rows[: ring_layout.SAMPLED_STEPS], rows[ring_layout.SAMPLED_STEPS :]
    found = [row for row in sampled if is_sampled(row[0], cells["sample_bits"])] + longest
    return _columns({row[0]: row for row in found if 0 < row[0] <= cells["steps_recorded"]}.values())


def _columns(rows: Iterable[Tuple[int, ...]]) -> List[array[int]]:
    return [array("Q" if at < 2 else "I", column) for at, column in enumerate(zip(*sorted(rows)))]


def _read_lines(data: bytes, sites: Dict[int, Dict[str, Any]]) -> List[LineCount]:
    used = data.rstrip(b"\0")
    entries = ring_layout.LINE.iter_unpack(used + bytes(-len(used) % ring_layout.LINE_SIZE))
    return [LineCount(sites[site], phase, times) for site, phase, times in entries if times and site in sites]
