"""Arranges the sections of a report as the parts of a page, each with a title and a name to link to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import Grid, Heading, Lanes, Places, Series, SourceLines, Tone, Tree, WaitGraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.report.blocks import Block, Content, Section

RESULTS = "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePart:
    """A part of a page. ``id`` is its name in links."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    tone: Tone = Tone.STRONG


def list_parts(content: Content) -> tuple[tuple[PagePart, ...], tuple[PagePart, ...]]:
    """Return the parts before the other findings, which support the verdict, and the parts behind them."""
    sections = _without_small_forms(content)
    places = [section for section in sections if _is_places(section)]
    first = places if len(places) == 1 else []  # with several, each belongs to an attempt
    rest = [section for section in sections if section not in first]
    before = _parts((*first, *content.pictures), "p")
    return before, _parts(rest, "r")


def _is_places(section: Section) -> bool:
    return len(section) == 1 and isinstance(section[0], Places)


def _without_small_forms(content: Content) -> list[Section]:
    """Leave out what a picture with the same title shows in full: charts and matrices for the screen."""
    drawn = {title for section in content.pictures for block in section if (title := _title(block)) is not None}
    return [section for section in content.sections if section and _title(section[0]) not in drawn]


def _parts(sections: Iterable[Section], prefix: str) -> tuple[PagePart, ...]:
    """Make a part of each section. One without a title continues the part before it."""
    parts: list[PagePart] = []
    for title, tone, blocks in _titled(sections):
        if title is None and parts:
            last = parts.pop()
            parts.append(PagePart(id=last.id, title=last.title, tone=last.tone, blocks=last.blocks + blocks))
        else:
            parts.append(PagePart(id=f"{prefix}{len(parts)}", title=title or RESULTS, tone=tone, blocks=blocks))
    return tuple(parts)


def _titled(sections: Iterable[Section]) -> Iterator[tuple[str | None, Tone, Section]]:
    for section in sections:
        if section and isinstance(section[0], Heading):
            yield section[0].text, section[0].tone, section[1:]
        elif section:
            yield _title(section[0]), Tone.STRONG, section


def _title(block: Block) -> str | None:
    """Return the title that a section has from its first block."""
    match block:
        case Heading():
            return block.text
        case Lanes():
            return "Timeline"
        case WaitGraph():
            return "Who waits for whom"
        case SourceLines():
            return "Source"
        case Places():
            return "Where the ranks are"
        case Tree() | Grid() | Series():
            return block.title
        case _:
            return None
