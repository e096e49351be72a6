"""Reads what a rank noted about its models: the modules given to DDP, errors of its reducer, bad gradients."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from functools import lru_cache
from typing import Any

from ddpdoctor.collect.recorded import read_all, read_or_none, read_record
from ddpdoctor.model.consistency import NonFinite
from ddpdoctor.model.facts import ModelSeen, TensorSeen
from ddpdoctor.model.reducer import ReducerSaid

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
