"""Which optimizer steps are fingerprinted, the same ones on all ranks without a message, and into which files.

With a fixed distance these are steps 1, 2, 4 and so on below it, then its multiples. ``auto`` takes 1, 2, 4 to 32, then
a distance at which comparing costs at most ``SHARE`` of the time. In each block of steps (1, 2-3, 4-7, from 1024 on
of 1024) a rank writes its wish for the next into a page of this host; then each takes the largest. Ranks that reduce
together are at most one step apart, so all wishes are there. Powers of two have the largest's steps in common.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Any, Dict, List, Optional

from .settings import read_settings
from .state import check_every, here
from .storage import fingerprint_file
from .storage.files import map_file
from .storage.fingerprint_file import MAX_BYTES as MAX_FILE_BYTES
from .storage.fingerprint_file import MAX_SLOTS, MIN_SLOTS, FingerprintWriter

# The part of the time that comparing may take by our count, so that it takes less than 1 %: with Gloo on 2 cores, steps
# got longer by 1.5 times the count, because ranks wait for each other (``python -m tests.bench.check_every``).
SHARE = 0.005
# What comparing may take even if that is more. Our choice: jobs of less than 50 s are compared a few times more.
ALLOWANCE_S = 0.25
# The smallest distance of ``auto``. Until this step of an optimizer, powers of two are taken whatever that costs: most
# faults are there from the first steps on, and some rules need several comparisons.
LEAST = 32
LONGEST_BLOCK = 1024
_NEVER = 62  # the exponent of a distance that no job reaches
_RANKS = 1 << 15


class Wishes:
    """The page of this host's ranks: for even and for odd blocks a byte a rank, which is 1 + the wished exponent."""

    def __init__(self, path: str, rank: int) -> None:
        self._rank = rank % _RANKS
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(number, 2 * _RANKS)
            self._page = map_file(number, 2 * _RANKS)
        finally:
            os.close(number)

    def write(self, is_odd: bool, exponent: int) -> None:
        self._page[is_odd * _RANKS + self._rank] = exponent + 1

    def largest(self, is_odd: bool) -> int:
        return int(max(self._page[is_odd * _RANKS : (is_odd + 1) * _RANKS])) - 1


