"""Tables, matrices and the small curve of the report of allreduce-bench."""

from dataclasses import replace

import pytest

from ddpdoctor.model.amounts import format_about, format_age, format_memory, format_rate, format_time
from ddpdoctor.model.bandwidth import Collective, Mode
from ddpdoctor.report.bandwidth.content import count_changes, list_columns, pick_changes
from ddpdoctor.report.bandwidth.measured import format_gb_s, format_share, format_us, sort_series
from ddpdoctor.report.bandwidth.pictures import make_node_matrix, make_pair_matrix, matrix_section
from ddpdoctor.report.blocks import ChartLine, Column, Series
from ddpdoctor.report.text.pictures import ROWS, draw_chart
from ddpdoctor.report.text.report import TextPage, add_blocks, draw_columns, fit_columns
from tests import benches


def draw_matrix(matrix, width):
    """The lines below the title."""
    page = TextPage(width=width, cwd=None)
    add_blocks(page, matrix_section(matrix)[1:])
    return [line.plain for line in page.lines]


def draw_curve(lines, reference, width):
    return draw_chart(Series(title="busbw in GB/s over size", lines=tuple(lines), reference=reference), width)


def column(name, *cells, weight=1, group="", unit=""):
    return Column(group=group, name=name, unit=unit, cells=cells, weight=weight)


def test_columns_stand_right_aligned_under_head_unit_and_group():
    columns = (
        column("size", "1 KiB", "16 MiB"),
        column("min", "9.25", "99.25", group="latency", unit="us"),
        column("p50", "9.50", "123.4", group="latency", unit="us"),
        column("p50", "8.50", "111.0", group="a long name", unit="us"),
    )

    assert draw_columns(columns) == [
        "        - latency --   a lo",
        "  size    min    p50    p50",
        "           us     us     us",
        " 1 KiB   9.25   9.50   8.50",
        "16 MiB  99.25  123.4  111.0",
    ]


def test_the_lightest_column_goes_first_and_one_always_stays():
    columns = tuple(column(name, "12345678", weight=weight) for name, weight in (("a", 3), ("b", 1), ("c", 2)))

    def names(width):
        return [one.name for one in fit_columns(columns, width)]

    assert names(None) == names(28) == ["a", "b", "c"]
    assert names(27) == ["a", "c"]
    assert names(17) == ["a"]
    assert names(1) == ["a"]


def cells(rows, name, group=""):
    (series,) = sort_series(rows)
    return next(one.cells for one in list_columns(series) if (one.name, one.group) == (name, group))


def test_both_modes_of_a_size_share_a_row_and_a_missing_one_is_a_dash():
    rows = [row for row in benches.results(benches.SIZES[:2]) if (row.mode, row.size_bytes) != (Mode.LATENCY, 4096)]

    assert cells(rows, "size") == ("1 KiB", "4 KiB")
    assert cells(rows, "p50", "latency") == ("26.00", "-")
    assert cells(rows, "p50", "throughput") == ("20.00", "20.02")


@pytest.mark.parametrize(("wrong", "shown"), [(0, "0"), (17, "17"), (None, "n/a")])
def test_what_could_not_be_checked_is_not_right(wrong, shown):
    assert cells([benches.measurement(1024, wrong=wrong)], "wrong") == (shown,)


def test_series_keep_their_order_and_sizes_are_sorted():
    rows = [*benches.results((4096, 1024), collective=Collective.BROADCAST), *benches.results((1024,))]
    series = sort_series(rows)

    assert [one.collective for one in series] == [Collective.BROADCAST, Collective.ALL_REDUCE]
    assert [row[Mode.LATENCY].size_bytes for row in series[0].rows] == [1024, 4096]


def test_a_matrix_is_symmetrical_and_marks_the_slowest_pair_and_whom_a_finding_names():
    lines = draw_matrix(make_pair_matrix(benches.pair_matrix(3, slow=(1, 2), per_host=3), {2}), 80)

    assert lines == [
        "         0       1       2",
        "  0      .   11.90   12.00",
        "  1  11.90       .    1.25<",
        "> 2  12.00    1.25<      .",
        "  < the slowest: 1 - 2, 1.25 GB/s; the median is 11.9 GB/s",
        "  > a rank that a finding names",
    ]


def test_hosts_are_named_beside_their_ranks_where_there_are_several():
    assert draw_matrix(make_pair_matrix(benches.pair_matrix(2, slow=None), ()), 80)[1].startswith("  0 node0")


def test_in_a_matrix_of_equals_none_is_the_slowest():
    pairs = tuple(replace(pair, busbw_gb_s=11.8) for pair in benches.pair_matrix(4))
    assert not [line for line in draw_matrix(make_pair_matrix(pairs, ()), 80) if "<" in line]


def test_a_matrix_that_is_too_wide_becomes_a_list_of_its_slowest_pairs():
    lines = draw_matrix(make_pair_matrix(benches.pair_matrix(40, per_host=40), ()), 80)

    assert lines[0] == "   1.25  2 - 3"
    assert lines[-1] == "  the slowest 8 of 780 pairs; the median is 11.9 GB/s; report.json has them all"
    assert len(lines) == 9


