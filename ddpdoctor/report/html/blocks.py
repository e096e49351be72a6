"""Draws each kind of block with its macro of ``blocks.html.jinja``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from ddpdoctor.report.blocks import (
    FactList,
    Grid,
    Heading,
    Items,
    Lanes,
    Places,
    Series,
    SourceLines,
    Table,
    Text,
    Tree,
    WaitGraph,
)
from ddpdoctor.report.html.chart import lay_out_chart
from ddpdoctor.report.html.embed import embed
from ddpdoctor.report.html.graph import lay_out_graph
from ddpdoctor.report.html.stacks import list_frames
from ddpdoctor.report.html.timeline import lane_rows, timeline_data

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2 import Environment

    from ddpdoctor.report.blocks import Block

HEAT_LEVELS = 8
"""Shades of a heat map."""


class BlockDrawer:
    """Draws the blocks of one page, and gives those that are linked to or scripted a name of their own."""

    def __init__(self, env: Environment, folder: Path | None = None) -> None:
        env.globals |= {"draw": self.draw, "heat": _heat}
        self._macros: Any = env.get_template("blocks.html.jinja").module
        self._folder = folder
        self._numbers = itertools.count(1)

    def draw(self, block: Block, under: str = "") -> Any:  # noqa: PLR0911 - one for each kind
        """Return the markup of a block. ``under`` is the title above it, which a picture does not repeat."""
        macros, name = self._macros, f"b{next(self._numbers)}"
        match block:
            case Heading():
                return macros.heading(block)
            case Text():
                return macros.text(block)
            case Items():
                return macros.items(block)
            case FactList():
                return macros.facts(block)
            case Table():
                return macros.table(block)
            case Places():
                return macros.places(block)
            case Series():
                return macros.chart(lay_out_chart(block), under)
            case Lanes():
                data = embed(timeline_data(block.timeline), self._folder)
                return macros.lanes(block.timeline, lane_rows(block.timeline), data, name)
            case WaitGraph():
                return macros.graph(block, lay_out_graph(block), name)
            case Tree():
                return macros.tree(block.title, list_frames(block), under)
            case SourceLines():
                return macros.source(block)
            case Grid():
                return macros.grid(block, name, under)


def _heat(level: float) -> int:
    """Return the shade of a level from 0 to 1."""
    return round(min(max(level, 0.0), 1.0) * (HEAT_LEVELS - 1))
