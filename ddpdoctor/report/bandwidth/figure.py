"""The plot of a run as .png, .svg or .html: bus bandwidth and time over the size, and the matrices.

It is readable without color. Only this module uses matplotlib, which is optional and loaded only to draw the first two:
its object interface, without windows or global state.
"""

from __future__ import annotations

import importlib.util
import io
import math
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.bandwidth import Mode
from ddpdoctor.model.errors import UserError, install_command
from ddpdoctor.model.words import format_rate, format_size
from ddpdoctor.report.bandwidth import measured
from ddpdoctor.report.bandwidth.content import describe_members, headline
from ddpdoctor.report.lines import clean, format_time, printable, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from ddpdoctor.model.findings import Report

MAX_NUMBERS = 20  # With more ends than this, numbers would overlap. Then only shades and the frame are drawn.
PANEL_CHARACTERS = 62
PAGE = ".html"
SUFFIXES = (".png", ".svg", PAGE)


def draw_matrix_panel(axes: Axes, matrix: measured.Matrix) -> None:
    """Draw a matrix: the darker, the slower. Shades are logarithmic, because slow links are slower by factors."""
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    places = range(len(matrix.ends))
    cells = matrix.cells
    values = [[cells.get((min(row, at), max(row, at)), math.nan) for at in places] for row in places]
    known = [value for row in values for value in row if math.isfinite(value)]
    axes.set_title("\n".join(wrap(matrix.title, PANEL_CHARACTERS)), fontsize=10)
    axes.grid(visible=False)
    if not known:
        return
    low, high = min(known), max(known)
    # With these limits, similar numbers get a similar light shade.
    norm = LogNorm(vmin=min(low, high / 10), vmax=high * 2)
    axes.imshow(values, cmap="Greys_r", norm=norm)
    count = len(matrix.ends)
    size = 9 if count <= 8 else 6.5 if count <= 16 else 5.5
    for row, line in enumerate(values if count <= MAX_NUMBERS else ()):
        for at, value in enumerate(line):
            if math.isfinite(value):
                color = "white" if norm(value) < 0.5 else "black"
                axes.text(at, row, f"{value:.3g}", ha="center", va="center", color=color, fontsize=size)
    said = "the darker, the slower"
    if matrix.lowest is not None:
        one, other = (clean(matrix.ends[at]) for at in matrix.lowest)
        said += f"; framed: {one} - {other}, {format_rate(cells[matrix.lowest])}"
    said += "; >: named by a finding" if matrix.blamed else ""
    axes.set_xlabel("\n".join(wrap(said, PANEL_CHARACTERS)))
    for across, down in (matrix.lowest, matrix.lowest[::-1]) if matrix.lowest else ():
        axes.add_patch(Rectangle((across - 0.5, down - 0.5), 1, 1, fill=False, linewidth=2.5, edgecolor="#D55E00"))
    step = math.ceil(count / MAX_NUMBERS)  # as many names as fit
    shown = range(0, count, step)
    axes.set_yticks(shown, [f"{'> ' if at in matrix.blamed else ''}{clean(matrix.ends[at])}" for at in shown])
    axes.set_xticks(shown, [clean(matrix.heads[at]) for at in shown], rotation=0 if step == 1 else 90)


# Most color-blind people can tell these apart: Okabe and Ito, https://jfly.uni-koeln.de/color/.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = {Mode.THROUGHPUT: "-", Mode.LATENCY: "--"}
BASELINE_STYLE = ":"
MAX_LABELLED = 6  # more lines than this get a legend, because labels at their ends would overlap
WIDTH_IN, CURVES_IN, MATRIX_IN = 13.0, 5.6, 5.2
DPI = 130
# For labels at the ends of lines: most characters, inches per character, inches of the axes, share of their height.
MAX_LABEL, CHARACTER_IN, AXES_IN, LABEL_HEIGHT = 30, 0.075, 5.6, 0.045
MAX_TICKS = 6
# Sizes are rounded so that they divide over the ranks. The rounding changes log2 of a size by at most this much.
NEAR = 0.1
TITLE_CHARACTERS = 120


