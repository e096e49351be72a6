"""Notes the module that DDP's constructor gets, in compact rows that show the first difference between ranks."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import time
import zlib
from typing import Any, List, Optional, Set

from .. import frames
from ..state import here, pass_on

MAX_NOTES = 256
"""Constructions of DDP that are noted. Our choice: with digests alone they take 64 KiB of the journal's 512."""
MAX_ROWS_BYTES = 48 * 1024
"""Room for the rows of one model. Our choice: 2,000 parameters named as in a transformer take about 8 KiB."""
MAX_ALL_ROWS_BYTES = 192 * 1024
"""Room for the rows of all models of a process. Later models get only a digest."""

_digests: Set[str] = set()
_notes = 0
_rows_bytes = 0


def note_model(module: Any, group: Any, with_buffers: bool, finds_unused: bool) -> None:
    """Write what DDP needs to be equal on all ranks of ``group``: names, order, shapes, dtypes, requires_grad.

    A model that was seen before is written as a digest only.
    """
    global _notes, _rows_bytes
    if here.ring is None or _notes >= MAX_NOTES:
        return
    _notes += 1
    rows = _rows(module, with_buffers)
    text = _text(rows)
    digest = hashlib.sha256(text).hexdigest()[:24]
    entry = {
        "k": "ddp",
        "at": time.monotonic_ns(),
        "group": str(group.group_name),
        "count": len(rows),
        "digest": digest,
        "finds_unused": int(finds_unused),
        "frame": frames.describe_user(sys._getframe()),
    }
    if digest not in _digests:
        packed = _packed(rows, text, min(MAX_ROWS_BYTES, MAX_ALL_ROWS_BYTES - _rows_bytes))
        if packed is not None:
            entry["rows"] = packed
            _rows_bytes += len(packed)
    if here.ring.note(entry):
        _digests.add(digest)


def pack_names(named: List[Any]) -> Optional[str]:
    """Return the rows of named parameters, compressed: those that fit in a quarter of what a DDP model gets."""
    rows = [_row("p", name, tensor) for name, tensor in named]
    return _packed(rows, _text(rows), MAX_ROWS_BYTES // 4)


def _rows(module: Any, with_buffers: bool) -> List[Any]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    rows = [_row("p", name, tensor) for name, tensor in module.named_parameters() if name not in ignored]
    if with_buffers:
        rows += [_row("b", name, tensor) for name, tensor in module.named_buffers() if name not in ignored]
    return rows


def _row(kind: str, name: str, tensor: Any) -> List[Any]:
    try:
        shape = list(tensor.shape)
    except RuntimeError as error:  # a parameter of a lazy module has no shape yet
        pass_on(error)
        shape = None
    return [kind, name, shape, str(tensor.dtype).replace("torch.", ""), int(tensor.requires_grad)]


def _text(rows: List[Any]) -> bytes:
    return json.dumps(rows, separators=(",", ":")).encode("utf-8", "replace")


def _packed(rows: List[Any], text: bytes, space: int) -> Optional[str]:
    """Return as many of the first rows as fit, compressed, or None if not even a few fit."""
    while True:
        packed = base64.b64encode(zlib.compress(text, 6)).decode("ascii")
        if len(packed) <= space:
            return packed
        if len(rows) < 16:
            return None
        rows = rows[: len(rows) // 2]
        text = _text(rows)
