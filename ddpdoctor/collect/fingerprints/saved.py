"""Reads what was found of a job's replicas: as the watcher saved it, else from what ranks wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprints.within_host import Comparer
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.model.consistency import Consistency

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.collect.fingerprints.columns import Writer
    from ddpdoctor.model.run import Run


def file_name(attempt: int | None = None) -> str:
    """Return where the comparison of an attempt that was restarted is kept, and by default that of the last."""
    return "consistency.json" if attempt is None else f"consistency-{attempt}.json"


def read_consistency(folder: Path, run: Run, attempt: int | None, writers: Iterable[Writer]) -> Consistency | None:
    """Return what was found; None for a run that knew of no such comparison.

    ``writers`` are the ranks' processes: where the watcher was killed, their files are compared now.
    """
    if run.check_every is None or run.check_every < 0:
        return None
    if run.check_every == 0:
        return Consistency(check_every=0)
    saved = load(Consistency, folder / file_name(attempt))
    return saved if saved is not None else _compare(folder, run.check_every, run.allow_different, writers)


def _compare(folder: Path, every: int, patterns: tuple[str, ...], writers: Iterable[Writer]) -> Consistency:
    comparer = Comparer(folder / "prints", check_every=every, allowed=patterns)
    try:
        comparer.look(writers)
        return comparer.close()
    except Exception as error:  # noqa: BLE001 - the wall around a collector: all else of the job is still told
        return Consistency(check_every=every, unread=(f"what ranks wrote: {type(error).__name__}: {error}",))
