"""The grid of `check-consistency --diff`: the contents that differ between files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.diff import Kind
from ddpdoctor.model.rank_words import count_of, rank_list
from ddpdoctor.model.sides import majority_of
from ddpdoctor.report.blocks import GridCell, Tone
from ddpdoctor.report.grids.build import MAX_ROWS, grid_by_member, not_shown
from ddpdoctor.report.grids.replica import EQUAL, SAME_LETTER, letter, tone_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.diff import Apart, DiffFacts, Unequal
    from ddpdoctor.model.findings import Finding
    from ddpdoctor.report.blocks import Section
    from ddpdoctor.report.grids.build import Row


def diff_pictures(facts: DiffFacts, findings: Iterable[Finding]) -> tuple[Section, ...]:
    """Return a grid of contents by files, equal files in one column. Nothing if the files are equal."""
    unequal = [one for one in facts.unequal if one.kind is not Kind.RANDOM]
    if not unequal:
        return ()
    tone = tone_of(findings)
    files = range(len(facts.files))
    rows: list[Row] = [(f"{one.name} ({one.kind.value})", _cells(one, tone)) for one in unequal[:MAX_ROWS]]
    equal = facts.tensors + facts.values - len(facts.incomparable) - len(facts.unequal)
    if equal > 0:
        rows.append((count_of(equal, "other"), dict.fromkeys(files, GridCell(text=EQUAL, tone=Tone.GOOD))))
    grid = grid_by_member(
        "contents that differ",
        rows,
        files,
        lambda those: _name(facts, those),
        axes=("tensor or value", "file"),
        legend=(SAME_LETTER, *not_shown(len(unequal) - MAX_ROWS, "differing tensor or value")),
    )
    return ((grid,),)


def _name(facts: DiffFacts, files: Sequence[int]) -> str:
    """Return "file 2 (rank 1)" or "files 1 and 3"."""
    named = rank_list((one + 1 for one in files), noun="file")
    rank = facts.files[files[0]].rank
    return named if len(files) > 1 or rank is None else f"{named} (rank {rank})"


def _cells(one: Unequal, tone: Tone) -> Mapping[int, GridCell]:
    cells = dict.fromkeys(one.absent_in, GridCell(text="none", tone=tone, about="not in this file"))
    most, apart = majority_of(one.sides), {each.file: each for each in one.apart}
    for number, side in enumerate(one.sides):
        measured = next((apart[each] for each in side if each in apart), None)
        seen = one.seen[number] if number < len(one.seen) else ""
        cell = GridCell(
            text=letter(number) + (f", off by {measured.largest:.2g}" if measured and measured.largest else ""),
            tone=Tone.PLAIN if side is most and not one.absent_in else tone,
            about="; ".join(filter(None, (seen, _distance(measured) if measured else ""))),
        )
        cells.update(dict.fromkeys(side, cell))
    return cells


def _distance(one: Apart) -> str:
    parts = [
        f"{one.differing} of {count_of(one.of, 'element')} differ from file {one.against + 1}",
        *([f"by {one.largest:.3g} at most"] if one.largest is not None else []),
        *([f"relative {one.relative:.2g}"] if one.relative is not None else []),
        *([f"{one.not_finite} not finite"] if one.not_finite else []),
    ]
    return ", ".join(parts)
