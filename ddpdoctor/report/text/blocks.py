"""Draws each kind of block on a page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.blocks import FactList, Heading, Items, Lanes, Places, Series, Table, Text, Tone
from ddpdoctor.report.lines import wrap
from ddpdoctor.report.names import format_ranks
from ddpdoctor.report.text.chart import draw_chart, draw_sparks
from ddpdoctor.report.text.columns import draw_table
from ddpdoctor.report.text.page import width_of
from ddpdoctor.report.text.strip import STRIP_WIDTH, draw_strip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.report.blocks import Block, FactEntry, RankClass, Section
    from ddpdoctor.report.text.page import TextPage

MAX_CLASSES = 40
"""More rows than this do not help on a screen. The report file has all of them."""
MAX_RANKS_WIDTH = 28
"""A longer list of ranks gets its own lines."""


def add_sections(page: TextPage, sections: Iterable[Section]) -> None:
    """Add sections, each separated from the previous one."""
    for section in sections:
        before = len(page.lines)
        page.gap()
        after_gap = len(page.lines)
        add_blocks(page, section)
        if len(page.lines) == after_gap:
            del page.lines[before:]


def add_blocks(page: TextPage, blocks: Iterable[Block]) -> None:
    """Add blocks one below the other."""
    for block in blocks:
        match block:
            case Heading():
                page.add(block.text, tone=block.tone)
            case Text():
                page.add(block.text, first=" " * block.indent, tone=block.tone)
            case Items():
                _add_items(page, block)
            case FactList():
                _add_facts(page, block)
            case Table():
                _add_table(page, block)
            case Series():
                _add_series(page, block)
            case Places():
                _add_places(page, block)
            case Lanes():
                _add_strip(page, block)


def _add_strip(page: TextPage, block: Lanes) -> None:
    width = STRIP_WIDTH if page.width is None else min(page.width, STRIP_WIDTH)
    *rows, legend = draw_strip(block.timeline, width) or [""]
    for line in (*rows, *(wrap(legend, width, first="  ") if legend else [])):
        page.add(line, whole=True)


def _add_items(page: TextPage, block: Items) -> None:
    for item in block.items:
        page.add(item.text, first=block.mark)
        if item.fix:
            page.add(item.fix, first=f"{' ' * len(block.mark)}to do: ", whole=True)


def _add_facts(page: TextPage, block: FactList) -> None:
    width = block.width or max((width_of(fact.label) for fact in block.facts), default=0) + 2
    for fact in block.facts:
        _add_fact(page, fact, f"  {fact.label.ljust(width)}")


def _add_fact(page: TextPage, fact: FactEntry, head: str) -> None:
    for number, text in enumerate(fact.texts):
        first, tone = (" " * len(head), Tone.PLAIN) if number else (head, fact.tone)
        page.add(text, first=first, tone=tone, styled=len(head), whole=fact.whole)


def _add_table(page: TextPage, table: Table) -> None:
    lines = draw_table(table, page)
    if lines is None:
        add_blocks(page, table.instead)
        return
    rows = len(table.columns[0].cells)
    for number, line in enumerate(lines, start=rows - len(lines)):
        page.add(line, whole=True, tone=table.tones.get(number, Tone.PLAIN))
    for line in table.legend:
        page.add(line, first="  ")


def _add_series(page: TextPage, block: Series) -> None:
    """Draw a chart on a terminal with room for it, else a line for each curve."""
    chart = draw_chart(block, page.width) if page.width is not None else []
    for line in chart or draw_sparks(block):
        page.add(line, whole=True)


def _add_places(page: TextPage, block: Places) -> None:
    """Add ranks, one row per place. ">" marks the ranks that the verdict blames."""
    shown = block.classes[:MAX_CLASSES]
    names = [_name(page, one) for one in shown]
    names_width = min(max(map(len, names), default=0), MAX_RANKS_WIDTH)
    state_width = max((width_of(page.clean(one.state)) for one in shown), default=0)
    for one, name in zip(shown, names, strict=True):
        _add_class(page, one, name.ljust(names_width), state_width)
    if len(block.classes) > len(shown):
        page.add(f"and {len(block.classes) - len(shown)} more rows in report.json", first="  ")


def _name(page: TextPage, one: RankClass) -> str:
    ranks = format_ranks(one.ranks)
    return f"{ranks} on {page.clean(one.host)}" if one.host else ranks


def _add_class(page: TextPage, one: RankClass, name: str, state_width: int) -> None:
    mark, tone = ("> ", Tone.STRONG) if one.blamed else ("  ", Tone.PLAIN)
    state = page.clean(one.state)
    padding = " " * (state_width - width_of(state))
    whole = f"{mark}{name}  {state}{padding}  {page.clean(one.place)}".rstrip()
    if len(name) <= MAX_RANKS_WIDTH and (page.width is None or width_of(whole) <= page.width):
        page.add(whole, tone=tone, whole=True)
        return
    page.add(name.rstrip(), first=mark, tone=tone)
    for text in (state, one.place):
        if text:
            page.add(text, first="      ", tone=tone)
