"""The matrix of bus bandwidths between ranks or hosts, as numbers that need no color."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_rate, format_time
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.report.bandwidth.numbers import NOT_DEFINED, format_gb_s, format_share
from ddpdoctor.report.blocks import Column, Heading, Table, Text, Tone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.bandwidth import NodeResult, Pair
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.blocks import Block, Section

MAX_ENDS = 32
"""The most ends that a matrix shows. A wider one would be unreadable."""
MAX_LISTED = 8
"""How many of the slowest pairs are listed if the matrix is too wide."""
EMPTY, LOWEST, BLAMED = ".", "<", "> "


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A symmetrical matrix of bus bandwidths, by the positions of both ends, the lower one first.

    A cell on the diagonal is the bandwidth within one end.
    """

    title: str
    noun: str
    """The word for an end: "rank" or "host"."""
    ends: tuple[str, ...]
    heads: tuple[str, ...]
    """Short names of the ends, for the headers of columns."""
    cells: dict[tuple[int, int], float]
    blamed: frozenset[int]
    """Positions of the ends that a finding names."""
    results: dict[tuple[int, int], Pair | NodeResult]
    """All that was measured of each cell."""

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
    """Make the matrix of ranks. ``blamed`` are ranks that findings name."""
    hosts = {rank: host for pair in pairs for rank, host in zip(pair.ranks, pair.hosts, strict=True)}
    ranks = sorted(hosts)
    place = {rank: at for at, rank in enumerate(ranks)}
    several = len(set(hosts.values())) > 1
    return Matrix(
        title=f"pairs of ranks: busbw in GB/s, {_how(all(pair.alone for pair in pairs))}",
        noun="rank",
        ends=tuple(f"{rank} {hosts[rank]}" if several else str(rank) for rank in ranks),
        heads=tuple(map(str, ranks)),
        cells={cell_key(place[pair.ranks[0]], place[pair.ranks[1]]): pair.busbw_gb_s for pair in pairs},
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
        title=f"hosts: busbw in GB/s of two together, {_how(alone)}; on the diagonal of one by itself",
        noun="host",
        ends=hosts if heads == hosts else tuple(f"{head} {host}" for head, host in zip(heads, hosts, strict=True)),
        heads=heads,
        cells={
            cell_key(place[node.host], place[node.peer or node.host]): node.busbw_gb_s
            for node in nodes
            if node.busbw_gb_s is not None
        },
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


def describe_result(one: Pair | NodeResult) -> str:
    """Return what was measured of two ranks, a host, or two hosts, with units."""
    rate = NOT_DEFINED if one.busbw_gb_s is None else format_rate(one.busbw_gb_s)
    visits = f" over {count_of(len(one.busbws_gb_s), 'visit')}" if one.busbws_gb_s else ""
    return f"busbw {rate}, latency {format_time(one.latency_us)}, variation {format_share(one.cv)}{visits}"


def matrix_section(matrix: Matrix) -> Section:
    """Return a matrix with its legend, or the slowest of its pairs if it is too wide."""
    title, slowest = Heading(text=matrix.title), _list_slowest(matrix)
    if len(matrix.ends) > MAX_ENDS:
        return (title, *slowest)
    return (title, _table(matrix, instead=slowest))


def _table(matrix: Matrix, instead: tuple[Block, ...]) -> Table:
    places = range(len(matrix.ends))
    ends = tuple(f"{BLAMED if at in matrix.blamed else ' ' * len(BLAMED)}{end}" for at, end in enumerate(matrix.ends))
    columns = [
        # The blank takes the place of the mark, so that headers align with the digits.
        Column(name=f"{head} ", cells=tuple(_write_cell(matrix, row, at) for row in places))
        for at, head in enumerate(matrix.heads)
    ]
    return Table(
        columns=(Column(name="", cells=ends, align="left"), *columns),
        tones=dict.fromkeys(matrix.blamed, Tone.STRONG),
        instead=instead,
        legend=_legend(matrix),
    )


def _write_cell(matrix: Matrix, row: int, column: int) -> str:
    at = cell_key(row, column)
    if at not in matrix.cells:
        return EMPTY + " " if row == column else NOT_DEFINED + " "
    return format_gb_s(matrix.cells[at]) + (LOWEST if at == matrix.lowest else " ")


def _list_slowest(matrix: Matrix) -> tuple[Block, ...]:
    between = matrix.between
    slowest = sorted(between, key=lambda at: between[at])[:MAX_LISTED]
    columns = (
        Column(name="", cells=tuple(format_gb_s(between[at]) for at in slowest)),
        Column(name="", cells=tuple(f"{matrix.ends[at[0]]} - {matrix.ends[at[1]]}" for at in slowest), align="left"),
    )
    middle = f"; the median is {format_rate(median(between.values()))}" if between else ""
    count = f"the slowest {len(slowest)} of {count_of(len(between), 'pair')}{middle}; report.json has them all"
    return (Table(columns=columns, indent=2), Text(text=count, indent=2))


def _legend(matrix: Matrix) -> tuple[str, ...]:
    between, lowest = matrix.between, matrix.lowest
    lines: tuple[str, ...] = ()
    if lowest is not None:
        one, other = (matrix.ends[at] for at in lowest)
        middle = format_rate(median(between.values()))
        lines = (f"{LOWEST} the slowest: {one} - {other}, {format_rate(between[lowest])}; the median is {middle}",)
    return (*lines, f"{BLAMED}a {matrix.noun} that a finding names") if matrix.blamed else lines


def cell_key(one: int, other: int) -> tuple[int, int]:
    """Return the key of the cell of two positions."""
    return (one, other) if one <= other else (other, one)


def _how(alone: bool) -> str:  # noqa: FBT001 - a word for it
    return "one after the other" if alone else "several at once"
