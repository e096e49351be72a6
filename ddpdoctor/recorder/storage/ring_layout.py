"""The layout of a ring file, version 4: what a process writes about itself. ``ring_reading`` reads it back.

A ring outlives the process that writes it, however the process dies. It has these parts:

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
``kept``
    records of steps of the whole run: an even sample of all steps, and the longest ones.
``totals``
    for each part of a step, its sum over the whole run and a histogram (see ``parts_of``).

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds.
Version history: 1, the first. 2, steps and lines. 3, the cells that each call writes are adjacent. 4, what else a step
consists of, kept steps and totals.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Tuple

MAGIC = b"DDPDOCR\n"
VERSION = 4
READ_VERSIONS = (2, 3, VERSION)
HEADER_SIZE = 4096
# magic, version, role, journal offset and size, slots offset, size, count, pid, ticks, counts of steps, lines and kept.
IDENTITY = struct.Struct("<8sIIQQQQQQQQQQ")
ROLE_RANK = 1
ROLE_CHILD = 2
CELLS_OFFSET = 128
CELL = struct.Struct("<Q")
TWO_CELLS = struct.Struct("<QQ")
FOUR_CELLS = struct.Struct("<QQQQ")
# New cells are added at the end. In older rings they read as 0.
CELL_NAMES = (
    "journal_used", "slots_claimed", "wait_since_ns", "calls_done", "steps", "batches", "epochs", "heartbeat_ns",
    "function_changes", "new_functions", "main_ended_ns", "dropped", "started_ns", "started_wall_ns", "exited_ns",
    "initialized", "steps_recorded", "dumps_on_signal", "fetches", "fetching_ns", "fetch_pauses_ns",
    "fetching_cpu_ns", "sample_bits", "main_cpu_ns", "run_delay_ns", "trained_ns", "loader_workers",
    "others_delay_ns", "saves", "saved_steps", "save_began_ns", "save_ended_ns", "own_limit_ns", "nonfinite",
    "handling_ns",
)  # fmt: skip
CELL_NAMES_OF_VERSION_2 = (*CELL_NAMES[:2], *CELL_NAMES[3:11], "wait_since_ns", *CELL_NAMES[11:])
CELL_OFFSETS = {name: CELLS_OFFSET + 8 * i for i, name in enumerate(CELL_NAMES)}
PLACE_OFFSET = 1024
PLACE_HEAD = struct.Struct("<II")
PLACE_MAX = 2048

# What calls of one kind share: op, api, group, site, redop, dtype, peer, tensors, flags, ndim, dims.
KIND = struct.Struct("<IIIIIIiiII6q")
KIND_OFFSET = 32
SLOT = struct.Struct("<QQQq%ds" % KIND.size)  # index, started, ended, seq, kind
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

# What else a step record holds, after its phases.
# ``data_us``: in a loader's ``__next__``. ``buffers_us``: DDP's broadcast of buffers. ``exposed_us``: from the end of
# backward's computation to its end, the reduction that nothing hides. ``optimizer_us``: optimizer steps without waits.
# ``own_us``: the recorder's own looks at replicas, which are in no phase. ``gc_us``: Python's garbage collector.
# ``cpu_*``: processor time of the main thread in each phase, and in ``__next__``. ``reductions``: of the model that
# reduced most often. ``backwards``: calls of backward. ``input_*``: of forward's first tensors, the first dimension and
# the number of elements, summed over the step.
STEP_INSIDE = (
    "data_us", "buffers_us", "exposed_us", "optimizer_us", "own_us", "gc_us", "cpu_before_us", "cpu_forward_us",
    "cpu_between_us", "cpu_backward_us", "data_cpu_us", "reductions", "backwards", "input_rows", "input_numel",
)  # fmt: skip
# number from 1, ended_ns, group, flags, then in microseconds the four phases and the wait in each of them, then
# ``STEP_INSIDE``.
STEP = struct.Struct("<QQII8I%dI" % len(STEP_INSIDE))
STEP_SIZE = STEP.size
OLD_STEP = struct.Struct("<QQII8I")  # the record of a step up to version 3
# The event that ended the step, in the lowest bits of its flags. Step numbers restart when a higher kind appears.
STEP_COLLECTIVE, STEP_BACKWARD, STEP_REDUCED, STEP_OPTIMIZER = range(4)
STEP_KIND = 3
STEP_WAIT_UNKNOWN = 4  # flag: the wait for other ranks in backward could not be measured
# The phases of a step: from the previous step to forward, forward, from there to backward, backward with reduction.
BEFORE, FORWARD, BETWEEN, BACKWARD = range(4)
# site, phase, number of samples outside calls that need other ranks. Site 0 marks an unused entry.
LINE = struct.Struct("<III")
CALLS_MODULE = 4  # added to the phase of a line that was not the innermost one, but called a module of torch
LINE_SIZE = 12

CONTROL_SIZE = 4096
CONTROL_REQUEST = 0  # Offset of the number of the latest request for evidence. The watcher writes it.
CONTROL_CLOSING = 8  # Offset of the time at which the launcher began to stop its ranks. The launcher writes it.
CONTROL_ACK = 16  # Offset of the time at which the watcher had its evidence. The watcher writes it.
# Offset of the time at which the watcher began to stop the job, 0 before that. The watcher writes it.
CONTROL_STOPPING = 24
# Offset of the time at which `ddpdoctor status --dump` last asked the watcher for evidence. That command writes it.
CONTROL_DUMP_ASKED = 32
CONTROL_DUMPED = 40  # Offset of the same number once that evidence is saved. The watcher writes it.

SAMPLED_STEPS = 256
LONGEST_STEPS = 64  # kept steps: first the sample, then the longest
# Bins of a histogram. A time falls into the bin of its number of bits in microseconds: bin 11 is 1.024 to 2.047 ms.
BINS = 32
TOTAL = struct.Struct("<Q%dI" % BINS)  # the sum of one part of a step over the run in microseconds, and its histogram
# The parts of a step that have totals, in this order. All but the last two add up to the last; ``gc`` is inside them.
# ``unsplit`` is backward where the recorder did not read how much of it was exposed.
PARTS = (
    "data", "host", "buffers", "forward", "loss", "backward", "unsplit", "exposed", "calls", "optimizer", "own",
    "gc", "wall",
)  # fmt: skip


class RingShape:
    """The sizes of a ring's parts, and the offset of each."""

    def __init__(
        self, journal_bytes: int, slots: int, steps: int = 0, lines: int = 0, kept: int = 0, step: int = STEP_SIZE
    ) -> None:
        self.journal_bytes, self.slots, self.steps, self.lines, self.kept = journal_bytes, slots, steps, lines, kept
        self.slots_at = HEADER_SIZE + journal_bytes
        self.steps_at = self.slots_at + slots * SLOT_SIZE
        self.lines_at = self.steps_at + steps * step
        self.kept_at = self.lines_at + lines * LINE_SIZE
        self.totals_at = self.kept_at + kept * step
        self.total_bytes = self.totals_at + (len(PARTS) * TOTAL.size if kept else 0)


