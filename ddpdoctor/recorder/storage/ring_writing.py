"""Writes one ring file (see ``ring_layout``) from inside the user's process."""

from __future__ import annotations

import _thread
import itertools
import os
import time
from _json import encode_basestring_ascii as _quote

from . import ring_layout
from .files import map_file, open_plain
from .ring_layout import KeptSteps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Optional

# Interned strings and sites that a ring keeps in memory. The limit is for scripts that make code at run time.
MAX_INTERNED = 8192
# The end of the journal, at most half of it, is reserved for entries that a verdict needs. Our choice: room for eight
# exceptions of the greatest length, and for the end of a process.
VITAL_BYTES = 96 * 1024
_CLAIMED = ring_layout.CELL_OFFSETS["slots_claimed"]
_DONE = ring_layout.CELL_OFFSETS["calls_done"]
_STEPS = ring_layout.CELL_OFFSETS["steps_recorded"]
_FETCHES = ring_layout.CELL_OFFSETS["fetches"]
_WAIT_SINCE = ring_layout.CELL_OFFSETS["wait_since_ns"]
_SAMPLE = ring_layout.CELL_OFFSETS["sample_bits"]
_SLOT_SIZE = ring_layout.SLOT_SIZE
_TOTAL_WORDS = ring_layout.TOTAL.size // 4
_LAST_BIN = ring_layout.BINS - 1
_pack_slot = ring_layout.SLOT.pack_into
_pack_step = ring_layout.STEP.pack
_NOTHING_INSIDE = (0,) * len(ring_layout.STEP_INSIDE)
_pack_cell = ring_layout.CELL.pack_into
_pack_two_cells = ring_layout.TWO_CELLS.pack_into
_pack_four_cells = ring_layout.FOUR_CELLS.pack_into
_unpack_cell = ring_layout.CELL.unpack_from
_now_ns = time.monotonic_ns


