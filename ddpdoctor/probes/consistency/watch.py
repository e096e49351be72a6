"""Ends a trial in which a rank fails or stops progressing: all ranks exit with one status and say where each was.

Keys in the store: ``trouble/RANK`` says why a rank failed, ``place/RANK`` where a rank was.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.words import rank_list
from ddpdoctor.probes.ranks import LEAVE_LIMIT_S, Ended
from ddpdoctor.probes.user_code import is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from ddpdoctor.probes.ranks import Ranks

Kind = TypeVar("Kind")
LOOK_EVERY_S = 0.25
ALIKE_LIMIT_S = 1.0
"""Our choice: how long rank 0 waits for other ranks with the same failure. If all ranks have it, no rank is named."""
PLACES_LIMIT_S = 3.0
"""Our choice: how long rank 0 waits for the others to say where they are. Some may be gone."""
STATUS_LIMIT_S = 15.0
"""Our choice: how long the others wait for rank 0's last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTrouble:
    """Why a trial cannot go on."""

    rank: int
    message: str
    help: str
    status: int
    still: bool = False
    """Nothing failed, but a rank made no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank was when the trial was ended."""

    rank: int
    phase: str
    line: str
    """The innermost line of the user's code, or "" if there is none."""
    waits: bool
    """The rank was inside torch, another installed package or ddpdoctor, not in the user's code."""


class TrialWatch:
    """A context manager. Its thread ends this rank if it makes no progress or if another rank fails."""

    def __init__(self, ranks: Ranks, show_error: Callable[[UserError], None]) -> None:
        """``show_error`` shows an error to the user."""
        self._conversation, self._show = ranks.conversation, show_error
        self._rank, self._size = ranks.rank, ranks.world_size
        self._phase, self._since, self._limit_s, self._times = "its start", time.monotonic(), 0.0, 1
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=2 * STATUS_LIMIT_S)

    def limit(self, limit_s: float) -> None:
        """Set how long one phase may take."""
        self._limit_s = limit_s

    def mark(self, phase: str, *, times: int = 1) -> None:
        """Start a new phase, which may take ``times`` as long as usual."""
        self._phase, self._times, self._since = phase, times, time.monotonic()

    def fail(self, error: UserError) -> None:
        """End all ranks because of an error here, unless another rank failed first. Does not return."""
        self._raise(TrialTrouble(rank=self._rank, message=error.message, help=error.help, status=error.status))
        self._thread.join(timeout=2 * STATUS_LIMIT_S)
        os._exit(error.status)

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            try:
                if self._conversation.news().alarm:
                    self._end()
            except StoreError:
                return  # the main thread will notice by itself
            if self._limit_s and time.monotonic() - self._since > self._times * self._limit_s:
                self._raise(_standstill(self._rank, self._limit_s))

    def _raise(self, trouble: TrialTrouble) -> None:
        with suppress(StoreError):
            self._conversation.send(f"trouble/{self._rank}", trouble)
            self._conversation.raise_alarm(trouble)

    def _end(self) -> None:
        trouble = self._conversation.alarm(TrialTrouble)
        if trouble.still:
            self._conversation.send(f"place/{self._rank}", self._place())
        if self._rank == 0:
            self._show_trouble(trouble)
        else:
            with suppress(StoreError):
                self._conversation.hear_goodbye(Ended, STATUS_LIMIT_S)
        sys.stderr.flush()
        os._exit(trouble.status)

    def _show_trouble(self, trouble: TrialTrouble) -> None:
        """On rank 0: show the trouble to the user, then send the others the status."""
        if trouble.still:
            places = self._gather(RankPlace, "place", PLACES_LIMIT_S)
            said = "; ".join([trouble.message, *describe_places(places, self._size)])
        else:
            alike = [
                one.rank
                for one in self._gather(TrialTrouble, "trouble", ALIKE_LIMIT_S)
                if one.message == trouble.message
            ]
            said = trouble.message if len(alike) == self._size else f"{rank_list(alike)}: {trouble.message}"
        self._show(UserError(said, help=trouble.help))
        self._conversation.say_goodbye(Ended(status=int(trouble.status)), lambda: self._size - 1, LEAVE_LIMIT_S)

    def _gather(self, kind: type[Kind], name: str, limit_s: float) -> list[Kind]:
        """Return what the ranks sent within the limit, in rank order."""
        found = self._conversation.gather(kind, name, lambda: range(self._size), limit_s)
        return [found[rank] for rank in sorted(found)]

    def _place(self) -> RankPlace:
        frames = list(_frames(sys._current_frames().get(self._main)))  # noqa: SLF001 - the documented way to a stack
        own = next((f"{file}:{line} in {name}" for file, line, name in frames if not is_installed(file)), "")
        waits = bool(frames) and is_installed(frames[0][0])
        return RankPlace(rank=self._rank, phase=self._phase, line=own, waits=waits)


def describe_places(places: Iterable[RankPlace], size: int) -> list[str]:
    """Return where the ranks were, grouped by place, and which ranks did not answer."""
    found: dict[str, list[int]] = {}
    for one in places:
        place = f"in {one.phase}" + (f", at {one.line}" if one.line else "")
        found.setdefault(place, []).append(one.rank)
    said = [f"{rank_list(ranks)} {place}" for place, ranks in found.items()]
    silent = set(range(size)) - {rank for ranks in found.values() for rank in ranks}
    return said + ([f"no message came from {rank_list(silent)}"] if found and silent else [])


def _standstill(rank: int, limit_s: float) -> TrialTrouble:
    return TrialTrouble(
        rank=rank,
        message=f"the ranks made no progress for {limit_s:g} s",
        help="Run the script under `ddpdoctor wrap`, which names the rank at fault. --timeout gives ranks more time.",
        status=ExitStatus.INCONCLUSIVE,
        still=True,
    )


def _frames(frame: Any) -> Iterable[tuple[str, int, str]]:
    """Yield the frames of a thread, the innermost first."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
