"""The files that `check-checkpoint` has read, as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.report.page import plural

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report

VERB = "check-checkpoint"


def is_checkpoints(report: Report) -> bool:
    """Say whether a report is one of this verb."""
    return report.data.get("verb") == VERB


def checkpoint_lines(report: Report) -> list[str]:
    """Return a line a file."""
    files = report.data.get("files")
    return [_line(one) for one in files if isinstance(one, dict)] if isinstance(files, list) else []


def _line(one: dict[str, Any]) -> str:
    tensors, size_bytes, parts = one.get("tensors"), one.get("size_bytes"), one.get("parts")
    facts = [
        f"{one.get('form')}, {one.get('state')}",
        _size(size_bytes if isinstance(size_bytes, int) else 0),
        *([plural(tensors, "tensor")] if isinstance(tensors, int) else []),
        *(map(str, parts) if isinstance(parts, list) else ()),
    ]
    return f"{one.get('path')}: {', '.join(facts)}"


def _size(size_bytes: int) -> str:
    """Return a size as a file manager shows it; the finding of a file that is too short has its bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return plural(size_bytes, "byte")
