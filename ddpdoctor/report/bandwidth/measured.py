"""What `allreduce-bench` measured, as formats use it: series, numbers, curves over the size, and matrices of ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Advice, Bench, Comparison, Curve, Ending, Measurement, Mode, Reason
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import count_of, format_rate, format_time
from ddpdoctor.report import blocks as bl

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.model.bandwidth import Change, Collective, NodeResult, Pair, Reference
    from ddpdoctor.model.findings import Report

VERB = "allreduce-bench"
NOT_DEFINED = "n/a"
# Fields for programs. Their names and order never change. New fields are added at the end.
_RECORDED = (
    "collective", "dtype", "redop", "mode", "in_place", "size_bytes", "count", "iterations", "first_us", "min_us",
    "p50_us", "p95_us", "cv", "algbw_gb_s", "busbw_gb_s", "wrong",
)  # fmt: skip
RECORDED = (*_RECORDED, *(field.name for field in fields(Measurement) if field.name not in _RECORDED))
MAX_BOTH_MODES = 3  # with more series than this, only one mode is drawn, because both would clutter the plot
MAX_ENDS = 32  # The most ends that a matrix shows. A wider one would be unreadable.
MAX_LISTED = 8  # how many of the slowest pairs are listed if the matrix is too wide
EMPTY, LOWEST, BLAMED = ".", "<", "> "
HOW = {True: "one after the other", False: "several at once"}
PALER = "The paler, the slower."


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth(Bench):
    """A bench and what follows from it: the data of a report of this command."""

    curves: tuple[Curve, ...]
    comparison: Comparison | None
    advice: Advice | None
    reasons: tuple[Reason, ...]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, sorted by lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))

    @property
    def ending(self) -> Ending:
        return Ending.FINISHED if self.stop is None else self.stop.ending


def read_bandwidth(report: Report) -> Bandwidth:
    """Decode the data of a report. Raises ``UserError`` if it is damaged or of another command."""
    if "results" not in report.data:
        raise UserError(f"this is not a report of `ddpdoctor {VERB}`", help="Only its runs have measured bandwidths.")
    try:
        return decode(Bandwidth, report.data)
    except WrongValue as error:
        problem = f"the report cannot be read: data.{error}"
        raise UserError(problem, help="The file is damaged: measure again.") from error


def format_us(time_us: float) -> str:
    """Write microseconds as nccl-tests does: two decimals below 100, one below 10000, then none."""
    if not math.isfinite(time_us):
        return NOT_DEFINED
    return f"{time_us:.{2 if time_us < 100 else 1 if time_us < 10000 else 0}f}"


def format_gb_s(gb_s: float | None) -> str:
    """Write a bandwidth with two decimals as nccl-tests does, or four below 1. "n/a" means that there is none."""
    if gb_s is None or not math.isfinite(gb_s):
        return NOT_DEFINED
    return f"{gb_s:.{2 if gb_s >= 1 else 4}f}"


def format_share(share: float) -> str:
    """Write a share as a percentage: "3%", "0.4%"."""
    if not math.isfinite(share):
        return NOT_DEFINED
    percent = share * 100
    return f"{percent:.1f}%" if 0 < abs(percent) < 1 else f"{percent:.0f}%"


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """One collective, dtype and place (in or out), over all its sizes and measured modes."""

    collective: Collective
    dtype: str
    redop: str | None
    in_place: bool
    rows: tuple[dict[Mode, Measurement], ...]  # by size, the smallest first

    @property
    def modes(self) -> tuple[Mode, ...]:
        return tuple(mode for mode in Mode if any(mode in row for row in self.rows))


def sort_series(results: Iterable[Measurement]) -> tuple[MeasuredCase, ...]:
    series: dict[tuple[Collective, str, str | None, bool], dict[int, dict[Mode, Measurement]]] = {}
    for result in results:
        sizes = series.setdefault((result.collective, result.dtype, result.redop, result.in_place), {})
        sizes.setdefault(result.size_bytes, {})[result.mode] = result
    return tuple(MeasuredCase(*key, tuple(sizes[size] for size in sorted(sizes))) for key, sizes in series.items())


def name_series(one: Measurement | Curve | Change | MeasuredCase) -> str:
    """Name a series without its mode: "all_reduce float32 sum"."""
    return " ".join(part for part in (one.collective.value, one.dtype, one.redop) if part)


@dataclass(frozen=True, slots=True)
class Plotted:
    """A line of a plot: times and bandwidths over sizes. A bandwidth may be None."""

    label: str
    mode: Mode
    sizes_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    busbw_gb_s: tuple[float | None, ...]
    low_us: tuple[float, ...] = ()  # the fastest call of each size
    high_us: tuple[float, ...] = ()  # the 95th percentile of each size
    baseline: bool = False


def list_plotted(bench: Bandwidth) -> tuple[Plotted, ...]:
    """List the lines of each series, throughput first. A baseline follows its line."""
    every = sort_series(bench.results)
    both = len(every) <= MAX_BOTH_MODES
    lines = [(series, mode) for series in every for mode in reversed(series.modes if both else series.modes[-1:])]
    # Each line is named by the parts in which lines differ, and a single one by its mode.
    parts = [(series.collective.value, series.dtype, mode.value) for series, mode in lines]
    differing = [at for at, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1] or [-1]
    names = [" ".join(of_line[at] for at in differing) for of_line in parts]
    changes = {_key(change): change for change in bench.comparison.changes} if bench.comparison else {}
    plotted = []
    for (series, mode), name in zip(lines, names, strict=True):
        rows = [row[mode] for row in series.rows if mode in row]
        sizes, times = tuple(row.size_bytes for row in rows), tuple(row.p50_us for row in rows)
        busbws, low = tuple(row.busbw_gb_s for row in rows), tuple(row.min_us for row in rows)
        plotted.append(Plotted(name, mode, sizes, times, busbws, low, tuple(row.p95_us for row in rows)))
        if then := [(row, changes[_key(row)]) for row in rows if _key(row) in changes]:
            # For the same size and collective, bandwidth is proportional to 1 / time.
            busbw = [row.busbw_gb_s and row.busbw_gb_s * row.p50_us / change.then_us for row, change in then]
            sizes, times = tuple(row.size_bytes for row, _ in then), tuple(change.then_us for _, change in then)
            plotted.append(Plotted(f"{name}, baseline", mode, sizes, times, tuple(busbw), baseline=True))
    return tuple(plotted)


def list_references(bench: Bandwidth) -> tuple[Reference, ...]:
    return tuple(dict.fromkeys(curve.reference for curve in bench.curves if curve.reference is not None))


def _key(one: Measurement | Change) -> tuple[object, ...]:
    return one.collective, one.dtype, one.redop, one.mode, one.in_place, one.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A symmetrical matrix of bus bandwidths, by the positions of both ends, the lower one first."""

    title: str
    noun: str  # the word for an end: "rank" or "host"
    ends: tuple[str, ...]
    heads: tuple[str, ...]  # short names of the ends, for the headers of columns
    blamed: frozenset[int]  # positions of the ends that a finding names
    results: dict[tuple[int, int], Pair | NodeResult]  # all that was measured of each cell

    @property
    def cells(self) -> dict[tuple[int, int], float]:
        return {at: one.busbw_gb_s for at, one in self.results.items() if one.busbw_gb_s is not None}

    @property
    def between(self) -> dict[tuple[int, int], float]:
        """The cells of two different ends. The diagonal is left out because it is not comparable."""
        return {at: value for at, value in self.cells.items() if at[0] != at[1] and math.isfinite(value)}

    @property
    def lowest(self) -> tuple[int, int] | None:
        """The slowest pair, or None if all are equally fast."""
        between = self.between
        if not between or min(between.values()) == max(between.values()):
            return None
        return min(between, key=lambda at: between[at])


