"""The numbers of a bench as tables, plots and in the form of nccl-tests."""

import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.words import format_about, format_age, format_memory, format_rate, format_time
from ddpdoctor.report.bandwidth.content import count_changes, list_columns, pick_changes
from ddpdoctor.report.bandwidth.figure import check_plot, choose_ticks, render_plot, spread_apart
from ddpdoctor.report.bandwidth.measured import format_gb_s, format_share, format_us, read_bandwidth, sort_series
from ddpdoctor.report.bandwidth.nccl_tests import render_nccl_tests
from ddpdoctor.report.bandwidth.pictures import (
    list_plotted,
    list_references,
    make_node_matrix,
    make_pair_matrix,
    matrix_section,
)
from ddpdoctor.report.blocks import ChartLine, Column, Series
from ddpdoctor.report.text.pictures import ROWS, draw_chart
from ddpdoctor.report.text.report import TextPage, add_blocks, draw_columns, fit_columns
from tests import benches

# What reads the output of nccl-tests reads that of --format nccl-tests.


# As they stand in output of nccl-tests 2.13.
LEFT, RIGHT = "     time   algbw   busbw #wrong", "     (us)  (GB/s)  (GB/s)       "
TITLE = f"#{' ' * 62}out-of-place{' ' * 23}in-place{' ' * 10}"
HEAD = f"#       size         count      type   redop    root{LEFT}{LEFT}"
UNITS = f"#        (B)    (elements)                          {RIGHT}{RIGHT}"

# Expressions of public tools that read these lines.
NUMBER = r"(\d+\.?\d*)"
CSV_CONVERTER = (
    r"^\s*(\d+)\s+(\d+)\s+(float|double|int|half)\s+(sum|prod|max|min|none)\s+(-?\d+)\s+"
    rf"{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)\s+{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+(\d+|N/A)"
)
OUT_OF_PLACE_BUSBW = r"\s+(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)"
AVERAGE = r"^\s*#\s*Avg bus bandwidth\s*:\s*(\S+)\s*$"
OUT_OF_BOUNDS = r"^\s*#\s*Out of bounds values\s*:\s*(\d+)\s*(OK|FAILED)"


def render(rows=None, **keywords):
    rows = benches.results(modes=(Mode.THROUGHPUT,)) if rows is None else rows
    return render_nccl_tests(benches.report(rows=rows, **keywords))


def read_busbw_as_superbench_does(text):
    """Columns are found by their place from the end of the head; the largest out-of-place busbw is the result."""
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if "out-of-place" in line)
    end = next(at for at, line in enumerate(lines) if "Out of bounds values" in line)
    head = lines[start + 1][1:].split()
    busbw = head.index("busbw") - len(head)
    return max(float(line.split()[busbw]) for line in lines[start + 3 : end])


def test_the_heads_are_those_of_the_tool_to_the_letter():
    lines = render().splitlines()
    at = lines.index(TITLE)
    assert lines[at : at + 3] == [TITLE, HEAD, UNITS]


def test_a_row_is_that_of_the_tool_to_the_letter():
    row = benches.measurement(536870912, in_place=True, p50_us=5202.31, algbw_gb_s=103.204, busbw_gb_s=193.504, wrong=0)
    both = (replace(row, in_place=False, p50_us=10314.2), row)

    assert (
        "   536870912     134217728     float     sum      -1    10314  103.20  193.50      0"
        "   5202.3  103.20  193.50      0\n"
    ) in render(both)
    assert "repeats" not in render(both)


def test_public_parsers_read_every_row():
    text = render()
    rows = [line for line in text.splitlines() if not line.startswith("#")]

    assert len(rows) == len(benches.SIZES)
    assert all(re.match(CSV_CONVERTER, line) for line in rows)
    assert [match[0] for match in re.findall(OUT_OF_PLACE_BUSBW, text)] == [str(size) for size in benches.SIZES]
    assert read_busbw_as_superbench_does(text) == 470.14
    assert float(re.search(AVERAGE, text, re.MULTILINE)[1]) == pytest.approx(185.535)
    assert re.search(OUT_OF_BOUNDS, text, re.MULTILINE).groups() == ("0", "OK")


