"""The grid of `check-checkpoint`: how far each file could be read, and which parts of the training state it holds."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.checkpoint import Checksums, ReadState, StatePart
from ddpdoctor.model.rank_words import count_of, first_names
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.grids.build import grid_by_member

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.report.blocks import Section
    from ddpdoctor.report.grids.build import Row

MAX_NAMES = 3
"""How many files of a column are named."""


def checkpoint_pictures(files: Sequence[Mapping[str, Any]]) -> tuple[Section, ...]:
    """Return a grid of results by files, equal files in one column."""
    if not files:
        return ()
    paths = [str(one.get("path")) for one in files]
    short = [PurePath(path).name for path in paths]
    names = short if len(set(short)) == len(short) else paths
    grid = grid_by_member(
        "what could be read of each file, and what it holds",
        _rows(files),
        range(len(files)),
        lambda those: first_names([names[at] for at in those], MAX_NAMES),
        axes=("", "file"),
    )
    return ((grid,),)


def _rows(files: Sequence[Mapping[str, Any]]) -> list[Row]:
    held = {part for one in files for part in _parts(one)}
    parts = [part.value for part in StatePart if part.value in held]
    return [
        ("read", dict(enumerate(map(_state, files)))),
        ("checksums", dict(enumerate(map(_checksums, files)))),
        ("NaN and infinity", dict(enumerate(map(_values, files)))),
        ("tensors", dict(enumerate(map(_tensors, files)))),
        *((part, {at: _held(part, one) for at, one in enumerate(files)}) for part in parts),
    ]


def _state(one: Mapping[str, Any]) -> GridCell:
    state = str(one.get("state"))
    return GridCell(text=state, tone=Tone.GOOD if state == ReadState.WHOLE.value else Tone.ERROR)


def _checksums(one: Mapping[str, Any]) -> GridCell:
    checksums = str(one.get("checksums", Checksums.NOT_READ.value))
    return GridCell(text=checksums, tone=Tone.GOOD if checksums == Checksums.CHECKED.value else Tone.SKIPPED)


def _values(one: Mapping[str, Any]) -> GridCell:
    found = one.get("not_finite")
    if isinstance(found, int) and found > 0:
        return GridCell(text=f"in {count_of(found, 'tensor')}", tone=Tone.WARNING)
    if one.get("values_looked_at") is True:
        return GridCell(text="none" if found == 0 else "looked for", tone=Tone.GOOD if found == 0 else Tone.PLAIN)
    return GridCell(text="not looked for", tone=Tone.SKIPPED)


def _tensors(one: Mapping[str, Any]) -> GridCell:
    count = one.get("tensors")
    return GridCell(text=str(count)) if isinstance(count, int) else GridCell(text="?", tone=Tone.SKIPPED)


def _held(part: str, one: Mapping[str, Any]) -> GridCell:
    return GridCell(text="yes", tone=Tone.GOOD) if part in _parts(one) else GridCell(text="no", tone=Tone.NOTE)


def _parts(one: Mapping[str, Any]) -> list[str]:
    parts = one.get("parts")
    return [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else []
