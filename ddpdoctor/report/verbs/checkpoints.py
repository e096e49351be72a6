"""The content of `check-checkpoint`: the files that it has read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.blocks import items
from ddpdoctor.report.grids.checkpoint import checkpoint_pictures
from ddpdoctor.report.verbs.checklist import checklist_content

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Content


def checkpoint_content(report: Report) -> Content:
    """Return a line for each file."""
    files = report.data["files"]
    known = [one for one in files if isinstance(one, dict)] if isinstance(files, list) else []
    return checklist_content(report, (items([*map(_line, known)]),), pictures=checkpoint_pictures(known))


def _line(one: dict[str, Any]) -> str:
    tensors, size_bytes, parts = one.get("tensors"), one.get("size_bytes"), one.get("parts")
    facts = [
        f"{one.get('form')}, {one.get('state')}",
        _size(size_bytes if isinstance(size_bytes, int) else 0),
        *([count_of(tensors, "tensor")] if isinstance(tensors, int) else []),
        *(map(str, parts) if isinstance(parts, list) else ()),
    ]
    return f"{one.get('path')}: {', '.join(facts)}"


def _size(size_bytes: int) -> str:
    """Return a size as a file manager shows it. Findings about truncated files give exact bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return count_of(size_bytes, "byte")
