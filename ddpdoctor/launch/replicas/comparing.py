"""Reads the fingerprints that the ranks write of their replicas, compares them, and saves the result."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import REPLICAS_NAME, attempt_name
from ddpdoctor.recorder.storage.files import remove

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ddpdoctor.collect.fingerprint_compare import Comparer
    from ddpdoctor.collect.fingerprint_files import Writer
    from ddpdoctor.launch.replicas.shared import SharedReplicas
    from ddpdoctor.launch.watching.progress import Followed
    from ddpdoctor.model.consistency import Consistency

SAVE_EVERY_S = 5.0
"""Our choice: how often the results so far are written for `ddpdoctor status`, if there are new ones."""


class LiveComparison:
    """Compares the replicas of each attempt of a job, one attempt after another.

    The comparing code is imported after the launcher has started, so that no rank waits for it.
    """

    def __init__(
        self, folder: Path, check_every: int, allowed: tuple[str, ...], shared: SharedReplicas | None = None
    ) -> None:
        """Take the recorders' folder and what is shared with other nodes. With ``check_every`` 0, comparing is off."""
        self.has_news = False
        """Whether a difference was found that has not been reported yet."""
        self.failure: Exception | None = None
        """The error that ended the comparing."""
        self._folder = folder
        self._check_every = check_every
        self._allowed = allowed
        self._shared = shared
        self._attempt = -1
        self._comparer: Comparer | None = None
        self._is_off = check_every == 0
        self._saved: Consistency | None = None
        """What was saved last of this attempt."""
        self._next_save_s = 0.0

    def follow(self, attempt: int, ranks: Iterable[Followed], meeting: int | None = None) -> None:
        """Compare what the processes of an attempt have written since the last call.

        ``meeting`` is the number that all nodes use for this attempt, or None if only this node's own number exists.
        """
        with self._wall():
            if attempt != self._attempt:
                self._supersede()
                self._attempt = attempt
            if self._comparer is None and not self._is_off:
                self._comparer = self._begin(attempt if meeting is None else meeting)
            if self._comparer is not None:
                self.has_news |= self._comparer.compare(map(_writer, ranks))
            if self._comparer is not None and self._shared is not None:
                self.has_news |= self._shared.follow(self._comparer)
            self._save_news(time.monotonic())

    def save(self) -> None:
        """Save the results so far."""
        with self._wall():
            if self._comparer is not None:
                self._write(self._comparer.consistency(), None)

    def _save_news(self, now_s: float) -> None:
        """Save the results so far if it is time and there are new ones.

        They have a file of their own: if the watcher is killed, a report must not take them for all there is.
        """
        if self._comparer is None or now_s < self._next_save_s:
            return
        from ddpdoctor.collect.run.evidence import save

        self._next_save_s = now_s + SAVE_EVERY_S
        found = self._comparer.consistency()
        joint = self._shared.results() if self._shared is not None else ()
        found = replace(found, streams=(*joint, *(one for one in found.streams if one.compared)))
        if found.streams and found != self._saved:
            with contextlib.suppress(OSError):  # a full disk costs the news and nothing else
                save(self._folder / REPLICAS_NAME, found)
                self._saved = found

    def close(self) -> None:
        """Compare the rest after the job has ended, save the results, and remove the ranks' files."""
        with self._wall():
            self._end(None)

    def _begin(self, meeting: int) -> Comparer:
        from ddpdoctor.collect.fingerprint_compare import Comparer

        index = self._shared.begin(meeting) if self._shared is not None else None
        return Comparer(self._folder / "prints", check_every=self._check_every, allowed=self._allowed, index=index)

    def _supersede(self) -> None:
        """Save the results of an attempt that the launcher gave up on. Drop those from before the first attempt."""
        from ddpdoctor.collect.fingerprint_nodes import COMPARISON, JOINT, POINTS

        if self._attempt >= 0:
            self._end(self._attempt)
        self._comparer = self._saved = None
        for name in (*map(attempt_name, (COMPARISON, POINTS, JOINT)), REPLICAS_NAME):
            remove(self._folder / name)

    def _end(self, attempt: int | None) -> None:
        comparer, self._comparer = self._comparer, None
        if comparer is not None and self._write(comparer.close(), attempt):
            comparer.remove_files()

    def _write(self, found: Consistency, attempt: int | None) -> bool:
        """Save the results completely or not at all; return False on a full disk, where the ranks' files then stay."""
        from ddpdoctor.collect.fingerprint_nodes import COMPARISON
        from ddpdoctor.collect.run.evidence import save

        try:
            save(self._folder / attempt_name(COMPARISON, attempt), found)
            if self._shared is not None:
                self._shared.save(self._folder, attempt)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _wall(self) -> Iterator[None]:
        try:
            with self._shared.lock if self._shared is not None else contextlib.nullcontext():
                yield
        except Exception as error:  # noqa: BLE001 - the wall around a collector: watching continues without it
            self.failure, self._comparer, self._is_off = error, None, True


def _writer(process: Followed) -> Writer:
    from ddpdoctor.collect.fingerprint_files import Writer

    return Writer(
        pid=process.pid,
        ticks=process.ticks,
        began_ns=process.cells.get("started_ns", 0),
        ended_ns=process.ended_ns,
    )
