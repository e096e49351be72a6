"""Reads when a rank's gradients were ready; ``recorder/speed/gradient_times.py`` writes it."""

from __future__ import annotations

from typing import Any

from ddpdoctor.collect.rank.notes import unpack_columns
from ddpdoctor.model.steps import GradientTimes


def read_gradient_times(notes: list[dict[str, Any]]) -> tuple[GradientTimes, ...]:
    """Return what was read of each DDP model, in the order of their first reductions. A model's last note counts."""
    last = {_int(note.get("n")): note for note in notes if note.get("k") == "gradient_times"}
    read = (_read(last[number]) for number in sorted(last))
    return tuple(one for one in read if one is not None)


def _read(note: dict[str, Any]) -> GradientTimes | None:
    """Return a note as a record, or None if it is damaged."""
    columns = unpack_columns(str(note.get("columns", "")))
    sizes, ready, buckets = (_ints(columns.get(name)) for name in ("sizes", "ready", "buckets"))
    if not sizes or len(sizes) != len(ready):
        return None
    return GradientTimes(
        number=_int(note.get("n")),
        group=str(note.get("group", "")),
        sizes_bytes=sizes,
        ready_ms=tuple(us / 1e3 if us >= 0 else None for us in ready),
        bucket_bytes=buckets,
        compute_end_ms=_int(note.get("compute_us")) / 1e3,
        exposed_ms=_int(note.get("exposed_us")) / 1e3,
        readings=_int(note.get("readings")),
        reductions=_int(note.get("reductions")),
        cap_bytes=note["cap"] if isinstance(note.get("cap"), int) else None,
        finds_unused=_flag(note.get("finds_unused")),
        static_graph=_flag(note.get("static")),
        bucket_view=_flag(note.get("view")),
        syncs_buffers=_flag(note.get("buffers")),
        unused_bytes=_int(note.get("unused_bytes")),
        same_unused=_flag(note.get("same_unused")),
    )


def _ints(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else []
    return tuple(one for one in numbers if isinstance(one, int))


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _flag(value: Any) -> bool | None:
    return bool(value) if isinstance(value, int) else None