def make_pair_matrix(pairs: Sequence[Pair], blamed: Iterable[int]) -> Matrix:
    hosts = {rank: host for pair in pairs for rank, host in zip(pair.ranks, pair.hosts, strict=True)}
    ranks = sorted(hosts)
    place = {rank: at for at, rank in enumerate(ranks)}
    several = len(set(hosts.values())) > 1
    return Matrix(
        title=f"pairs of ranks: busbw in GB/s, {HOW[all(pair.alone for pair in pairs)]}",
        noun="rank",
        ends=tuple(f"{rank} {hosts[rank]}" if several else str(rank) for rank in ranks),
        heads=tuple(map(str, ranks)),
        blamed=frozenset(place[rank] for rank in blamed if rank in place),
        results={cell_key(place[pair.ranks[0]], place[pair.ranks[1]]): pair for pair in pairs},
    )


def make_node_matrix(nodes: Sequence[NodeResult], order: Sequence[str], blamed: Iterable[str]) -> Matrix:
    """Make the matrix of hosts in ``order``, single hosts on the diagonal. ``blamed`` are hosts that findings name."""
    seen = dict.fromkeys(name for node in nodes for name in (node.host, node.peer) if name is not None)
    hosts = tuple(dict.fromkeys([*(host for host in order if host in seen), *seen]))
    place = {host: at for at, host in enumerate(hosts)}
    heads = hosts if max(map(len, hosts)) <= len("1234.56") else tuple(f"[{at}]" for at in range(len(hosts)))
    alone = all(node.alone for node in nodes if node.peer is not None)
    return Matrix(
        title=f"hosts: busbw in GB/s of two together, {HOW[alone]}; on the diagonal of one by itself",
        noun="host",
        ends=hosts if heads == hosts else tuple(f"{head} {host}" for head, host in zip(heads, hosts, strict=True)),
        heads=heads,
        blamed=frozenset(place[host] for host in blamed if host in place),
        results={cell_key(place[node.host], place[node.peer or node.host]): node for node in nodes},
    )


