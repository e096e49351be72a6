"""Combines what watch.json, a rank's notes and its evidence say about why it is stuck or died."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpdoctor.collect.process.causes import ended_child
from ddpdoctor.collect.process.lock_files import lock_of
from ddpdoctor.collect.recorded import read_or_none, read_record
from ddpdoctor.model.causes import AtError, LostChild, ProcessCauses, StoreSought

MOST_CHILDREN = 16
"""How many of a rank's last ended children we keep: a DataLoader without persistent workers ends some each epoch."""


def read_process_causes(
    seen: ProcessCauses | None, notes: list[dict[str, Any]], evidence: dict[str, Any]
) -> ProcessCauses | None:  # fmt: skip
    """Return all known causes for one rank, or None if there are none; ``seen`` is what the watcher saw."""
    reaped = _reaped(notes)
    at_error = _at_error(notes)
    path = lock_of(evidence)[0]
    store = _store(evidence.get("store"))
    if seen is None and not reaped and at_error is None and not path and store is None:
        return None
    seen = seen or ProcessCauses()
    ended = {child.pid: child for child in (*seen.lost_children, *reaped)}
    return replace(
        seen,
        lost_children=tuple(ended.values())[-MOST_CHILDREN:],
        lock_path=path,
        store=store,
        at_error=at_error,
    )


def _store(entry: Any) -> StoreSought | None:
    """Return the store that a rank's recorder says it is connecting to."""
    known = isinstance(entry, dict) and isinstance(entry.get("port"), int) and isinstance(entry.get("rank"), int)
    return read_record(StoreSought, entry, given=entry.get("given") or None) if known else None


def _reaped(notes: list[dict[str, Any]]) -> list[LostChild]:
    """Return the multiprocessing children that the rank has waited for; a negative code is a signal."""
    ends = [note for note in notes if note.get("k") == "child_end" and isinstance(note.get("code"), int)]
    return [ended_child(int(note["pid"]), note["code"], reaped=True) for note in ends]


def _at_error(notes: list[dict[str, Any]]) -> AtError | None:
    """Return how much memory the rank had left at its last exception, if that was about memory."""
    noted = next((n.get("memory") for n in reversed(notes) if n.get("k") == "raised" and n.get("memory")), None)
    return read_or_none(AtError, noted)