def draw_figure(report: Report, bench: measured.Bandwidth, file_format: str) -> bytes:
    """Draw the figure as "png" or "svg". SVG text is drawn as shapes, because fonts differ between machines."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "path", "svg.hashsalt": "ddpdoctor", "font.size": 9.5, "axes.grid": True,
        "text.parse_math": False,  # a "$" in a name is a dollar
    }  # fmt: skip
    with mpl.rc_context(settings):
        matrices = measured.make_matrices(report, bench)
        heights = (CURVES_IN, MATRIX_IN) if matrices else (CURVES_IN,)
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout="constrained")
        parts: Any = figure.subfigures(1 + bool(matrices), 1, height_ratios=heights, squeeze=False)
        busbw, time = parts[0, 0].subplots(1, 2)
        draw_curves(busbw, time, bench)
        if matrices:
            panels = parts[1, 0].subplots(1, len(matrices), squeeze=False)[0]
            for panel, matrix in zip(panels, matrices, strict=True):
                draw_matrix_panel(panel, matrix)
        series = measured.sort_series(bench.results)
        names = dict.fromkeys(case.collective.value for case in series)
        what = measured.name_series(series[0]) if len(series) == 1 else ", ".join(names)
        title = "\n".join(wrap(clean(": ".join(filter(None, (what, describe_members(bench))))), TITLE_CHARACTERS))
        said = "\n".join(wrap(clean(headline(report, bench)), TITLE_CHARACTERS))
        figure.suptitle(f"{title}\n{said}", fontsize=11)
        buffers = "cold buffers" if bench.settings.cold else "warm buffers"
        made = f"ddpdoctor {report.tool_version}, {format_time(report.started_at)}, {buffers}"
        figure.supxlabel(made, fontsize=8.5)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=file_format, dpi=DPI, metadata={"Date": None} if file_format == "svg" else None)
    return drawn.getvalue()


def draw_curves(busbw: Axes, time: Axes, bench: measured.Bandwidth) -> None:
    lines = measured.list_plotted(bench)
    _prepare_axes(busbw, "bus bandwidth in GB/s (1e9 bytes)")
    shaded = len(lines) <= MAX_LABELLED
    _prepare_axes(time, "time of a call in us: median" + (", shaded from min to p95" if shaded else ""))
    number = -1
    for line in lines:
        number += not line.baseline  # a baseline has the color and the marker of its line
        color, marker = COLORS[number % len(COLORS)], MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
        known = [(x, y) for x, y in zip(line.sizes_bytes, line.busbw_gb_s, strict=True) if y and math.isfinite(y)]
        _draw_line(busbw, line, known, color, marker)
        _draw_line(time, line, list(zip(line.sizes_bytes, line.time_us, strict=True)), color, marker)
        if line.low_us and shaded:
            time.fill_between(line.sizes_bytes, line.low_us, line.high_us, color=color, alpha=0.13, linewidth=0)
    if not any(value for line in lines for value in line.busbw_gb_s):
        why = "n/a: one rank has no bus bandwidth" if lines else "nothing was measured"
        busbw.text(0.5, 0.5, why, transform=busbw.transAxes, ha="center")
        busbw.set_yticks([], minor=False)
        busbw.set_yticks([], minor=True)
    sizes = sorted({size for line in lines for size in line.sizes_bytes})
    if not sizes:
        return
    first, last = sizes[0], sizes[-1]
    for reference in measured.list_references(bench):
        # The line is thick at the sizes to which the reference applies. Its label is at the left end.
        level, start = reference.gb_s, min(max(reference.min_size_bytes, first), last)
        busbw.plot([first, last], [level] * 2, color="black", linestyle="-.", linewidth=0.6)
        busbw.plot([start, last], [level] * 2, color="black", linestyle="-.", linewidth=1.8)
        if reference.high_gb_s is not None:
            busbw.fill_between([start, last], level, reference.high_gb_s, color="black", alpha=0.15, linewidth=0)
        text = f"reference {format_rate(level)}: {clean(reference.text)}"
        busbw.annotate(text, (first, level), xytext=(0, 4), textcoords="offset points", fontsize=8.5, va="bottom")
        low, high = busbw.get_ylim()
        busbw.set_ylim(low, max(high, level * 2))
    for axes in (busbw, time):
        _finish_axes(axes, sizes)


def _draw_line(axes: Axes, line: measured.Plotted, points: list[tuple[int, float]], color: str, marker: str) -> None:
    if not points:
        return
    across, up = zip(*points, strict=True)
    axes.plot(
        across,
        up,
        color=color,
        marker=marker,
        markersize=4.5,
        linewidth=1.4,
        label=line.label,
        markerfacecolor="white" if line.baseline or line.mode is Mode.LATENCY else color,
        linestyle=BASELINE_STYLE if line.baseline else STYLES[line.mode],
        zorder=1.9 if line.baseline else 2,
    )


def _prepare_axes(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("size")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(visible=True, which="major", alpha=0.35)


def _finish_axes(axes: Axes, sizes: Sequence[int]) -> None:
    ticks = choose_ticks(sizes)
    axes.set_xticks(ticks, [format_size(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # An axis within one decade may have no major tick.
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if high / low < 10 else "")
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    longest = max((len(str(line.get_label())) for line in named), default=0)
    if len(named) > MAX_LABELLED or longest > MAX_LABEL:
        axes.legend(fontsize=8, framealpha=0.9)
        return
    last = sizes[-1]
    space = (longest * CHARACTER_IN + 0.2) / AXES_IN
    axes.set_xlim(sizes[0] / 1.5, last * (last * 1.5 / sizes[0]) ** (space / (1 - space)) * 1.5)
    # Each name stands beside the right end of its line. Names that would overlap are moved apart, within the axes.
    bottom, top = (math.log(limit) for limit in axes.get_ylim())
    ordered = sorted(named, key=_end_height)
    shares = [(math.log(_end_height(line)) - bottom) / (top - bottom) for line in ordered]
    for line, share in zip(ordered, spread_apart(shares, LABEL_HEIGHT), strict=True):
        height = math.exp(bottom + share * (top - bottom))
        axes.text(last * 1.4, height, str(line.get_label()), fontsize=8.5, color=line.get_color(), va="center")


def choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Choose at most six powers of two between the smallest and largest size, or those two sizes if there is none."""
    first, last = math.ceil(math.log2(sizes[0]) - NEAR), math.floor(math.log2(sizes[-1]) + NEAR)
    step = max(1, math.ceil((last - first + 1) / MAX_TICKS))
    return [2**power for power in range(first, last + 1, step)] or sorted({sizes[0], sizes[-1]})


