"""What reads the output of nccl-tests reads that of --format nccl-tests."""

import re
from dataclasses import replace

import pytest

from ddpdoctor.model.bandwidth import BenchSettings, Collective, Mode
from ddpdoctor.report.bandwidth.nccl_tests import render_nccl_tests
from tests import benches

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
