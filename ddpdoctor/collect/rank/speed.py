"""Reads what a ring says about a rank's speed."""

from __future__ import annotations

from array import array
from operator import add
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.device_steps import read_device_steps
from ddpdoctor.collect.rank.steps import ENDS
from ddpdoctor.collect.recorded import read_frame
from ddpdoctor.model.steps import CoreTime, DataParallelSeen, HandReduced, PartTotal, Speed, StepParts, Surroundings
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.kept_steps import is_sampled
from ddpdoctor.recorder.storage.step_parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.recorder.storage.ring_reading import RingContent

_ENDED, _GROUP, _FLAGS, _PHASES = 1, 2, 3, 4
"""Columns of ``ring_layout.STEP``: number, end, group, flags, the four phases, the four waits, ``STEP_INSIDE``."""
_WAITS, _INSIDE = _PHASES + 4, _PHASES + 8
_CPU = {
    "before": "cpu_before_us",
    "forward": "cpu_forward_us",
    "between": "cpu_between_us",
    "backward": "cpu_backward_us",
    "data": "data_cpu_us",
}


def read_speed(content: RingContent) -> Speed | None:
    """Return the speed of a rank, or None if no steps were recorded, or an older version recorded them."""
    columns = content.steps
    if not columns or len(columns) < _INSIDE + len(ring_layout.STEP_INSIDE):
        return None
    key = columns[_GROUP][-1], columns[_FLAGS][-1] & ring_layout.STEP_KIND
    totals = {
        part: PartTotal(sum_ms=row[0] / 1e3, bins=row[1:])
        for part, row in zip(ring_layout.PARTS, content.totals, strict=False)
    }
    return Speed(
        ends_with=ENDS[key[1]],
        group=content.strings.get(key[0], ""),
        count=content.cells["steps_recorded"],
        sample_bits=content.cells["sample_bits"],
        kept=_read_parts(content.kept, key, content.cells["sample_bits"]),
        totals=totals,
        core_time=_read_core_time(content),
        surroundings=_read_surroundings(content),
        data_parallel=tuple(
            DataParallelSeen(devices=_count(note.get("devices")), site=read_frame(note.get("frame")))
            for note in content.notes
            if note["k"] == "data_parallel"
        ),
        hand_reduced=_read_hand_reduced(content),
        collected_at=_read_collected_at(content),
        device=read_device_steps(content.notes),
    )


def _read_parts(columns: Sequence[Sequence[int]], key: tuple[int, int], bits: int) -> StepParts:
    """Return the steps that ended in the same group, by the same event."""
    rows = [row for row in zip(*columns, strict=True) if (row[_GROUP], row[_FLAGS] & ring_layout.STEP_KIND) == key]
    split = [parts_of(row[_PHASES:_WAITS], row[_WAITS:_INSIDE], row[_INSIDE:], row[_FLAGS]) for row in rows]
    parts = {part: array("f", (row[i] / 1e3 for row in split)) for i, part in enumerate(ring_layout.PARTS)}
    unsplit = parts.pop("unsplit")
    parts["backward"] = array("f", map(add, parts["backward"], unsplit))
    inside = {name: array("I", (row[_INSIDE + i] for row in rows)) for i, name in enumerate(ring_layout.STEP_INSIDE)}
    return StepParts(
        numbers=array("Q", (row[0] for row in rows)),
        parts_ms=parts,
        is_even=bytes(is_sampled(row[0], bits) for row in rows),
        is_split=bytes(not row[_FLAGS] & ring_layout.STEP_WAIT_UNKNOWN for row in rows),
        cpu_ms={name: array("f", (value / 1e3 for value in inside[key])) for name, key in _CPU.items()},
        reductions=inside["reductions"],
        backwards=inside["backwards"],
        input_rows=inside["input_rows"],
        input_numel=inside["input_numel"],
        ended_ns=array("Q", (row[_ENDED] for row in rows)),
    )


def _read_core_time(content: RingContent) -> CoreTime | None:
    cells = content.cells
    if not cells["trained_ns"]:
        return None
    return CoreTime(
        elapsed_ms=cells["trained_ns"] / 1e6,
        on_core_ms=cells["main_cpu_ns"] / 1e6,
        queued_ms=cells["run_delay_ns"] / 1e6,
        others_queued_ms=cells["others_delay_ns"] / 1e6,
    )


def _read_surroundings(content: RingContent) -> Surroundings | None:
    note: dict[str, Any] = next((note for note in content.notes if note["k"] == "surroundings"), {})
    if not note:
        return None
    frameworks = note.get("frameworks")
    return Surroundings(
        threads=_count(note.get("threads")),
        cores=_count(note.get("cores")),
        frameworks=tuple(map(str, frameworks)) if isinstance(frameworks, list) else (),
    )


def _read_hand_reduced(content: RingContent) -> HandReduced | None:
    note = next((note for note in content.notes if note["k"] == "hand_reduced"), None)
    if note is None:
        return None
    return HandReduced(
        gradients=_count(note.get("gradients")),
        site=read_frame(note.get("frame")),
        copied=note.get("copied") is True,
    )


def _read_collected_at(content: RingContent) -> Frame | None:
    """Return the line of the last note: it is written again from time to time."""
    notes = [note for note in content.notes if note["k"] == "collected"]
    return read_frame(notes[-1].get("frame")) if notes else None


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