def test_of_hosts_the_diagonal_is_one_by_itself_and_never_the_slowest():
    nodes = [replace(node, busbw_gb_s=0.001) if node.peer is None else node for node in benches.node_matrix(slow="")]
    lines = draw_matrix(make_node_matrix(nodes, ("node0", "node1", "node2"), ()), 80)

    assert lines[1].split() == ["node0", "0.0010", "11.90", "11.90"]
    assert not [line for line in lines if "<" in line]


def test_hosts_stand_in_the_order_of_their_ranks_and_not_of_the_rounds():
    rounds = sorted(benches.node_matrix(), key=lambda node: node.host, reverse=True)
    lines = draw_matrix(make_node_matrix(rounds, ("node0", "node1", "node2", "node3"), ()), 80)

    assert lines[0].split() == ["node0", "node1", "node2"]


def test_long_names_of_hosts_are_numbered():
    nodes = [
        replace(node, host=f"{node.host}.cluster.example", peer=node.peer and f"{node.peer}.cluster.example")
        for node in benches.node_matrix()
    ]
    order = tuple(f"node{number}.cluster.example" for number in (0, 1, 2))
    lines = draw_matrix(make_node_matrix(nodes, order, ()), 80)

    assert lines[0].split() == ["[0]", "[1]", "[2]"]
    assert lines[1].split()[:2] == ["[0]", "node0.cluster.example"]


RISE = ChartLine(name="all_reduce", points=tuple((2**power, 2.0**power) for power in range(10, 20)))


def test_a_curve_that_rises_by_a_power_is_a_straight_line():
    drawn = draw_curve([RISE], None, 80)
    rows = [line.partition("|")[2] for line in drawn if "|" in line]

    assert drawn[:2] == ["busbw in GB/s over size", "o all_reduce"]
    assert len(rows) == ROWS
    places = [row.find("o") for row in rows if "o" in row]
    assert places == sorted(places, reverse=True)
    assert sum(row.count("o") for row in rows) == len(RISE.points)
    assert drawn[-1].split() == ["1", "KiB", "512", "KiB"]


def test_each_series_has_its_mark_and_the_reference_is_a_line():
    other = ChartLine(name="broadcast", points=tuple((x, y * 4) for x, y in RISE.points))
    reference = ChartLine(name="8 H100", points=((2**18, 1e6), (2**19, 1e6)))
    drawn = draw_curve([RISE, other], reference, 80)

    assert drawn[1:4] == ["o all_reduce", "x broadcast", "- 8 H100"]
    assert any(line.count("x") == 2 for line in drawn[4:])
    assert any("--" in line for line in drawn[4:])


@pytest.mark.parametrize(
    ("lines", "width"), [([], 80), ([ChartLine(name="one", points=((1024, 1.0),))], 80), ([RISE], 30)]
)
def test_where_there_is_nothing_to_see_nothing_is_drawn(lines, width):
    assert draw_curve(lines, None, width) == []


def test_a_flat_curve_can_be_drawn():
    assert draw_curve([ChartLine(name="flat", points=((1024, 1.0), (4096, 1.0)))], None, 80)


def test_of_a_comparison_the_sizes_below_come_first_then_the_slower_ones():
    below, slower, alike, faster = (
        replace(benches.change(1024, ratio), below=below)
        for ratio, below in ((0.8, True), (0.5, False), (1.01, False), (1.5, False))
    )
    comparison = replace(benches.comparison(), changes=(alike, slower, faster, below), missing=1)

    assert pick_changes(comparison.changes) == [below, slower]
    assert count_changes(comparison) == (
        "4 sizes: 1 below the required share, 1 slower, 1 faster, 1 equal within the noise; 1 size not in the baseline"
    )


def test_a_baseline_of_other_sizes_has_nothing_to_compare():
    comparison = replace(benches.comparison(), changes=(), missing=16)
    assert count_changes(comparison) == "nothing to compare: 16 sizes not in the baseline"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (format_us(18.234), "18.23"),
        (format_us(1234.56), "1234.6"),
        (format_us(36025.4), "36025"),
        (format_us(float("nan")), "n/a"),
        (format_gb_s(466.123), "466.12"),
        (format_gb_s(0.0124), "0.0124"),
        (format_gb_s(None), "n/a"),
        (format_share(0.034), "3%"),
        (format_share(0.004), "0.4%"),
        (format_share(0.0), "0%"),
        (format_share(float("inf")), "n/a"),
        (format_about(5.5 * 2**20), "5.5 MiB"),
        (format_about(300), "300 B"),
        (format_about(2**30 - 1), "1023 MiB"),
        (format_about(1.5 * 2**30), "1.5 GiB"),
        (format_memory(21 * 2**30), "21.0 GiB"),
        (format_memory(380 * 2**20), "380 MiB"),
        (format_age(0), "0 s"),
        (format_age(119), "119 s"),
        (format_age(120), "2 min"),
        (format_age(7200), "2 h"),
        (format_age(200_000), "2 days"),
        (format_rate(466.1), "466 GB/s"),
        (format_rate(0.0124), "0.012 GB/s"),
        (format_time(20_100), "20.1 ms"),
        (format_time(-20_100), "-20.1 ms"),
        (format_time(2.1e6), "2.10 s"),
        (format_time(9.0), "9.00 us"),
    ],
)
def test_numbers_have_the_digits_that_mean_something(written, text):
    assert written == text
