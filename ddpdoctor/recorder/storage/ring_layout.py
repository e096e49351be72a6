"""The layout of a ring file, version 3: what a process writes about itself. ``ring_reading`` reads it back.

A ring outlives the process that writes it, however the process dies. It has five parts:

``header``
    identity, then cells (unsigned 64-bit) with the current progress of the process,
    then the last user line, as text under a sequence lock.
``journal``
    lines of JSON that are never overwritten: interned strings, call sites, notes. When it is full,
    later lines are dropped and counted.
``slots``
    fixed-size records of calls, written before the call and completed after it; the oldest are overwritten.
``steps``
    fixed-size records of training steps that have ended: how long each phase took, and how much of it was waiting.
    The oldest are overwritten.
``lines``
    a table of the user's lines at which the main thread was sampled, and how often, by phase of the step.

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds.
Version history: 1, the first. 2, steps and lines. 3, the cells that each call writes are adjacent.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Tuple

MAGIC = b"DDPDOCR\n"
VERSION = 3
READ_VERSIONS = (2, VERSION)
HEADER_SIZE = 4096
IDENTITY = struct.Struct("<8sIIQQQQQQQQQ")
"""magic, version, role, journal offset and size, slots offset and size of one, their count, pid, start ticks, counts of
steps and lines."""

ROLE_RANK = 1
ROLE_CHILD = 2

CELLS_OFFSET = 128
CELL = struct.Struct("<Q")
TWO_CELLS = struct.Struct("<QQ")
THREE_CELLS = struct.Struct("<QQQ")
CELL_NAMES = (
    "journal_used",
    "slots_claimed",
    "wait_since_ns",
    "calls_done",
    "steps",
    "batches",
    "epochs",
    "heartbeat_ns",
    "function_changes",
    "new_functions",
    "main_ended_ns",
    "dropped",
    "started_ns",
    "started_wall_ns",
    "exited_ns",
    "initialized",
    "steps_recorded",
    "dumps_on_signal",
    "fetches",
    "fetching_ns",
    "fetch_pauses_ns",
)
"""New cells are added at the end. In older rings they read as 0."""
CELL_NAMES_OF_VERSION_2 = (*CELL_NAMES[:2], *CELL_NAMES[3:11], "wait_since_ns", *CELL_NAMES[11:])
CELL_OFFSETS = {name: CELLS_OFFSET + 8 * i for i, name in enumerate(CELL_NAMES)}

PLACE_OFFSET = 1024
PLACE_HEAD = struct.Struct("<II")
PLACE_MAX = 2048

KIND = struct.Struct("<IIIIIIiiII6q")
"""What calls of one kind share: op, api, group, site, redop, dtype, peer, tensors, flags, ndim, dims."""
KIND_OFFSET = 32
SLOT = struct.Struct("<QQQq%ds" % KIND.size)
"""index, started, ended, seq, kind."""
SLOT_SIZE = 128
SLOT_ENDED_OFFSET = 16
SLOT_FLAGS_OFFSET = 64
FLAGS = struct.Struct("<I")
MAX_DIMS = 6
NO_PEER = -1
NO_SEQ = -1


def pack_kind(
    op: int, api: int, group: int, site: int, redop: int, dtype: int, peer: int, tensors: int, flags: int, dims: Any
) -> bytes:
    """Pack what calls of one kind share. All numbers except ``peer``, ``tensors`` and ``flags`` are interned ids."""
    sizes = (*dims[:MAX_DIMS], *(0,) * (MAX_DIMS - len(dims)))
    return KIND.pack(op, api, group, site, redop, dtype, peer, tensors, flags, len(dims), *sizes)


FLAG_ASYNC = 1
FLAG_FAILED = 2
FLAG_MAIN = 4
FLAG_P2P = 8

STEP = struct.Struct("<QQII8I")
"""number from 1, ended_ns, group, flags, then in microseconds the four phases and the wait in each of them."""
STEP_SIZE = STEP.size
STEP_COLLECTIVE, STEP_BACKWARD, STEP_REDUCED, STEP_OPTIMIZER = range(4)
"""The event that ended the step, in the lowest bits of its flags. Step numbers restart when a higher kind appears."""
STEP_KIND = 3
STEP_WAIT_UNKNOWN = 4
"""Flag: the wait for other ranks in backward could not be measured."""

BEFORE, FORWARD, BETWEEN, BACKWARD = range(4)
"""The phases of a step: from the previous step to forward, forward, from there to backward, backward with reduction."""

LINE = struct.Struct("<III")
"""site, phase, number of samples outside calls that need other ranks. Site 0 marks an unused entry."""
LINE_SIZE = 12

CONTROL_SIZE = 4096
CONTROL_REQUEST = 0
"""Offset of the number of the latest request for evidence. The watcher writes it."""
CONTROL_CLOSING = 8
"""Offset of the time at which the launcher began to stop its ranks. The launcher writes it."""
CONTROL_ACK = 16
"""Offset of the time at which the watcher had its evidence. The watcher writes it."""
CONTROL_STOPPING = 24
"""Offset of the time at which the watcher began to stop the job, 0 before that. The watcher writes it."""


class RingShape:
    """The sizes of a ring's parts, and the offset of each."""

    __slots__ = ("journal_bytes", "lines", "lines_at", "slots", "slots_at", "steps", "steps_at", "total_bytes")

    def __init__(self, journal_bytes: int, slots: int, steps: int = 0, lines: int = 0) -> None:
        self.journal_bytes = journal_bytes
        self.slots = slots
        self.steps = steps
        self.lines = lines
        self.slots_at = HEADER_SIZE + journal_bytes
        self.steps_at = self.slots_at + slots * SLOT_SIZE
        self.lines_at = self.steps_at + steps * STEP_SIZE
        self.total_bytes = self.lines_at + lines * LINE_SIZE


RANK_SHAPE = RingShape(journal_bytes=512 * 1024, slots=4096, steps=256, lines=256)
CHILD_SHAPE = RingShape(journal_bytes=24 * 1024, slots=32, lines=32)


PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


def is_library_path(file: str, roots: Tuple[str, ...]) -> bool:
    """Return whether a source file belongs to Python or an installed package. ``roots`` are the standard library."""
    return file.startswith(("<frozen", *roots)) or any(part in file for part in PACKAGE_FOLDERS)
