"""Reads a ring file back, whatever state it is in. ``ring_layout`` describes its layout.

A rank has thousands of calls, and few need decoding: they are columns. JSON in which ranks name the members of their
groups has the same thousands of numbers on every rank: such a list is parsed once and shared.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from functools import lru_cache
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import ring_layout
from .files import open_plain, parse_json
from .ring_layout import is_sampled

MAX_RING_BYTES = 8 * 2**20  # More than any recorder makes (1 MiB). A header with a larger size is damaged.
_NUMBERS = ("at", "pid", "ppid", "code", "rank", "world_size")  # fields that are numbers or null in every note
_NUMBER = (int, type(None))


class DamagedRingError(ValueError):
    """The file is not a ring, or is incomplete."""


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
    # The columns of ``ring_layout.STEP``, in order; empty if there are no steps. The group is a key of ``strings``.
    steps: List[array[int]]
    lines: List[LineCount]
    # The columns of the steps kept from the whole run, each step once, by number.
    kept: List[array[int]] = []  # noqa: RUF012 - a named tuple's default, never changed
    # For each of ``ring_layout.PARTS``: its sum in microseconds, then its histogram. Empty up to version 3.
    totals: List[Tuple[int, ...]] = []  # noqa: RUF012 - likewise


def read_identity(data: Any, size: Optional[int] = None) -> Tuple[int, ring_layout.RingShape, int, int]:
    """Return role, shape, pid and start ticks of a ring, or of its header with ``size``. Raises DamagedRingError."""
    size = len(data) if size is None else size
    if len(data) < ring_layout.HEADER_SIZE:
        raise DamagedRingError("too short to be a ring")
    identity = ring_layout.IDENTITY.unpack_from(data)
    magic, version, role, journal_at, journal, slots_at, slot_size, count, pid, ticks, steps, lines, kept = identity
    if magic != ring_layout.MAGIC:
        raise DamagedRingError("not a ring file")
    if version not in ring_layout.READ_VERSIONS:
        known = ", ".join(map(str, ring_layout.READ_VERSIONS))
        raise DamagedRingError("ring version %d, this program reads %s" % (version, known))
    shape = ring_layout.RingShape(journal, count, steps, lines, kept, _step_record(version).size)
    is_in_place = journal_at == ring_layout.HEADER_SIZE and slots_at == ring_layout.HEADER_SIZE + journal
    if not is_in_place or slot_size != ring_layout.SLOT_SIZE or not count:
        raise DamagedRingError("the ring's header does not fit together")
    if shape.total_bytes > MAX_RING_BYTES:
        raise DamagedRingError("the ring's header promises %d bytes" % shape.total_bytes)
    if size < shape.total_bytes:
        raise DamagedRingError("truncated: %d of %d bytes" % (size, shape.total_bytes))
    return role, shape, pid, ticks


def read_cells(data: Any) -> Dict[str, int]:
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
    return (parts[2], int(parts[0]), parts[1]) if len(parts) == 3 and parts[0].isdigit() else None


def uses_nccl(data: Any) -> bool:
    """Return whether the default group of a process uses NCCL. The ring may be being written."""
    used = min(read_cells(data)["journal_used"], len(data) - ring_layout.HEADER_SIZE)
    notes = _read_journal(bytes(data[ring_layout.HEADER_SIZE : ring_layout.HEADER_SIZE + used]))[2]
    backend = next((str(note.get("backend")) for note in reversed(notes) if note["k"] == "initialized"), "")
    return "nccl" in backend.lower()


def read_ring_file(path: Any) -> RingContent:
    """Decode the ring in a file that may change meanwhile. Raises OSError, or DamagedRingError (``read_identity``)."""
    # Only the used parts are read. The file is not mapped, because truncating a mapped file would kill its reader.
    # Single damaged lines and slots are skipped.
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
    space = shape.steps
    recorded = cells["steps_recorded"]
    rows = record.iter_unpack(rest[: min(recorded, space) * record.size])
    oldest = max(0, recorded - space)
    steps = _columns(row for i, row in enumerate(rows) if oldest < row[0] <= recorded and (row[0] - 1) % space == i)
    used = rest[shape.lines_at - shape.steps_at : shape.kept_at - shape.steps_at].rstrip(b"\0")
    entries = ring_layout.LINE.iter_unpack(used + bytes(-len(used) % ring_layout.LINE_SIZE))
    lines = [LineCount(sites[site], phase, times) for site, phase, times in entries if times and site in sites]
    # Places of a sample that was thinned may hold steps that left it.
    places = list(ring_layout.STEP.iter_unpack(rest[shape.kept_at - shape.steps_at :][: shape.kept * record.size]))
    sampled = [row for row in places[: ring_layout.SAMPLED_STEPS] if is_sampled(row[0], cells["sample_bits"])]
    longest = places[ring_layout.SAMPLED_STEPS :]
    kept = _columns({row[0]: row for row in sampled + longest if 0 < row[0] <= recorded}.values())
    totals = list(ring_layout.TOTAL.iter_unpack(rest[shape.totals_at - shape.steps_at :]))
    return RingContent(role, pid, ticks, cells, read_place(header), notes, slots, strings, steps, lines, kept, totals)


def _step_record(version: int) -> struct.Struct:
    return ring_layout.STEP if version == ring_layout.VERSION else ring_layout.OLD_STEP


def _read_journal(text: bytes) -> Tuple[Dict[int, str], Dict[int, Dict[str, Any]], List[Dict[str, Any]]]:
    strings: Dict[int, str] = {0: ""}
    sites: Dict[int, Dict[str, Any]] = {}
    notes: List[Dict[str, Any]] = []
    # All lines are parsed at once, which is faster. If that fails, each is, and the damaged ones are skipped.
    lines = [line for line in text.split(b"\n") if line]
    try:
        entries = list(parse_group_json(b"[%s]" % b",\n".join(lines)))
    except ValueError:
        entries = []
    if len(entries) != len(lines):
        entries = []
        for line in lines:
            try:
                entries.append(parse_group_json(line))
            except ValueError:
                continue
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        if isinstance(entry.get("s"), int):
            strings[entry["s"]] = str(entry.get("v", ""))
        elif isinstance(entry.get("c"), int):
            sites[entry["c"]] = entry
        elif isinstance(entry.get("k"), str) and all(isinstance(entry.get(name), _NUMBER) for name in _NUMBERS):
            notes.append(entry)
    return strings, sites, notes


def _columns(rows: Iterable[Tuple[int, ...]]) -> List[array[int]]:
    return [array("Q" if at < 2 else "I", column) for at, column in enumerate(zip(*sorted(rows)))]


_WORDS = ring_layout.SLOT_SIZE // 8
_AFTER_KIND = ring_layout.SLOT_SIZE - ring_layout.KIND_OFFSET - ring_layout.KIND.size
_REST = struct.Struct("%dx%ds%dx" % (ring_layout.KIND_OFFSET, ring_layout.KIND.size, _AFTER_KIND))  # a record's kind
# Records after the last claimed one that are read too, because concurrent threads may publish claims out of order.
MORE_CLAIMED = 64


class CallSlot(NamedTuple):
    """One recorded call, with its interned strings resolved."""

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


class Slots:
    """The recorded calls of a ring, ordered by number. Each column has one entry per call; ``which`` indexes ``kinds``.

    A kind is what calls share: a ``CallSlot`` whose number, times and seq are 0. ``numbers`` is a range unless records
    are missing, because a job can have thousands of ranks with thousands of calls.
    """

    def __init__(self, kinds: List[CallSlot], which: array[int], columns: Sequence[array[int]]) -> None:
        """``columns`` are numbers, starts, ends and seqs."""
        numbers, self.started_ns, self.ended_ns, self.seqs = columns
        self.kinds = kinds
        self.which = which
        is_range = len(numbers) > 0 and numbers[-1] - numbers[0] == len(numbers) - 1
        self.numbers: Sequence[int] = range(numbers[0], numbers[-1] + 1) if is_range else numbers

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, at: int) -> CallSlot:
        return self.kinds[self.which[at]]._replace(
            number=self.numbers[at], started_ns=self.started_ns[at], ended_ns=self.ended_ns[at], seq=self.seqs[at]
        )

    def __iter__(self) -> Iterator[CallSlot]:
        return map(self.__getitem__, range(len(self)))


def bytes_used(claimed: int, count: int) -> int:
    """Return how many bytes of the ``count`` slots can be in use after ``claimed`` calls, with a small margin."""
    return min(claimed + MORE_CLAIMED, count) * ring_layout.SLOT_SIZE


def read_slots(data: bytes, claimed: int, count: int, strings: Dict[int, str], sites: Dict[int, Any]) -> Slots:
    """Decode the records of a ring of ``count`` slots. What is empty or in the slot of another number is skipped."""
    written = data[: bytes_used(claimed, count)].rstrip(b"\0")
    whole = written + bytes(-len(written) % ring_layout.SLOT_SIZE)
    words = array("Q", whole)
    if sys.byteorder == "big":
        words.byteswap()
    places: Dict[Tuple[bytes], int] = {}
    which = array("H", [places.setdefault(rest, len(places)) for rest in _REST.iter_unpack(whole)])
    columns = [*(words[i::_WORDS] for i in range(4)), which]
    cut = claimed % count if claimed > count else 0
    turned = [column[cut:] + column[:cut] for column in columns] if cut else columns
    first = max(claimed - count, 0) + 1
    if turned[0] == _consecutive(first, len(turned[0])):
        columns = turned
    else:  # without records that are in the wrong slot
        valid = sorted((number, i) for i, number in enumerate(columns[0]) if number and (number - 1) % count == i)
        columns = [array(column.typecode, [column[i] for _, i in valid]) for column in columns]
    columns[3] = array("q", columns[3].tobytes())
    kinds = []
    for (rest,) in places:
        op, api, group, site, redop, dtype, peer, tensors, flags, ndim, *dims = ring_layout.KIND.unpack(rest)
        names = [strings.get(n, "") for n in (op, api, group)]
        shape = tuple(dims[:ndim]) if dtype and ndim <= ring_layout.MAX_DIMS else None
        of_tensors = (strings.get(redop, ""), strings.get(dtype, ""), peer, tensors, flags, shape)
        kinds.append(CallSlot(0, 0, 0, 0, names[0], names[1], names[2], sites.get(site), *of_tensors))
    return Slots(kinds, columns[4], columns[:4])


# So many numbers in order from the first; most rings of a job have the same
_consecutive = lru_cache(maxsize=4)(lambda first, count: array("Q", range(first, first + count)))


MOST_BYTES = 4 * 2**20  # Our choice: 40 groups of 16,384 ranks. Larger files are parsed as they are.
LONG_BYTES = 512  # our choice: a shorter list is parsed faster than looked up
# Our choice: how many different lists are kept. A mesh of 16,384 ranks has 128 large groups in each of two dimensions.
MOST_LISTS = 1024
_BEFORE, _AFTER = b'"ranks": [', b', "backend":'  # what stands around the members in an entry of ``groups_now``


def parse_group_json(data: bytes) -> Any:
    """Parse JSON; long lists of members in ``groups`` become tuples that others may share. Raises ValueError."""
    if len(data) > MOST_BYTES:
        return parse_json(data)
    first, *parts = data.split(_BEFORE)
    lists: List[Tuple[int, ...]] = []
    kept = [first]
    for part in parts:
        numbers, _, rest = part.partition(b"]")
        members = _members(numbers) if len(numbers) >= LONG_BYTES and rest.startswith(_AFTER) else None
        if members is None:
            kept.append(_BEFORE + part)
        else:
            lists.append(members)
            kept.append(b'"ranks": -%d%s' % (len(lists), rest))
    parsed = parse_json(b"".join(kept))
    for entry in parsed if isinstance(parsed, list) else [parsed]:
        groups = entry.get("groups") if lists and isinstance(entry, dict) else None
        for group in groups if isinstance(groups, list) else ():
            number = group.get("ranks") if isinstance(group, dict) else None
            if isinstance(number, int) and 0 < -number <= len(lists):  # the place of a list has its number below zero
                group["ranks"] = lists[-number - 1]
    return parsed


@lru_cache(maxsize=MOST_LISTS)
def _members(numbers: bytes) -> Optional[Tuple[int, ...]]:
    """Return the numbers of a list, or None if it is damaged or has anything else in it."""
    try:
        parsed = parse_json(b"[%s]" % numbers)
    except ValueError:
        return None
    sound = set(map(type, parsed)) == {int} and min(parsed) >= 0 and max(parsed) < 2**63
    return tuple(parsed) if sound else None
