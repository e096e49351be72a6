"""Reads back which modules DDP's constructor was given. ``recorder/training/ddp_constructor.py`` writes them."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from functools import lru_cache
from typing import Any

from ddpdoctor.collect.rank.frames import read_frame
from ddpdoctor.model.facts import ModelSeen, TensorSeen

MAX_TEXT_BYTES = 64 * 2**20
"""What packed rows may unpack to. Ours: a run folder may come from elsewhere, and 64 MiB hold a million rows."""


def read_models(notes: list[dict[str, Any]]) -> tuple[ModelSeen, ...]:
    """Return the models in the order of their construction; rows are written once for equal ones."""
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
    """Return the rows of a model, none where they are missing or damaged. Ranks with equal models share them."""
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