def test_the_half_that_was_not_measured_repeats_the_other_says_so_and_is_not_called_right():
    out_of_place = render()
    assert "# measured out of place only: the in-place half repeats it, with N/A for #wrong" in out_of_place
    assert "0.09      0    20.00    0.05    0.09    N/A\n" in out_of_place

    in_place = render(benches.results(modes=(Mode.THROUGHPUT,), in_place=True))
    assert "# measured in place only: the out-of-place half repeats it, with N/A for #wrong" in in_place
    assert "0.09    N/A    20.00    0.05    0.09      0\n" in in_place


def test_throughput_is_preferred_and_latency_is_taken_where_there_is_nothing_else():
    assert render(benches.results()) == render()
    assert "    26.00    0.04    0.07      0" in render(benches.results(modes=(Mode.LATENCY,)))


@pytest.mark.parametrize(
    ("collective", "program", "count", "redop", "root"),
    [
        (Collective.ALL_REDUCE, "all_reduce_perf", 256, "sum", -1),
        (Collective.ALL_GATHER, "all_gather_perf", 32, "none", -1),
        (Collective.REDUCE_SCATTER, "reduce_scatter_perf", 32, "sum", -1),
        (Collective.BROADCAST, "broadcast_perf", 256, "none", 0),
        (Collective.REDUCE, "reduce_perf", 256, "sum", 0),
        (Collective.ALL_TO_ALL, "alltoall_perf", 32, "none", -1),
        (Collective.SEND_RECV, "sendrecv_perf", 256, "none", -1),
    ],
)
def test_each_collective_is_named_and_counted_as_in_its_program(collective, program, count, redop, root):
    text = render(benches.results((1024,), collective=collective))
    (row,) = [line.split() for line in text.splitlines() if not line.startswith("#")]

    assert f"# Collective test starting: {program}" in text
    assert row[:5] == ["1024", str(count), "float", redop, str(root)]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "float"), ("float64", "double"), ("float16", "half"), ("bfloat16", "bfloat16"), ("int32", "int32")],
)
def test_types_have_the_tools_names(dtype, name):
    assert f"           256  {name:>8}     sum" in render([benches.measurement(1024, dtype=dtype)])


def test_a_block_a_collective():
    rows = [*benches.results((1024,)), *benches.results((1024,), collective=Collective.BROADCAST)]
    assert re.findall(r"concluded: (\w+)", render(rows)) == ["all_reduce_perf", "broadcast_perf"]


def test_wrong_elements_fail_and_unchecked_ones_are_not_right():
    wrong = render([benches.measurement(1024, wrong=3), benches.measurement(4096)])
    assert "# Out of bounds values : 1 FAILED" in wrong
    assert "0.09      3 " in wrong
    assert "validation: 1" in wrong

    unchecked = render([benches.measurement(1024, wrong=None)])
    assert "0.09    N/A    20.00" in unchecked
    assert "validation: 0" in unchecked


def test_one_rank_has_0_as_in_the_tool():
    text = render(benches.results((1024,), modes=(Mode.THROUGHPUT,), ranks=1), ranks=1)
    assert "    20.00    0.05    0.00      0" in text


def test_the_head_says_what_was_asked_for_and_on_what():
    text = render(settings=BenchSettings(backend="nccl", iterations=20, warmup=5, factor=4))

    assert (
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0\n"
    ) in text
    assert "#  Rank  3 Group  0 Pid   4003 on      node0 device  3 [cuda:3] NVIDIA H100 80GB HBM3\n" in text
    assert "warmup iters: auto iters: auto" in render()


# Plots of allreduce-bench: what is drawn, and what cannot be.


def plotted(**keywords):
    return list_plotted(read_bandwidth(benches.report(**keywords)))


def test_both_modes_of_one_series_are_drawn_and_named_by_mode():
    assert [(line.label, line.mode, line.baseline) for line in plotted()] == [
        ("throughput", Mode.THROUGHPUT, False),
        ("latency", Mode.LATENCY, False),
    ]


def test_a_baseline_stands_behind_its_line_with_the_bandwidth_it_had():
    line, baseline, _ = plotted(comparison=benches.comparison())

    assert baseline.baseline
    assert baseline.sizes_bytes == line.sizes_bytes
    assert baseline.busbw_gb_s[-1] == pytest.approx(line.busbw_gb_s[-1] / 0.71)


