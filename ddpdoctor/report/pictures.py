"""The pictures of a job: its timeline, who waits for whom, the source at the fault, the merged stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.pictures import RankWaits, SourceExcerpt
from ddpdoctor.model.timeline import Timeline
from ddpdoctor.report.blocks import Lanes, SourceLines, WaitGraph, WaitNode
from ddpdoctor.report.tree import stack_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.blocks import Section

Kind = TypeVar("Kind")


def job_pictures(report: Report) -> tuple[Section, ...]:
    """Return the pictures of a job, as far as the report has what they are drawn from.

    Reports of older versions have less. Damaged data costs its picture and nothing else.
    """
    return tuple(_pictures(report))


def _pictures(report: Report) -> Iterator[Section]:
    timeline = _read(Timeline, report, "timeline")
    if timeline is not None and timeline.lanes:
        yield (Lanes(timeline=timeline),)
    waits = _read(RankWaits, report, "waits")
    if waits is not None and waits.links:
        yield (_graph(waits),)
    source = _read(SourceExcerpt, report, "source")
    if source is not None:
        yield (SourceLines(file=source.file, first=source.first, lines=source.lines, blamed=source.blamed),)
    tree = stack_tree(report.ranks, report.verdict)
    if tree is not None:
        yield (tree,)


def _graph(waits: RankWaits) -> WaitGraph:
    """Return the graph of waits without links to classes that do not exist."""
    nodes = tuple(
        WaitNode(ranks=one.ranks, state=one.state, place=one.place, blamed=one.blamed) for one in waits.classes
    )
    places = range(len(nodes))
    return WaitGraph(nodes=nodes, edges=tuple(link for link in waits.links if link[0] in places and link[1] in places))


def _read(kind: type[Kind], report: Report, name: str) -> Kind | None:
    plain = report.data.get(name)
    try:
        return None if plain is None else decode(kind, plain)
    except WrongValue:
        return None
