"""Reads the comparison of a job's replicas that the watcher saved, or makes it from the ranks' files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.within_host import Comparer
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.model.consistency import Consistency
from ddpdoctor.model.run import attempt_name

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.collect.fingerprints.columns import Writer
    from ddpdoctor.model.run import Run


COMPARISON = "consistency"
"""Stem of the file with the comparison of this host's ranks."""


def read_consistency(folder: Path, run: Run, attempt: int | None, writers: Iterable[Writer]) -> Consistency | None:
    """Return the comparison, or None for a run of a version that had none.

    ``writers`` are the ranks' processes. If the watcher was killed, their files are compared now.
    """
    if run.check_every is None or run.check_every < 0:
        return None
    if run.check_every == 0:
        return Consistency(check_every=0)
    saved = load(Consistency, folder / attempt_name(COMPARISON, attempt))
    return saved if saved is not None else _compare(folder, run.check_every, run.allow_different, writers)


def _compare(folder: Path, every: int, patterns: tuple[str, ...], writers: Iterable[Writer]) -> Consistency:
    comparer = Comparer(folder / "prints", check_every=every, allowed=patterns)
    try:
        comparer.compare(writers)
        return comparer.close()
    except Exception as error:  # noqa: BLE001 - damaged files must not hide the other facts of the job
        return Consistency(check_every=every, unread=(f"what ranks wrote: {type(error).__name__}: {error}",))
