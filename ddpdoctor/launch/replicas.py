"""Follows what the ranks write of their replicas, compares it, and saves what was found."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

from ddpdoctor.collect.consistency import file_name
from ddpdoctor.collect.print_columns import Writer
from ddpdoctor.collect.prints import Comparer
from ddpdoctor.model.codec import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ddpdoctor.launch.progress import Followed
    from ddpdoctor.model.consistency import Consistency


class Replicas:
    """The comparison of each attempt of a job, one after another."""

    def __init__(self, folder: Path, check_every: int, allowed: tuple[str, ...]) -> None:
        """Take where the recorders write; nothing is done where ``check_every`` is 0."""
        self.has_news = False
        """Something was seen to differ, and nobody has been told yet."""
        self.failure: Exception | None = None
        """What went wrong with comparing, which ended it."""
        self._folder = folder
        self._check_every = check_every
        self._allowed = allowed
        self._attempt = -1
        self._comparer = self._begin()

    def follow(self, attempt: int, ranks: Iterable[Followed]) -> None:
        """Compare what the processes of an attempt have written since."""
        with self._wall():
            if attempt != self._attempt:
                self._end_attempt()
                self._attempt = attempt
            if self._comparer is not None:
                self.has_news |= self._comparer.look(map(_writer, ranks))

    def save(self) -> None:
        """Write down what was found so far."""
        with self._wall():
            if self._comparer is not None:
                self._write(self._comparer.consistency(), file_name())

    def close(self) -> None:
        """Compare the rest, now that the job has ended, save it, and remove the files of the ranks."""
        self._end(file_name())

    def _begin(self) -> Comparer | None:
        if self._check_every == 0:
            return None
        return Comparer(self._folder / "prints", check_every=self._check_every, allowed=self._allowed)

    def _end_attempt(self) -> None:
        self._end(file_name(self._attempt) if self._attempt >= 0 else None)
        self._comparer = self._begin() if self.failure is None else None

    def _end(self, name: str | None) -> None:
        with self._wall():
            if self._comparer is not None:
                found = self._comparer.close()
                if name is None or self._write(found, name):
                    self._comparer.remove_files()

    def _write(self, found: Consistency, name: str) -> bool:
        """Write what was found, whole or not at all; on a disk that is full, ranks' own files are what is left."""
        part = self._folder / f"{name}.part"
        try:
            part.write_text(json.dumps(encode(found)))
            part.replace(self._folder / name)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def _wall(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the wall around a collector: a job is watched on without it
            self.failure, self._comparer = error, None


def _writer(process: Followed) -> Writer:
    return Writer(
        pid=process.pid,
        ticks=process.ticks,
        began_ns=process.cells.get("started_ns", 0),
        ended_ns=process.ended_ns,
    )