def test_lines_are_named_by_what_sets_them_apart_and_many_are_of_one_mode():
    rows = [
        row
        for collective in (Collective.ALL_GATHER, Collective.BROADCAST)
        for dtype in ("float32", "bfloat16")
        for row in benches.results(collective=collective, dtype=dtype)
    ]
    assert [line.label for line in plotted(rows=rows)] == [
        "all_gather float32", "all_gather bfloat16", "broadcast float32", "broadcast bfloat16",
    ]  # fmt: skip


def test_the_same_reference_of_several_curves_is_drawn_once():
    bench = read_bandwidth(benches.report(curves=(benches.curve(), benches.curve(dtype="bfloat16"))))
    assert list_references(bench) == (benches.H100,)


@pytest.mark.parametrize(
    ("places", "spread"),
    [([0.2, 0.5], [0.2, 0.5]), ([0.2, 0.2], [0.2, 0.3]), ([0.94, 0.95, 1.0], [0.75, 0.85, 0.95]), ([], [])],
)
def test_names_at_the_ends_of_lines_are_moved_apart_within_the_axes(places, spread):
    assert spread_apart(places, 0.1) == pytest.approx(spread)


@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [
        ([2**10, 2**20, 2**30], [2**power for power in (10, 14, 18, 22, 26, 30)]),
        ([1008, 32736], [2**power for power in range(10, 16)]),
        ([1536], [1536]),
        ([2**20], [2**20]),
    ],
)
def test_the_axis_of_sizes_is_marked_at_powers_of_two(sizes, ticks):
    assert choose_ticks(sizes) == ticks


REPORTS = {
    "everything": benches.everything(),
    "healthy": benches.report(),
    "one rank": benches.one_rank(),
    "one size": benches.report(rows=benches.results((1024,))),
    "nothing": benches.report(rows=(), curves=()),
    "many ranks": benches.report(pairs=benches.pair_matrix(40, per_host=8)),
    "hung": benches.hung(),
}


@pytest.mark.parametrize("name", REPORTS)
def test_whatever_was_measured_can_be_drawn(name):
    assert render_plot(REPORTS[name], ".png").startswith(b"\x89PNG")


def test_an_svg_is_the_same_every_time():
    one = render_plot(REPORTS["healthy"], ".svg")

    assert ET.fromstring(one).tag.endswith("svg")
    assert one == render_plot(REPORTS["healthy"], ".svg")


LOADING = {"src", "href", "xlink:href"}


class Links(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.loaded, self.text, self.tags = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in LOADING and not value.startswith(("#", "data:"))]

    def handle_data(self, data):
        self.text.append(data)


def test_a_page_needs_nothing_else_and_has_the_numbers_as_a_table():
    text = render_plot(REPORTS["everything"], ".html").decode()
    page = Links()
    page.feed(text)

    assert page.loaded == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert "svg" in page.tags
    assert page.tags.count("script") == 1
    results, comparison, pairs, hosts = len(benches.SIZES) + 2, 2, 5, 4
    checks = len(REPORTS["everything"].checks) + 1
    assert page.tags.count("tr") == results + comparison + pairs + hosts + checks
    assert "470.14" in page.text
    assert "Test the cable and the switch port between node0 and node1." in page.text


def test_in_a_page_what_was_collected_is_no_markup():
    text = render_plot(benches.report(notes=("<script>alert(1)</script>",)), ".html").decode()
    assert "<li>&lt;script&gt;" in text


@pytest.mark.parametrize("name", ["a.pdf", "a", "a.png.gz"])
def test_a_plot_of_another_kind_is_refused_with_what_is_possible(name):
    with pytest.raises(UserError, match="cannot be written") as error:
        check_plot(Path(name))
    assert ".png, .svg or .html" in error.value.help


def test_without_matplotlib_the_error_says_how_to_install_it():
    code = (
        "import sys; from importlib.machinery import PathFinder; from pathlib import Path\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] == 'matplotlib' else super().find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without if one is PathFinder else one for one in sys.meta_path]\n"
        "from ddpdoctor.report.bandwidth.figure import check_plot\n"
        "check_plot(Path('a.png'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert "UserError: plots need matplotlib, which is not installed here" in ran.stderr


def test_matplotlib_is_loaded_to_draw_only():
    modules = "ddpdoctor.report.bandwidth.pictures, ddpdoctor.report.bandwidth.figure"
    code = f"import sys, {modules}; print('matplotlib' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert ran.stdout == "False\n"


# Tables, matrices and the small curve of the report of allreduce-bench.


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
