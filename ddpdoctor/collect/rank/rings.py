"""Reads the rings of a run folder, and the calls in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.collect.recorded import read_frame
from ddpdoctor.model.call_log import CallLog
from ddpdoctor.model.facts import CallKind
from ddpdoctor.recorder.storage import ring_layout, ring_reading

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.recorder.storage.slots import CallSlot, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """What the processes of a run wrote, by pid."""

    contents: dict[int, ring_reading.RingContent]
    """The rings; if a pid was reused, the latest."""
    damaged: dict[int, str]
    """Why the ring cannot be read, for processes without any readable ring."""


def read_rings(folder: Path, *, kept: bool = True) -> Rings:
    """Return the rings of a run folder.

    With ``kept``, a copy that was kept before a signal replaces the ring itself.
    """
    contents: dict[int, ring_reading.RingContent] = {}
    damaged: dict[int, str] = {}
    copies = sorted((folder / "evidence").glob("*.held")) if kept else ()
    for path in (*sorted((folder / "rings").glob("*.ring")), *copies):
        try:
            content = ring_reading.read_ring_file(path)
        except (OSError, ring_reading.DamagedRingError) as error:
            pid = path.name.partition("-")[0]
            if pid.isdigit():
                damaged[int(pid)] = f"its record cannot be read: {_why(error)}"
            continue
        known = contents.get(content.pid)
        if known is None or known.start_ticks <= content.start_ticks:
            contents[content.pid] = content
    return Rings(contents=contents, damaged={pid: why for pid, why in damaged.items() if pid not in contents})


def _why(error: OSError | ring_reading.DamagedRingError) -> str:
    return (error.strerror or "not to be read") if isinstance(error, OSError) else str(error)


def read_log(slots: Slots) -> CallLog:
    """Return all calls of a ring, including those that have not ended."""
    return CallLog(
        kinds=tuple(map(_read_kind, slots.kinds)),
        which=slots.which,
        indexes=slots.numbers,
        numbers=slots.seqs,
        started_ns=slots.started_ns,
        ended_ns=slots.ended_ns,
    )


def _read_kind(slot: CallSlot) -> CallKind:
    return CallKind(
        op=slot.op,
        api=slot.api or slot.op,
        group=slot.group,
        dtype=slot.dtype or None,
        shape=slot.shape,
        tensors=slot.tensors,
        peer=slot.peer if slot.peer >= 0 else None,
        redop=slot.redop or None,
        site=read_frame(slot.site),
        is_async=bool(slot.flags & ring_layout.FLAG_ASYNC),
        failed=bool(slot.flags & ring_layout.FLAG_FAILED),
        thread_is_main=bool(slot.flags & ring_layout.FLAG_MAIN),
    )
