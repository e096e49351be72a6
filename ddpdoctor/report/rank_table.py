"""The ranks of a job that ended badly, those that stand at the same place in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.classes import RankClass, classify
from ddpdoctor.report.page import width_of
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.page import Page

MAX_CLASSES = 40
"""More rows than this do not help on a screen; the report file has them all."""
MAX_RANKS_WIDTH = 28
"""A longer list of ranks stands on lines of its own."""


def add_ranks(page: Page, report: Report) -> None:
    """Add the ranks, those that stand at the same place in one row; ">" marks whom the verdict blames."""
    classes = classify(report)
    if not classes:
        return
    page.gap()
    shown = classes[:MAX_CLASSES]
    names = [_name(page, one) for one in shown]
    names_width = min(max(map(len, names)), MAX_RANKS_WIDTH)
    state_width = max(width_of(page.clean(one.state)) for one in shown)
    for one, name in zip(shown, names, strict=True):
        _add_class(page, one, name.ljust(names_width), state_width)
    if len(classes) > len(shown):
        page.add(f"and {len(classes) - len(shown)} more rows in report.json", first="  ")


def _name(page: Page, one: RankClass) -> str:
    ranks = format_ranks(one.ranks)
    return f"{ranks} on {page.clean(one.host)}" if one.host else ranks


def _add_class(page: Page, one: RankClass, name: str, state_width: int) -> None:
    mark, style = ("> ", "bold") if one.blamed else ("  ", "")
    state = page.clean(one.state)
    padding = " " * (state_width - width_of(state))
    whole = f"{mark}{name}  {state}{padding}  {page.clean(one.place)}".rstrip()
    if len(name) <= MAX_RANKS_WIDTH and (page.width is None or width_of(whole) <= page.width):
        page.add(whole, style=style, whole=True)
        return
    page.add(name.rstrip(), first=mark, style=style)
    page.add(state, first="      ", style=style)
    if one.place:
        page.add(one.place, first="      ", style=style)
