"""Plots of allreduce-bench: what is drawn, and what cannot be."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ddpdoctor.model.bandwidth import Collective, Mode
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.bandwidth.figure import check_plot, choose_ticks, render_plot, spread_apart
from ddpdoctor.report.bandwidth.measured import read_bandwidth
from ddpdoctor.report.bandwidth.pictures import list_plotted, list_references
from tests import benches


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
    [
        ([0.2, 0.5], [0.2, 0.5]),
        ([0.2, 0.2], [0.2, 0.3]),
        ([0.94, 0.95, 1.0], [0.75, 0.85, 0.95]),
        ([], []),
    ],
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
