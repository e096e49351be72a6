"""What ranks drew from the user's own loaders, as lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.page import plural
from ddpdoctor.report.ranks import format_numbers
from ddpdoctor.report.tables import draw_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.drawn import Drawn, Pass, RankPass

HEAD = ("pass", "ranks", "samples", "repeated", "batches", "last batch")


def drawn_lines(drawn: Drawn) -> list[str]:
    """Return what each rank drew in each pass, and what that comes to."""
    return [*_about(drawn), "", *draw_table([HEAD, *_rows(drawn)]), "", *map(_closing, drawn.passes), *_notes(drawn)]


def _about(drawn: Drawn) -> Iterator[str]:
    samples = "" if drawn.samples is None else f", {plural(drawn.samples, 'sample')}"
    ranks = plural(drawn.world_size, "rank")
    yield f"{drawn.function}: {_name(drawn.kind)} over {_name(drawn.dataset)}{samples}, {ranks}"
    batches = "" if drawn.batch_size is None else f"batches of {drawn.batch_size}"
    sampler = f"sampler {_name(drawn.sampler)}" if drawn.sampler else "no sampler"
    called = "set_epoch called before each pass" if drawn.set_epoch else "set_epoch not called"
    yield ", ".join(part for part in (batches, sampler, called) if part)


def _name(kind: str) -> str:
    return kind.rpartition(".")[2]


def _rows(drawn: Drawn) -> Iterator[tuple[str, ...]]:
    for one in drawn.passes:
        found: dict[tuple[object, ...], list[int]] = {}
        for row in one.ranks:
            found.setdefault(_numbers(row), []).append(row.rank)
        for place, (numbers, ranks) in enumerate(found.items()):
            each = " each" if len(ranks) > 1 else ""
            yield ("" if place else str(one.number), format_numbers(ranks) + each, *map(str, numbers))


def _numbers(row: RankPass) -> tuple[object, ...]:
    more = "" if row.complete else "+"
    repeated = "?" if row.repeated is None else row.repeated
    return (f"{row.drawn}{more}", repeated, f"{row.batches}{more}", row.last_batch)


def _closing(one: Pass) -> str:
    if one.unique is None:
        return f"pass {one.number}: {plural(one.drawn, 'sample')} in all; which they are was not compared"
    return (
        f"pass {one.number}: {plural(one.drawn, 'sample')} in all, {one.unique} different, "
        f"{one.shared} drawn by two ranks or more, {one.missed} by none"
    )


def _notes(drawn: Drawn) -> Iterator[str]:
    for note in drawn.notes:
        yield f"not looked at: {note}"