def make_matrices(report: Report, bench: Bandwidth) -> list[Matrix]:
    """Make the matrices of a bench, with marks on the ranks and hosts that findings name."""
    ranks = {rank for finding in report.findings for rank in finding.ranks}
    hosts = {host for finding in report.findings for host in finding.hosts}
    pairs = [make_pair_matrix(bench.pairs, ranks)] if bench.pairs else []
    nodes = [make_node_matrix(bench.nodes, bench.hosts, hosts)] if bench.nodes else []
    return [*pairs, *nodes]


def matrix_section(matrix: Matrix) -> bl.Section:
    """Return a matrix with its legend, or the slowest of its pairs if it is too wide."""
    title, between, lowest = bl.Heading(matrix.title), matrix.between, matrix.lowest
    middle = format_rate(median(between.values())) if between else ""
    listed = sorted(between, key=lambda at: between[at])[:MAX_LISTED]
    pairs = tuple(f"{matrix.ends[row]} - {matrix.ends[column]}" for row, column in listed)
    rates = bl.Column("", tuple(format_gb_s(between[at]) for at in listed))
    count = f"the slowest {len(listed)} of {count_of(len(between), 'pair')}" + (middle and f"; the median is {middle}")
    slowest: bl.Section = (
        bl.Table(columns=(rates, bl.Column("", pairs, align="left")), indent=2),
        bl.Text(f"{count}; report.json has them all", indent=2),
    )
    if len(matrix.ends) > MAX_ENDS:
        return (title, *slowest)
    places = range(len(matrix.ends))
    ends = tuple(f"{BLAMED if at in matrix.blamed else ' ' * len(BLAMED)}{end}" for at, end in enumerate(matrix.ends))
    cells = {at: format_gb_s(value) + (LOWEST if at == lowest else " ") for at, value in matrix.cells.items()}
    columns = [bl.Column("", ends, align="left")]
    for at, head in enumerate(matrix.heads):
        # The blank takes the place of the mark, so that headers align with the digits.
        texts = (cells.get(cell_key(row, at), f"{EMPTY if row == at else NOT_DEFINED} ") for row in places)
        columns.append(bl.Column(f"{head} ", tuple(texts)))
    legend: list[str] = []
    if lowest is not None:
        one_end, other_end = (matrix.ends[at] for at in lowest)
        pair = f"{one_end} - {other_end}, {format_rate(between[lowest])}"
        legend += [f"{LOWEST} the slowest: {pair}; the median is {middle}"]
    legend += [f"{BLAMED}a {matrix.noun} that a finding names"] if matrix.blamed else []
    tones = dict.fromkeys(matrix.blamed, bl.Tone.STRONG)
    return (title, bl.Table(columns=tuple(columns), tones=tones, instead=slowest, legend=tuple(legend)))


