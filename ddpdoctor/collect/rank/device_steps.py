"""Reads the steps that a rank measured on its GPU; ``recorder/speed/device_steps.py`` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.notes import unpack_columns
from ddpdoctor.model.steps import DeviceSteps
from ddpdoctor.recorder.storage.device_columns import COLUMNS, PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence


def read_device_steps(notes: Sequence[dict[str, Any]]) -> DeviceSteps | None:
    """Return the steps, or None if none was measured. The last note counts."""
    note = next((note for note in reversed(notes) if note.get("k") == "device_steps"), None)
    columns = unpack_columns(str(note.get("columns", ""))) if note is not None else {}
    rows = [row for row in _lists(columns.get("rows")) if len(row) == len(COLUMNS)]
    if not rows:
        return None
    by_name = dict(zip(COLUMNS, zip(*rows, strict=True), strict=True))
    return DeviceSteps(
        numbers=by_name["number"],
        device_ms={phase: _ms(by_name[f"gpu_{phase}_us"]) for phase in PHASES},
        host_ms={phase: _ms(by_name[f"host_{phase}_us"]) for phase in PHASES},
        data_ms=_ms(by_name["data_us"]),
        data_cpu_ms=_ms(by_name["data_cpu_us"]),
        gc_ms=_ms(by_name["gc_us"]),
        input_rows=by_name["rows"],
        input_numel=by_name["numel"],
        reductions=by_name["reductions"],
        backwards=by_name["backwards"],
        behind=by_name["behind"],
        exposed_ms={row[0]: row[1] / 1e3 for row in _lists(columns.get("reduced")) if len(row) == 2},
    )


def _lists(value: Any) -> list[list[int]]:
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and all(isinstance(one, int) for one in row)]


def _ms(column_us: Sequence[int]) -> tuple[float, ...]:
    return tuple(us / 1e3 for us in column_us)
