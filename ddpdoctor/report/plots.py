"""Plots a saved or new run as .png, .svg or .html. matplotlib is an optional dependency, loaded only to draw."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report

SUFFIXES = (".png", ".svg", ".html")


def check_plot(path: Path) -> None:
    """Raise ``UserError`` if a plot of this name cannot be drawn. Called before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise UserError(f"a plot cannot be written as {path.name}", help=f"Give a name that ends in {known}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "plots need matplotlib, which is not installed here",
            help="Install it: pip install 'ddpdoctor[plot]'. The numbers are in --format csv without it.",
        )


def render_plot(report: Report, suffix: str) -> bytes:
    """Draw a run of `allreduce-bench`. ``suffix`` is one of ``SUFFIXES``. Raises ``UserError`` for other reports."""
    from ddpdoctor.report.bandwidth.figure import draw_figure
    from ddpdoctor.report.bandwidth.reading import read_bandwidth
    from ddpdoctor.report.html import render_html
    from ddpdoctor.report.lines import printable

    bench = read_bandwidth(report)
    if suffix == ".html":
        return printable(render_html(report, draw_figure(report, bench, "svg"))).encode()
    drawn = draw_figure(report, bench, suffix.removeprefix("."))
    return printable(drawn.decode()).encode() if suffix == ".svg" else drawn
