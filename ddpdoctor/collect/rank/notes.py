"""Reads what a rank noted about its models: the modules given to DDP, errors of its reducer, bad gradients."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from functools import lru_cache
from typing import Any

from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.consistency import NonFinite, Origin
from ddpdoctor.model.facts import ModelSeen, TensorSeen
from ddpdoctor.model.reducer import Fault, ReducerSaid

MAX_TEXT_BYTES = 64 * 2**20
"""Limit for unpacked rows, because run folders can come from strangers. Our choice: 64 MiB hold a million rows."""


def read_models(notes: list[dict[str, Any]]) -> tuple[ModelSeen, ...]:
    """Return the models in the order of their construction. Equal models have their rows in one note only."""
    wrapped = [note for note in notes if note.get("k") == "ddp" and note.get("digest")]
    packed = {str(note["digest"]): str(note["rows"]) for note in wrapped if note.get("rows")}
    return tuple(
        ModelSeen(
            group=str(note.get("group", "")),
            digest=str(note["digest"]),
            count=int(note.get("count") or 0),
            tensors=unpack(packed.get(str(note["digest"]), "")),
            site=read_frame(note.get("frame")),
            finds_unused=bool(note["finds_unused"]) if "finds_unused" in note else None,
        )
        for note in wrapped
    )


@lru_cache(maxsize=64)
def unpack(packed: str) -> tuple[TensorSeen, ...]:
    """Return the rows of a model, or () if they are missing or damaged; ranks with equal models share the cache."""
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), MAX_TEXT_BYTES)
        return tuple(map(_tensor, json.loads(text)))
    except (binascii.Error, zlib.error, ValueError, TypeError):
        return ()


def _tensor(row: list[Any]) -> TensorSeen:
    kind, name, shape, dtype, requires_grad = row
    return TensorSeen(
        name=str(name),
        shape=None if shape is None else tuple(map(int, shape)),
        dtype=str(dtype),
        requires_grad=bool(requires_grad),
        is_buffer=kind == "b",
    )


def read_reducer(entry: Any) -> ReducerSaid | None:
    """Return what the reducer said in one error or after one backward, or None if the entry is missing or damaged."""
    if not isinstance(entry, dict) or entry.get("what") not in set(Fault):
        return None
    return ReducerSaid(
        what=Fault(entry["what"]),
        names=_texts(entry.get("names")),
        count=int(entry.get("count") or 0),
        of=int(entry.get("of") or 0),
        outputs=_texts(entry.get("outputs")),
        site=read_frame(entry.get("frame")),
    )


def read_unfinished(notes: list[dict[str, Any]]) -> ReducerSaid | None:
    """Return what the last backward left out, for the first model whose last note still says so."""
    last: dict[tuple[str, Any], ReducerSaid | None] = {}
    for note in notes:
        if note.get("k") == "unfinished":
            last[str(note.get("group")), note.get("model")] = read_reducer(note)
    return next((said for said in last.values() if said is not None), None)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def read_nonfinite(notes: list[dict[str, Any]]) -> tuple[NonFinite, ...] | None:
    """Return the findings in the order in which they were made, or None if gradients were not checked.

    The recorder notes a finding again when it learns more about it, so the last note of each counts.
    """
    found = {note["id"]: note for note in notes if note.get("k") == "nonfinite" and isinstance(note.get("id"), int)}
    if not found and not any(note.get("k") == "gradients" for note in notes):
        return None
    return tuple(map(_finding, found.values()))


def _finding(note: dict[str, Any]) -> NonFinite:
    return NonFinite(
        step=int(note.get("step") or 0),
        model=int(note.get("model") or 0),
        group=str(note.get("group", "")),
        tensors=tuple(map(str, note.get("tensors") or ())),
        count=int(note.get("count") or 0),
        of=int(note.get("of") or 0),
        origin=Origin(note.get("origin")),
        is_nan=bool(note.get("nan")),
        scaled=bool(note.get("scaled")),
        used=bool(note.get("used")),
        times=int(note.get("times") or 1),
        in_a_row=int(note.get("row") or 1),
        where=read_frame(note.get("frame")),
        note=str(note.get("note", "")),
    )
