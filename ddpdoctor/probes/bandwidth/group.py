"""A process group of the bench that tracks every call, and what its watcher may read at any time: position, results."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Bench, Position
from ddpdoctor.model.errors import typed_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ddpdoctor.model.bandwidth import (
        Arrival,
        BenchSettings,
        LeftOut,
        Measurement,
        Member,
        NcclLog,
        NodeResult,
        Pair,
        Stop,
        Wrong,
    )

# Our choice: time before the process group exists, for importing torch and reading the machine. Both have their own
# time limits. On a cold network file system the import alone takes half a minute.
START_ALLOWANCE_S = 60.0
MAX_FRAMES = 60  # our choice: how many innermost frames of a stack are kept


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Some ranks of the job, including this one. Functions of ``dist`` are looked up at each call."""

    handle: Any  # a torch ProcessGroup, or None for all ranks
    ranks: tuple[int, ...]  # global ranks, in the order of the group
    device: torch.device
    backend: str
    tracker: Tracker

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This process's place in the group."""
        import torch.distributed as dist

        return self.ranks.index(dist.get_rank())

    def barrier(self) -> float:
        """Wait for all ranks, and return the seconds that this rank waited inside the barrier.

        Delays before the barrier do not count, so a rank that comes late waits for nobody.
        """
        import torch.distributed as dist

        self.tracker.enter("barrier", self.ranks)
        device_ids = [self.device.index] if self.backend == "nccl" else None
        work = dist.barrier(group=self.handle, async_op=True, device_ids=device_ids)
        arrived = time.perf_counter_ns()
        if work is not None:
            work.wait()
        self.settle()
        waited = time.perf_counter_ns() - arrived
        self.tracker.leave()
        return waited / 1e9

    def settle(self) -> None:
        """Wait until the device has finished its work, because NCCL's calls return before that."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.current_stream(self.device).synchronize()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks on every rank, one row per rank. All must give the same number of values."""
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        rows = [torch.empty_like(own) for _ in self.ranks]
        self.tracker.enter("all_gather", self.ranks)
        dist.all_gather(rows, own, group=self.handle)
        gathered: list[list[float]] = [row.tolist() for row in rows]
        self.tracker.leave()
        return gathered

    def agree(self, value: float) -> float:
        """Return the value of the group's first rank on every rank."""
        import torch
        import torch.distributed as dist

        agreed = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.tracker.enter("broadcast", self.ranks)
        dist.broadcast(agreed, src=self.ranks[0], group=self.handle)
        first = float(agreed.item())
        self.tracker.leave()
        return first


@dataclass(slots=True)
class Tracker:
    """Only the main thread writes, never inside a timed region. Writing a field is atomic, so there is no lock."""

    phase: str = "start"
    what: str = ""
    group: tuple[int, ...] = ()
    op: str = ""
    calls: int = 0  # Calls begun in ``group`` since the bench began. Ranks with the same number are in the same call.
    inside: bool = False
    # time.monotonic() when a call last completed or ``at`` was last called.
    moved_s: float = field(default_factory=time.monotonic)
    allowance_s: float = START_ALLOWANCE_S  # added to the hang timeout: how long the next call is expected to take
    _calls: dict[tuple[int, ...], int] = field(default_factory=dict)

    def at(self, phase: str, what: str = "", *, allowance_s: float = 0.0) -> None:
        """Record the next phase, and how long one call, batch or computation of it may take."""
        self.phase, self.what, self.allowance_s = phase, what, allowance_s
        self.moved_s = time.monotonic()

    def enter(self, op: str, group: tuple[int, ...]) -> None:
        """Record that a collective call, or a batch of one kind, is about to begin in the group of these ranks."""
        self.inside = False
        self.op, self.group = op, group
        self.calls = self._calls[group] = self._calls.get(group, 0) + 1
        self.inside = True

    def leave(self) -> None:
        """Record that the call completed here. Skip this for a call that raised: the watcher needs to know that."""
        self.inside = False
        self.moved_s = time.monotonic()


def take_position(
    rank: int, tracker: Tracker, error: BaseException | None, states: Mapping[int, str], ends: Mapping[int, str]
) -> Position:
    """Return where the main thread is now, and the states of the other processes on this host.

    With the error that ended the main thread, its stack is that of the error, from where it was caught.
    """
    if error is not None:
        frames = list(traceback.walk_tb(error.__traceback__))[-MAX_FRAMES:]
    else:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 - the documented way
        frames = list(islice(traceback.walk_stack(frame), MAX_FRAMES))[::-1] if frame is not None else []
    return Position(
        rank=rank,
        phase=tracker.phase,
        what=tracker.what,
        group=tracker.group,
        calls=tracker.calls,
        op=tracker.op,
        inside=tracker.inside,
        stale_s=max(0.0, time.monotonic() - tracker.moved_s),
        stack=tuple(f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames),
        error=None if error is None else typed_line(error),
        states={str(other): state for other, state in states.items()},
        ends={str(other): end for other, end in ends.items()},
    )


@dataclass(slots=True)
class ResultLog:
    """The results on one rank. All ranks keep them, because any rank may have to report. Unseen parts are empty.

    Each append or assignment is atomic, so a snapshot may lack the last change but is never corrupt.
    """

    settings: BenchSettings
    members: tuple[Member, ...]
    results: list[Measurement] = field(default_factory=list)
    wrong: list[Wrong] = field(default_factory=list)
    arrivals: tuple[Arrival, ...] = ()
    pairs: list[Pair] = field(default_factory=list)
    nodes: list[NodeResult] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    nccl_logs: tuple[NcclLog, ...] = ()
    notes: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, text: str) -> None:
        """Add a note for the reader about how it was measured. Equal notes are added once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def bench(self, stop: Stop | None = None) -> Bench:
        """Return the results so far. ``stop`` says how the bench ended if it did not finish."""
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "_lock"}
        parts |= {name: tuple(part) for name, part in parts.items() if isinstance(part, list)}
        return Bench(**parts, stop=stop)
