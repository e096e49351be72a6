"""Words for sentences: durations, calls, and what groups of ranks do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Call, CallKind
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.stacks import Frame

_DIGITS = re.compile(r"\d+")
_WAYS = {"send": "to", "isend": "to", "recv": "from", "irecv": "from"}
MAX_TEXT = 300
"""Characters kept of the text of an exception."""


def verb(ranks: Iterable[int], one: str, many: str) -> str:
    """Return the verb's form for one rank or for several."""
    return one if len(set(ranks)) == 1 else many


def file_name(path: str) -> str:
    """Return the last part of a path."""
    return path.replace("\\", "/").rsplit("/", 1)[-1]


def line_of(frame: Frame | Place | None) -> str:
    """Return "train.py:12", or "an unknown line"."""
    return f"{file_name(frame.file)}:{frame.line}" if frame is not None else "an unknown line"


def place_words(frame: Frame | Place | None) -> str:
    """Return "in read_batch (train.py:12)"."""
    if frame is None:
        return "at an unknown line"
    if frame.function.startswith("<"):
        return f"at {line_of(frame)}"
    return f"in {frame.function} ({line_of(frame)})"


def call_words(call: Call | CallKind | None) -> str:
    """Return what was called: operation, dtype and shape."""
    if call is None:
        return "a collective"
    name = call.op if call.api in ("", call.op) else f"{call.api} ({call.op})"
    if call.shape is None or call.dtype is None:
        return name
    return f"{name} of {call.dtype.replace('torch.', '')}{list(call.shape)}"


def peer_words(call: Call | None) -> str:
    """Return " from rank 1" or " to rank 1" for a point-to-point call, "" for any other."""
    way = _WAYS.get(call.op) if call is not None else None
    return f" {way} rank {call.peer}" if way and call is not None and call.peer is not None else ""


def seconds(duration_ns: int | None) -> str:
    """Return "for 12 s", or "" if the duration is not known or too short to mention."""
    if duration_ns is None or duration_ns < 100_000_000:
        return ""
    value = duration_ns / 1e9
    return f"for {value:.1f} s" if value < 10 else f"for {value:.0f} s"


_LAST_ERROR = "Last error:"


def first_line(text: str) -> str:
    """Return the first meaningful line of an error's text, cut to ``MAX_TEXT``.

    torch's errors of NCCL name their own source first; NCCL's words stand behind "Last error:".
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    quoted = lines.index(_LAST_ERROR) + 1 if _LAST_ERROR in lines[:-1] else 0
    line = lines[quoted] if lines else ""
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def without_numbers(text: str) -> str:
    """Return a text without the ports, times and ranks that make equal errors differ."""
    return _DIGITS.sub("#", text)