def spread_apart(places: Sequence[float], apart: float) -> list[float]:
    """Move ascending positions between 0 and 1 so that each is ``apart`` from the next and none is above 1."""
    spread: list[float] = []
    for place in places:
        spread.append(max(place, spread[-1] + apart) if spread else place)
    ceiling = 1.0 - apart / 2
    for at in reversed(range(len(spread))):
        spread[at] = min(spread[at], ceiling)
        ceiling = spread[at] - apart
    return spread


def _end_height(line: Line2D) -> float:
    heights: Any = line.get_ydata()
    return float(heights[-1])


def check_plot(path: Path) -> None:
    """Raise ``UserError`` if a plot of this name cannot be drawn. Called before anything is measured."""
    if path.suffix.lower() not in SUFFIXES:
        known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        raise UserError(f"a plot cannot be written as {path.name}", help=f"Give a name that ends in {known}.")
    if path.suffix.lower() != PAGE and importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "plots need matplotlib, which is not installed here",
            help=f"Install it: {install_command('plot')}. Without it: --plot NAME.html, or --format csv.",
        )


def render_plot(report: Report, suffix: str) -> bytes:
    """Draw a run of `allreduce-bench`. ``suffix`` is one of ``SUFFIXES``. Raises ``UserError`` for other reports."""
    bench = measured.read_bandwidth(report)
    if suffix == PAGE:
        from ddpdoctor.report.html.page import render_html

        return printable(render_html(report)).encode()
    drawn = draw_figure(report, bench, suffix.removeprefix("."))
    return printable(drawn.decode()).encode() if suffix == ".svg" else drawn