class Ring:
    """A ring that this process writes. No method waits for a lock. Raises OSError if not all of it fits."""

    def __init__(self, folder: str, role: int, shape: ring_layout.RingShape, pid: int, start_ticks: int) -> None:
        self.path = os.path.join(folder, "%d-%d.ring" % (pid, start_ticks))
        self._map = allocate(self.path, shape.total_bytes)
        self._shape = shape
        self.line_capacity = shape.lines  # number of entries in the line table
        self._slots_at = shape.slots_at
        self._slots = shape.slots
        self._used = 0
        self._space = shape.journal_bytes - min(VITAL_BYTES, shape.journal_bytes // 2)
        self._lock = _thread.allocate_lock()
        self._unwritten: Any = []  # lines for the journal, and whether they are vital
        self._ids: Dict[Any, int] = {}
        # Kinds of calls, managed by ``records``. They are kept here because they hold ids of this ring's strings.
        self.kinds: Dict[Any, Any] = {}
        self._indexes = itertools.count(1)
        self._done = itertools.count(1)
        self._numbers = itertools.count(1)
        self._kept = KeptSteps()
        self._sums = [0] * len(ring_layout.PARTS)
        self._bins: Any = None
        ring_layout.IDENTITY.pack_into(
            self._map, 0, ring_layout.MAGIC, ring_layout.VERSION, role, ring_layout.HEADER_SIZE, shape.journal_bytes,
            self._slots_at, ring_layout.SLOT_SIZE, shape.slots, pid, start_ticks, shape.steps, shape.lines,
            shape.kept,
        )  # fmt: skip
        self.set("started_ns", time.monotonic_ns())
        self.set("started_wall_ns", time.time_ns())

    def set(self, cell: str, value: int) -> None:
        ring_layout.CELL.pack_into(self._map, ring_layout.CELL_OFFSETS[cell], value)

    def get(self, cell: str) -> int:
        return int(ring_layout.CELL.unpack_from(self._map, ring_layout.CELL_OFFSETS[cell])[0])

    def note(self, entry: Dict[str, Any], vital: bool = False) -> bool:
        """Append a line to the journal. Return False if it is full."""
        # No thread waits for another: what comes while one writes is left to that one, which looks again before it
        # goes. The reserved end is only for ``vital`` entries. A process must make few of those.
        text = to_json(entry).encode("ascii") + b"\n"
        if self._used + len(text) > (self._shape.journal_bytes if vital else self._space):
            return self._drop()
        self._unwritten.append((text, vital))
        while self._unwritten and self._lock.acquire(False):
            try:
                while self._unwritten:
                    next_text, next_vital = self._unwritten.pop(0)
                    end = self._used + len(next_text)
                    if end <= (self._shape.journal_bytes if next_vital else self._space):
                        self._map[ring_layout.HEADER_SIZE + self._used : ring_layout.HEADER_SIZE + end] = next_text
                        self._used = end
                        self.set("journal_used", end)
                    else:
                        self._drop()
            finally:
                self._lock.release()
        return True

    def intern(self, text: str) -> int:
        """Return the number of a string; 0 for the empty string, or if the table is full."""
        return (self._ids.get(text) or self._remember(text, "s", {"v": text})) if text else 0

    def intern_site(self, key: Any, site: Dict[str, Any]) -> int:
        return self._remember(key, "c", site)

    def known_site(self, key: Any) -> Optional[int]:
        return self._ids.get(key)

    def begin(self, kind: bytes, seq: int = ring_layout.NO_SEQ, began_ns: int = 0, waits: bool = False) -> int:
        """Record a call at ``began_ns`` or now; return its index. With ``waits`` the main thread begins to wait."""
        index = next(self._indexes)
        try:
            began = began_ns or _now_ns()
            _pack_slot(self._map, self._slots_at + (index - 1) % self._slots * _SLOT_SIZE, index, began, 0, seq, kind)
            if waits:
                _pack_two_cells(self._map, _CLAIMED, index, began)
            else:
                _pack_cell(self._map, _CLAIMED, index)
        except BaseException:  # a signal handler has raised, and the caller learns no index that it could end
            self.end(index, ring_layout.FLAG_FAILED, waited=waits)
            raise
        return index

    def end(self, index: int, extra_flags: int = 0, ended_ns: int = 0, waited: bool = False) -> None:
        """Complete a record at ``ended_ns`` or now, unless it has been overwritten. ``waited`` ends the wait."""
        at = self._slots_at + (index - 1) % self._slots * _SLOT_SIZE
        if _unpack_cell(self._map, at)[0] == index:
            _pack_cell(self._map, at + ring_layout.SLOT_ENDED_OFFSET, ended_ns or _now_ns())
            if extra_flags:
                self._add_flags(at, extra_flags)
            if waited:
                _pack_two_cells(self._map, _WAIT_SINCE, 0, next(self._done))
            else:
                _pack_cell(self._map, _DONE, next(self._done))
        elif waited:
            _pack_cell(self._map, _WAIT_SINCE, 0)

    def returned(self, index: int) -> None:
        """Mark a call as asynchronous: it has returned but not ended."""
        at = self._slots_at + (index - 1) % self._slots * _SLOT_SIZE
        if _unpack_cell(self._map, at)[0] == index:
            self._add_flags(at, ring_layout.FLAG_ASYNC)

    def _add_flags(self, at: int, flags: int) -> None:
        old = ring_layout.FLAGS.unpack_from(self._map, at + ring_layout.SLOT_FLAGS_OFFSET)[0]
        ring_layout.FLAGS.pack_into(self._map, at + ring_layout.SLOT_FLAGS_OFFSET, old | flags)

    def waits(self, since_ns: int) -> None:
        _pack_cell(self._map, _WAIT_SINCE, since_ns)

    def step(
        self, number: int, ended_ns: int, group: int, flags: int, phases_us: Any, waits_us: Any,
        inside: Any = _NOTHING_INSIDE,
    ) -> None:  # fmt: skip
        """Record a training step that has ended: ``ring_layout.STEP``. All but the first two must fit into 32 bits."""
        shape = self._shape
        if not shape.steps:
            return
        size = ring_layout.STEP_SIZE
        row = _pack_step(number, ended_ns, group, flags, *phases_us, *waits_us, *inside)
        at = shape.steps_at + (number - 1) % shape.steps * size
        self._map[at : at + size] = row
        _pack_cell(self._map, _STEPS, number)
        if shape.kept:
            if number == 1 or self._bins is None:  # a ring that replaces another begins later
                # Steps are numbered anew when a better mark of their ends appears.
                self._kept = KeptSteps()
                self._sums = [0] * len(ring_layout.PARTS)
                self._map[shape.kept_at : shape.total_bytes] = bytes(shape.total_bytes - shape.kept_at)
                self._bins = memoryview(self._map)[shape.totals_at : shape.total_bytes].cast("I")
            bins = self._bins
            at = 0
            for i, part in enumerate(ring_layout.parts_of(phases_us, waits_us, inside, flags)):
                total = self._sums[i] = self._sums[i] + part
                bins[at] = total & 0xFFFFFFFF
                bins[at + 1] = total >> 32
                bins[at + 2 + min(part.bit_length(), _LAST_BIN)] += 1
                at += _TOTAL_WORDS
            for place in self._kept.places(number, sum(phases_us)):
                at = shape.kept_at + place * size
                self._map[at : at + size] = row
            _pack_cell(self._map, _SAMPLE, self._kept.bits)

    def fetched(self, count: int, busy_ns: int, pauses_ns: int, cpu_ns: int = 0) -> None:
        _pack_four_cells(self._map, _FETCHES, count, busy_ns, pauses_ns, cpu_ns)

    def line(self, entry: int, site: int, phase: int, count: int) -> None:
        """Write one entry of the line table. Only the sampler calls this."""
        ring_layout.LINE.pack_into(self._map, self._shape.lines_at + entry * ring_layout.LINE_SIZE, site, phase, count)

    def place(self, file: str, line: int, function: str) -> None:
        """Write the current user line. Only the sampler calls this."""
        text = ("%d\0%s\0%s" % (line, function, file)).encode("utf-8", "replace")[: ring_layout.PLACE_MAX - 64]
        stamp = ring_layout.PLACE_HEAD.unpack_from(self._map, ring_layout.PLACE_OFFSET)[0]
        ring_layout.PLACE_HEAD.pack_into(self._map, ring_layout.PLACE_OFFSET, stamp + 1, len(text))
        start = ring_layout.PLACE_OFFSET + ring_layout.PLACE_HEAD.size
        self._map[start : start + len(text)] = text
        ring_layout.PLACE_HEAD.pack_into(self._map, ring_layout.PLACE_OFFSET, stamp + 2, len(text))

    def remove(self) -> None:
        os.unlink(self.path)

    def _drop(self) -> bool:
        self.set("dropped", self.get("dropped") + 1)
        return False

    def _remember(self, key: Any, kind: str, entry: Dict[str, Any]) -> int:
        if len(self._ids) >= MAX_INTERNED or self._used + len(str(entry)) > self._space:
            self._drop()
            return 0
        number = next(self._numbers)
        entry = dict(entry)
        entry[kind] = number
        if not self.note(entry):
            return 0
        self._ids[key] = number
        return number


def allocate(path: str, size: int) -> Any:
    """Make a private file with all its blocks: else SIGBUS on a full disk. One from before an exec is used again."""
    fd = open_plain(path, os.O_CREAT | os.O_RDWR)
    try:
        if os.fstat(fd).st_size == size:
            emptied = map_file(fd, size)
            emptied[:] = bytes(size)
            return emptied
        if os.fstat(fd).st_size:  # another size: make a new file, because others may have the old one mapped
            os.close(fd)
            os.unlink(path)
            fd = open_plain(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        os.posix_fallocate(fd, 0, size)
        return map_file(fd, size)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


_WORDS = {None: "null", True: "true", False: "false"}


def to_json(value: Any) -> str:
    """Return ASCII JSON without spaces. Floats that are not finite become null. Raises TypeError for other types."""
    if isinstance(value, str):
        return _quote(value)
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else "null"
    if isinstance(value, dict):
        return "{%s}" % ",".join(["%s:%s" % (_quote(str(key)), to_json(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return "[%s]" % ",".join([to_json(item) for item in value])
    raise TypeError("%s is nothing that JSON has" % type(value).__name__)
