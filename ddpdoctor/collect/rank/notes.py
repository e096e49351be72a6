"""Reads what a rank noted: its models, errors of its reducer, bad gradients, and why it may be stuck or died."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ddpdoctor.collect.blocked import ended_child, lock_of
from ddpdoctor.collect.recorded import read_all, read_or_none, read_record
from ddpdoctor.model.consistency import NonFinite
from ddpdoctor.model.facts import AtError, LostChild, ModelSeen, ProcessCauses, ReducerSaid, StoreSought, TensorSeen

MOST_CHILDREN = 16
"""How many of a rank's last ended children we keep: a DataLoader without persistent workers ends some each epoch."""
MAX_TEXT_BYTES = 64 * 2**20
"""Limit for unpacked rows, because run folders can come from strangers. Our choice: 64 MiB hold a million rows."""


def read_models(notes: list[dict[str, Any]]) -> tuple[ModelSeen, ...]:
    """Return the models in the order of their construction. Equal models have their rows in one note only."""
    wrapped = [note for note in notes if note.get("k") == "ddp" and note.get("digest")]
    packed = {str(note["digest"]): str(note["rows"]) for note in wrapped if note.get("rows")}
    return tuple(read_record(ModelSeen, note, tensors=unpack(packed.get(str(note["digest"]), ""))) for note in wrapped)


def read_parameters(notes: list[dict[str, Any]]) -> tuple[TensorSeen, ...]:
    """Return the parameters that optimizers train without DDP."""
    packed = [str(note["rows"]) for note in notes if note.get("k") == "named" and note.get("rows")]
    return tuple(tensor for rows in packed for tensor in unpack(rows))


@lru_cache(maxsize=64)
def unpack(packed: str) -> tuple[TensorSeen, ...]:
    """Return the rows of a model, or () if they are missing or damaged; ranks with equal models share the cache."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), MAX_TEXT_BYTES)
        return tuple(map(_tensor, json.loads(text)))
    except (binascii.Error, zlib.error, ValueError, TypeError):
        return ()


def unpack_columns(packed: str) -> dict[str, Any]:
    """Return the packed part of a note, or {} if it is damaged."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), MAX_TEXT_BYTES)
        columns = json.loads(text)
    except (binascii.Error, zlib.error, ValueError):
        return {}
    return columns if isinstance(columns, dict) else {}


def _tensor(row: list[Any]) -> TensorSeen:
    kind, name, shape, dtype, requires_grad = row
    return TensorSeen(
        name=str(name),
        shape=None if shape is None else tuple(map(int, shape)),
        dtype=str(dtype),
        requires_grad=bool(requires_grad),
        is_buffer=kind == "b",
    )


def read_unfinished(notes: list[dict[str, Any]]) -> ReducerSaid | None:
    """Return what the last backward left out, for the first model whose last note still says so."""
    last: dict[tuple[str, Any], ReducerSaid | None] = {}
    for note in notes:
        if note.get("k") == "unfinished":
            last[str(note.get("group")), note.get("model")] = read_or_none(ReducerSaid, note)
    return next((said for said in last.values() if said is not None), None)


def read_nonfinite(notes: list[dict[str, Any]]) -> tuple[NonFinite, ...] | None:
    """Return the findings in the order in which they were made, or None if gradients were not checked.

    The recorder notes a finding again when it learns more about it, so the last note of each counts.
    """
    found = {note["id"]: note for note in notes if note.get("k") == "nonfinite" and isinstance(note.get("id"), int)}
    if not found and not any(note.get("k") == "gradients" for note in notes):
        return None
    return read_all(NonFinite, list(found.values()))


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