RANK_SHAPE = RingShape(journal_bytes=512 * 1024, slots=4096, steps=256, lines=256, kept=SAMPLED_STEPS + LONGEST_STEPS)
CHILD_SHAPE = RingShape(journal_bytes=24 * 1024, slots=32, lines=32)
PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")


def is_library_path(file: str, roots: Tuple[str, ...]) -> bool:
    """Return whether a source file belongs to Python or an installed package. ``roots`` are the standard library."""
    return file.startswith(("<frozen", *roots)) or any(part in file for part in PACKAGE_FOLDERS)


_GOLDEN = 0x9E3779B1
_WORD = 0xFFFFFFFF


def is_sampled(number: int, bits: int) -> bool:
    """Return whether a step belongs to the sample of one step in ``2 ** bits``."""
    # Multiplicative hashing (Knuth, The Art of Computer Programming, 6.4) spreads the sample evenly, also over steps
    # that come back every N-th time, such as an evaluation. A sample of every 8th step might have all of them, or none.
    return not (number * _GOLDEN & _WORD) >> (32 - min(bits, 32))


class KeptSteps:
    """The places of the kept steps. A full sample is halved. All ranks number steps alike, so they keep the same."""

    __slots__ = ("_free", "_longest", "_numbers", "_shortest", "bits")

    def __init__(self) -> None:
        self.bits = 0  # the sample has one step in ``2 ** bits``
        self._numbers: List[int] = [0] * SAMPLED_STEPS
        self._free: List[int] = list(range(SAMPLED_STEPS))[::-1]
        self._longest: List[int] = []
        self._shortest = -1  # the shortest of the longest steps once their places are taken, else -1

    def places(self, number: int, wall_us: int) -> List[int]:
        """Return the places at which a step that took ``wall_us`` is to be written; mostly none."""
        found = []
        if is_sampled(number, self.bits):
            while not self._free:
                self.bits += 1
                self._free = [place for place, held in enumerate(self._numbers) if not is_sampled(held, self.bits)]
            if is_sampled(number, self.bits):
                place = self._free.pop()
                self._numbers[place] = number
                found.append(place)
        if wall_us > self._shortest:
            longest = self._longest
            if len(longest) < LONGEST_STEPS:
                longest.append(wall_us)
                place = len(longest) - 1
            else:
                place = longest.index(min(longest))  # a signal handler may have cut off the last call of this
                longest[place] = wall_us
            if len(longest) == LONGEST_STEPS:
                self._shortest = min(longest)
            found.append(SAMPLED_STEPS + place)
        return found


def parts_of(phases_us: Any, waits_us: Any, inside: Any, flags: int) -> List[int]:
    """Return the times of ``PARTS`` in microseconds. A part that is a difference of times is cut off at 0."""
    data, buffers, exposed, optimizer, own, gc = inside[:6]
    before = phases_us[BEFORE] - waits_us[BEFORE] - data - optimizer
    forward = phases_us[FORWARD] - waits_us[FORWARD]
    loss = phases_us[BETWEEN] - waits_us[BETWEEN]
    backward = phases_us[BACKWARD] - waits_us[BACKWARD]
    calls = sum(waits_us) - buffers - exposed
    split, unsplit = (0, backward) if flags & STEP_WAIT_UNKNOWN else (backward, 0)
    wall = sum(phases_us) + own
    parts = [data, before, buffers, forward, loss, split, unsplit, exposed, calls, optimizer, own, gc, wall]
    return [max(0, part) for part in parts]


# The phases of ``ring_layout``, and the optimizer's step, which is a part of "before" there.
DEVICE_PHASES = ("before", "forward", "between", "backward", "optimizer")
OPTIMIZER = 4
HOST_COLUMNS = ("number", "data_us", "data_cpu_us", "gc_us", "rows", "numel", "reductions", "backwards", "behind")
DEVICE_COLUMNS = (*HOST_COLUMNS, *("%s_%s_us" % (on, phase) for on in ("gpu", "host") for phase in DEVICE_PHASES))
