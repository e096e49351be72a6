"""Turns the calls in a ring into a rank's call log, and keeps their packed columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.recorded import read_frame
from ddpdoctor.model.call_log import CallKind, CallLog
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from ddpdoctor.recorder.storage.slots import Slot, Slots


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


def _read_kind(slot: Slot) -> CallKind:
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
