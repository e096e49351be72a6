"""Plots a saved or new run as .png, .svg or .html. matplotlib is optional, and loaded only to draw the first two."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report

PAGE = ".html"
SUFFIXES = (".png", ".svg", PAGE)


def check_plot(path: Path) -> None:
    """Raise ``UserError`` if a plot of this name cannot be drawn. Called before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise UserError(f"a plot cannot be written as {path.name}", help=f"Give a name that ends in {known}.")
    if path.suffix.lower() != PAGE and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "plots need matplotlib, which is not installed here",
            help="Install it: pip install 'ddpdoctor[plot]'. Without it: --plot NAME.html, or --format csv.",
        )


def render_plot(report: Report, suffix: str) -> bytes:
    """Draw a run of `allreduce-bench`. ``suffix`` is one of ``SUFFIXES``. Raises ``UserError`` for other reports."""
    from ddpdoctor.report.bandwidth.figure import draw_figure
    from ddpdoctor.report.bandwidth.reading import read_bandwidth
    from ddpdoctor.report.lines import printable

    bench = read_bandwidth(report)
    if suffix == PAGE:
        from ddpdoctor.report.html.page import render_html

        return printable(render_html(report)).encode()
    drawn = draw_figure(report, bench, suffix.removeprefix("."))
    return printable(drawn.decode()).encode() if suffix == ".svg" else drawn
