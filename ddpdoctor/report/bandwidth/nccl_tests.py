"""Renders measurements in the format of nccl-tests, for programs that parse its output.

The lines follow ``src/common.cu`` and ``src/util.cu`` of https://github.com/NVIDIA/nccl-tests. There is one block per
collective, with out-of-place results on the left and in-place results on the right. The output states the differences.
The time is the median over iterations of the slowest rank, but nccl-tests prints the mean over ranks and iterations.
nccl-tests always measures both halves. Here, an unmeasured half repeats the other one, with "N/A" for wrong elements,
as nccl-tests prints without validation. A blank or "N/A" for any other number would break most parsers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective, Mode
from ddpdoctor.report.bandwidth.measured import read_bandwidth
from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Measurement
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.measured import Bandwidth

PROGRAMS = {
    Collective.ALL_REDUCE: "all_reduce_perf",
    Collective.ALL_GATHER: "all_gather_perf",
    Collective.REDUCE_SCATTER: "reduce_scatter_perf",
    Collective.BROADCAST: "broadcast_perf",
    Collective.REDUCE: "reduce_perf",
    Collective.ALL_TO_ALL: "alltoall_perf",
    Collective.SEND_RECV: "sendrecv_perf",
}
TYPES = {"float32": "float", "float64": "double", "float16": "half"}  # dtypes whose names differ in nccl-tests
# For these, nccl-tests counts one rank's part of the buffer.
SHARED_OUT = {Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL}
ROOTED = {Collective.BROADCAST, Collective.REDUCE}
ROOT, NO_ROOT = 0, -1
ABSENT = "N/A"

TITLE = f"#{'out-of-place':>74}{'in-place':>31}{'':10}"
HEAD = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}" + "  {:>7}  {:>6}  {:>6} {:>6}" * 2
NAMES = ("time", "algbw", "busbw", "#wrong")
UNITS = ("(us)", "(GB/s)", "(GB/s)", "")
VALUES = "  {:>7}  {:>6}  {:>6}  {:>5}" * 2


def render_nccl_tests(report: Report) -> str:
    """Render one block per collective. Prefer throughput, because nccl-tests measures that."""
    bench = read_bandwidth(report)
    collectives = dict.fromkeys(row.collective for row in bench.results)
    lines = [line for collective in collectives for line in _block(bench, collective)]
    return "".join(f"{clean(line)}\n" for line in lines)


def _block(bench: Bandwidth, collective: Collective) -> list[str]:
    measured = [row for row in bench.results if row.collective is collective]
    mode = Mode.THROUGHPUT if any(row.mode is Mode.THROUGHPUT for row in measured) else Mode.LATENCY
    rows = [row for row in measured if row.mode is mode]
    # Describe the settings. A setting is "auto" if the time budget chose it.
    settings = bench.settings
    sizes = [row.size_bytes for row in rows]
    warmup = "auto" if settings.warmup is None else settings.warmup
    iterations = "auto" if settings.iterations is None else settings.iterations
    checked = int(any(row.wrong is not None for row in rows))
    wrong = sum(1 for row in rows if row.wrong)
    halves: dict[tuple[str, int], dict[bool, Measurement]] = {}  # one line per size and dtype
    for row in rows:
        halves.setdefault((row.dtype, row.size_bytes), {})[row.in_place] = row
    known = [row.busbw_gb_s or 0.0 for row in rows if math.isfinite(row.busbw_gb_s or 0.0)]
    average = sum(known) / len(known) if known else 0.0
    places = {row.in_place for row in rows}
    measured_half, other_half = ("in place", "out-of-place") if True in places else ("out of place", "in-place")
    repeated = f"# measured {measured_half} only: the {other_half} half repeats it, with {ABSENT} for #wrong"
    return [
        f"# Collective test starting: {PROGRAMS[collective]}",
        (
            f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} step: {settings.factor}(factor) "
            f"warmup iters: {warmup} iters: {iterations} agg iters: 1 validation: {checked} graph: 0"
        ),
        "#",
        f"# ddpdoctor allreduce-bench, {mode.value}: time is the median over iterations of the slowest rank",
        *([repeated] if len(places) == 1 else []),
        "#",
        "# Using devices",
        *(
            f"#  Rank {one.rank:2d} Group  0 Pid {one.pid:6d} on {one.host:>10} device {one.local_rank:2d} "
            f"[{one.device}] {one.device_name}"
            for one in bench.members
        ),
        "#",
        TITLE,
        HEAD.format("size", "count", "type", "redop", "root", *NAMES, *NAMES),
        HEAD.format("(B)", "(elements)", "", "", "", *UNITS, *UNITS),
        *(_row(measured_places, len(bench.members)) for measured_places in halves.values()),
        f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average:g} ",
        "#",
        f"# Collective test concluded: {PROGRAMS[collective]}",
        "#",
    ]


def _row(places: dict[bool, Measurement], ranks: int) -> str:
    one = next(iter(places.values()))
    count = one.count // ranks if one.collective in SHARED_OUT else one.count
    root = ROOT if one.collective in ROOTED else NO_ROOT
    dtype = TYPES.get(one.dtype, one.dtype)
    halves: list[str] = []
    for is_in_place in (False, True):
        half = places.get(is_in_place, one)
        wrong = f"{half.wrong:g}" if is_in_place in places and half.wrong is not None else ABSENT
        decimals = 0 if half.p50_us >= 10000 else 1 if half.p50_us >= 100 else 2
        # nccl-tests prints a busbw of 0 for one rank, because the factor is 0. Parsers would fail on anything else.
        halves += (f"{half.p50_us:.{decimals}f}", f"{half.algbw_gb_s:.2f}", f"{half.busbw_gb_s or 0.0:.2f}", wrong)
    head = f"{one.size_bytes:12d}  {count:12d}  {dtype:>8}  {one.redop or 'none':>6}  {root:6d}"
    return head + VALUES.format(*halves)