class AutoDistance:
    """Chooses the distance of each block from the cost of comparisons and the time of steps, of all optimizers."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self.exponent = 1  # numbers after ``LEAST`` are due if they are multiples of 2**exponent
        self._next_block = 4
        self._is_odd = False
        self.steps = self.taken = 0
        self.spent_s = self._began_s = 0.0
        self._cost_s = 0.0  # of one comparison
        self._then = (0, 0.0, 0, 0.0)  # steps, time, comparisons and what they had cost when the last wish was written

    def step(self, now_s: float) -> None:
        """Note that a step begins. One step after the beginning of a block, a wish is written for the next block."""
        self.steps += 1
        if self.steps == 1:
            self._began_s = now_s
            self._then = (1, now_s, 0, 0.0)
        elif self.steps == self._next_block:
            self.exponent = self._wishes.largest(self._is_odd)
            self._is_odd = not self._is_odd
            self._next_block = block_after(self.steps)
        elif self.steps > 2 and block_after(self.steps - 2) == self.steps - 1:
            # As many comparisons are to be due in the next block as can be afforded by its end.
            steps, then_s, taken, spent_s = self._then
            step_s = max(now_s - then_s - (self.spent_s - spent_s), 0.0) / (self.steps - steps)
            if self.taken > taken:
                self._cost_s = (self.spent_s - spent_s) / (self.taken - taken)
            length = block_after(self._next_block) - self._next_block
            end_s = now_s - self._began_s + step_s * (self._next_block + length - self.steps)
            still_due = (self._next_block - 1 >> self.exponent) - (self.steps - 1 >> self.exponent)
            left_s = max(ALLOWANCE_S, SHARE * end_s) - self.spent_s - still_due * self._cost_s
            most = max(1, length // LEAST)
            count = most if most * self._cost_s <= left_s else int(left_s / self._cost_s)
            self._wishes.write(self._is_odd, (length // count - 1).bit_length() if count > 0 else _NEVER)
            self._then = (self.steps, now_s, self.taken, self.spent_s)


def next_due(number: int, every: int) -> int:
    """Return the first number after ``number`` that is due with a fixed distance."""
    power = 1 << number.bit_length()
    return power if power < every else (number // every + 1) * every


def block_after(number: int) -> int:
    return min(1 << number.bit_length(), (number // LONGEST_BLOCK + 1) * LONGEST_BLOCK)


@lru_cache(maxsize=1)
def chosen() -> Optional[AutoDistance]:
    """Return the distance that this process chooses, None if it is fixed."""
    rank = os.environ.get("RANK", "")
    if read_settings(os.environ).check_auto and here.ring is not None and rank.isdigit():
        path = os.path.join(here.folder, FOLDER, "steps-%s" % os.environ.get("MASTER_PORT", ""))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return AutoDistance(Wishes(path, int(rank)))
        except OSError as error:  # no space, or another host's file system: the fixed distance holds
            here.failed("distance of comparisons", error)
    return None


fixed = lru_cache(maxsize=1)(lambda: check_every() or 1)  # the distance where none is chosen


def is_between(last: int, number: int) -> bool:
    """Return whether any number after ``last`` up to ``number`` is due."""
    auto = chosen()
    if last < 0:
        return True
    if auto is None or not auto.steps:
        return number >= next_due(last, fixed())
    return number >= next_due(last, 2 * LEAST) if number <= LEAST else number >> auto.exponent > last >> auto.exponent


def distance() -> int:
    """Return the distance that ``auto`` has chosen for now, 0 if it is fixed or if nothing is due for now."""
    auto = chosen()
    return 0 if auto is None or not LEAST <= 1 << auto.exponent < 1 << _NEVER else 1 << auto.exponent


def spend(began_s: float) -> None:
    auto = chosen()
    if auto is not None:
        auto.spent_s += time.perf_counter() - began_s


os.register_at_fork(after_in_child=chosen.cache_clear)
os.register_at_fork(after_in_child=fixed.cache_clear)
FOLDER = "prints"
MAX_FILES = 128  # Per process. Our choice: enough for forty models that are trained one after another.
# Our choice: optimizer state appears with the first steps, and more with each part of a model that is unfrozen.
MAX_FILES_A_STREAM = 6
# All files of a process together. Our choice: with the ring, a rank's part of the run folder stays below 32 MiB.
MAX_ALL_BYTES = 24 * 2**20
_ring: Any = None
_files = _bytes = 0
_has_given_up = False


class FingerprintFiles:
    """The files of one stream. ``about`` is its table without rows."""

    def __init__(self, about: Dict[str, Any], most_records: int = MAX_SLOTS) -> None:
        self._about, self._most_records = about, most_records
        self._rows = self._made = 0  # a hash of the rows, which would take hundreds of KiB; how many files there are
        self._writer: Optional[FingerprintWriter] = None

    def write(self, number: int, text: Dict[str, Any], rows: List[Any], fingerprints: bytes) -> None:
        """Add a record. If the disk has no space for a file with these rows, nothing is written."""
        global _ring, _files, _bytes, _has_given_up
        key = hash(tuple(rows))
        if self._writer is None or key != self._rows:
            self._rows, self._writer = key, None
            if _ring is not here.ring:  # a forked child starts at zero
                _ring, _files, _bytes, _has_given_up = here.ring, 0, 0, False
            space = MAX_ALL_BYTES - _bytes
            least = fingerprint_file.slot_size(len(rows)) * min(self._most_records, MIN_SLOTS)
            if _files >= MAX_FILES or self._made >= MAX_FILES_A_STREAM or least > space:
                _has_given_up = _has_given_up or here.note("prints_end", files=_files, bytes=_bytes)
                return
            folder, pid, table = os.path.join(here.folder, FOLDER), os.getpid(), dict(self._about, rows=rows)
            name, most_bytes = "%d-%d-%d.prints" % (pid, here.ticks, _files), min(space, MAX_FILE_BYTES)
            self._writer = FingerprintWriter(folder, name, table, pid, here.ticks, most_bytes, self._most_records)
            here.kept.append(self._writer)
            _files += 1
            self._made += 1
            _bytes += self._writer.total_bytes
        self._writer.write(number, text, fingerprints)
