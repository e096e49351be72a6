"""The content of `check-consistency --diff`: the files, and a table of differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.codec import decode
from ddpdoctor.model.diff import DiffFacts, Kind
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.blocks import Content, Text, items, table_of
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.grids.diff import diff_pictures

if TYPE_CHECKING:
    from ddpdoctor.model.diff import SavedFile, Unequal
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Section

MAX_ROWS = 30
"""The most tensors in the table (our choice). The report's data has all of them."""
HEADS = ("", "what", "differ", "of", "largest", "relative")


def diff_content(report: Report) -> Content:
    """Return the content for compared files."""
    facts = decode(DiffFacts, report.data["diff"])
    files = items([_file(number, one) for number, one in enumerate(facts.files, start=1)])
    return Content(
        headline=_headline(facts, report),
        status=", ".join(filter(None, (count_of(len(facts.files), "file"), count_findings(report.findings)))),
        about=((files,),),
        sections=_table(facts),
        pictures=diff_pictures(facts, report.findings),
    )


def _file(number: int, one: SavedFile) -> str:
    rank = "" if one.rank is None else f" (rank {one.rank})"
    beside = f"; {count_of(one.beside, 'other tensor')} not compared" if one.beside else ""
    below = f" below {one.below.rstrip('.')!r}{beside}" if one.below else ""
    return f"file {number}: {one.path}{rank}, {count_of(one.tensors, 'tensor')}{below}"


def _headline(facts: DiffFacts, report: Report) -> str:
    if report.verdict is not None:
        return report.verdict.summary
    return f"equal in all {count_of(facts.tensors - len(facts.incomparable), 'tensor')} that were compared, bit by bit"


def _table(facts: DiffFacts) -> tuple[Section, ...]:
    shown = [one for one in facts.unequal if one.kind is not Kind.RANDOM]
    if not shown:
        return ()
    rows = [row for one in shown[:MAX_ROWS] for row in _rows(one, several=len(facts.files) > 2)]
    more = (Text(text=f"and {len(shown) - MAX_ROWS} more", indent=2),) if len(shown) > MAX_ROWS else ()
    return ((table_of(HEADS, rows, left=2), *more),)


def _rows(one: Unequal, *, several: bool) -> list[tuple[str, ...]]:
    """Return a row for each file that differs from the first. With several files, rows say "3 against 1"."""
    if not one.apart:
        seen = " | ".join(one.seen)
        absent = f"not in file {', '.join(str(n + 1) for n in one.absent_in)}" if one.absent_in else ""
        return [(one.name, "; ".join(filter(None, [seen, absent])), "", "", "", "")]
    return [
        (
            one.name,
            "".join(one.seen[:1]) + (f", file {each.file + 1} against {each.against + 1}" if several else ""),
            str(each.differing),
            str(each.of),
            "" if each.largest is None else f"{each.largest:.3g}",
            "" if each.relative is None else f"{each.relative:.2g}",
        )
        for each in one.apart
    ]