def cell_key(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one <= other else (other, one)


def curve_pictures(bench: Bandwidth) -> Iterator[bl.Series]:
    """Yield busbw over the size, a separate chart for each reference, and the time of a call over the size."""
    plotted = list_plotted(bench)
    busbw = [line for one in plotted if (line := _line(one, one.busbw_gb_s)).points]
    time = [line for one in plotted if (line := _line(one, one.time_us)).points]
    known = [reference for reference in list_references(bench) if reference.gb_s > 0 and math.isfinite(reference.gb_s)]
    levels: list[bl.ChartLine | None] = [*(reference_line(reference, busbw) for reference in known)]
    for level in (levels or [None]) if busbw else ():
        yield bl.Series(title="busbw in GB/s over size", lines=tuple(busbw), reference=level)
    if time:
        yield bl.Series(title="time of a call in us over size (median)", lines=tuple(time))


def _line(one: Plotted, values: Iterable[float | None]) -> bl.ChartLine:
    points = zip(one.sizes_bytes, values, strict=True)
    return bl.ChartLine(
        name=one.label,
        points=tuple((x, y) for x, y in points if x > 0 and y and y > 0 and math.isfinite(y)),
        is_reference=one.baseline,
    )


def reference_line(reference: Reference, lines: Sequence[bl.ChartLine]) -> bl.ChartLine:
    """Return the level of a reference, from the size from which it applies to the largest."""
    sizes = [size for line in lines for size, _ in line.points]
    first = max(reference.min_size_bytes, min(sizes, default=1))
    return bl.ChartLine(name=reference.text, points=((first, reference.gb_s), (max([first, *sizes]), reference.gb_s)))


def matrix_picture(matrix: Matrix) -> bl.Grid:
    """Return a matrix as a grid. Of many ends, those with the slowest pairs are shown."""
    slowest: dict[int, float] = {}
    for pair, value in matrix.between.items():
        for at in pair:
            slowest[at] = min(value, slowest.get(at, math.inf))
    order = sorted(range(len(matrix.ends)), key=lambda at: slowest.get(at, math.inf))
    shown, lowest = sorted(order[: bl.MAX_COLUMNS]), matrix.lowest
    values = [value for value in matrix.between.values() if value > 0]
    high = max(values, default=0.0)
    # Similar bandwidths get similar shades, since a slow link is slower by factors.
    low = min(*values, high / 10) if values else 0.0
    ends = tuple((bl.MARK if at in matrix.blamed else "") + matrix.ends[at] for at in shown)
    body = tuple(tuple(_cell(matrix, (row, at), lowest, (low, high)) for at in shown) for row in shown)
    named = (f"{bl.MARK}a {matrix.noun} that a finding names",) if matrix.blamed.intersection(shown) else ()
    legend = (PALER, *named, *bl.not_shown(len(matrix.ends) - len(shown), matrix.noun))
    heads = tuple(matrix.heads[at] for at in shown)
    return bl.Grid(matrix.title, ends, heads, body, matrix.noun, matrix.noun, legend)


def _cell(
    matrix: Matrix, ends: tuple[int, int], lowest: tuple[int, int] | None, limits: tuple[float, float]
) -> bl.GridCell:
    row, column = ends
    at = cell_key(row, column)
    result = matrix.results.get(at)
    if result is None or result.busbw_gb_s is None:
        return bl.GridCell("" if row == column else NOT_DEFINED)
    # The slowest pair is a warning if a finding names one of its ends.
    tone = bl.Tone.WARNING if matrix.blamed.intersection(at) else bl.Tone.STRONG
    names = matrix.ends[row] if row == column else f"{matrix.ends[row]} - {matrix.ends[column]}"
    visits = f" over {count_of(len(result.busbws_gb_s), 'visit')}" if result.busbws_gb_s else ""
    rates = f"busbw {format_rate(result.busbw_gb_s)}, latency {format_time(result.latency_us)}"
    return bl.GridCell(
        format_gb_s(result.busbw_gb_s),
        tone=tone if at == lowest else bl.Tone.PLAIN,
        about=f"{matrix.noun} {names}: {rates}, variation {format_share(result.cv)}{visits}",
        level=None if row == column else bl.log_level(result.busbw_gb_s, *limits),
    )
