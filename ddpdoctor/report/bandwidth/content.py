"""The report of `allreduce-bench`: measurements, setup, slow ranks, what they mean for DDP; nccl-tests' table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Assessment, Collective, Ending, Mode
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.words import count_of, format_about, format_rate, format_size, format_time, grouped
from ddpdoctor.report import blocks as bl
from ddpdoctor.report.bandwidth.measured import (
    NOT_DEFINED,
    RECORDED,
    VERB,
    curve_pictures,
    format_gb_s,
    format_share,
    format_us,
    list_references,
    make_matrices,
    matrix_picture,
    matrix_section,
    name_series,
    read_bandwidth,
    reference_line,
    sort_series,
)
from ddpdoctor.report.findings import count_findings, places_of
from ddpdoctor.report.lines import clean, format_hosts, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.bandwidth import Change, Comparison, Curve, Measurement, Member
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.measured import Bandwidth, MeasuredCase

# In the order in which they are counted.
ASSESSMENTS = {
    Assessment.BELOW: ("below the reference", bl.Tone.ERROR),
    Assessment.NOISY: ("too noisy to say", bl.Tone.WARNING),
    Assessment.HEALTHY: ("healthy", bl.Tone.GOOD),
    Assessment.NO_REFERENCE: ("without a reference", bl.Tone.STRONG),
    Assessment.NOT_REACHED: ("short of the plateau", bl.Tone.STRONG),
    Assessment.NOT_DEFINED: ("n/a", bl.Tone.STRONG),
}
MISSING = "-"  # shown if this size was not measured in this mode
MODE_WIDTH = max(len(mode.value) for mode in Mode)
MAX_ROWS = 12  # More rows do not help on a screen. The report file has all of them.
# A rank that comes last to this share of the calls is reported. Our choice: the same as for stragglers of a job.
LATE_SHARE = 0.8


def describe_members(bench: Bandwidth) -> str:
    where = f"{count_of(len(bench.members), 'rank')} on {format_hosts(bench.hosts)}"
    nccl = _alike(bench, lambda member: member.nccl or "")
    driver = _alike(bench, lambda member: member.driver or "")
    parts = [
        _alike(bench, lambda member: member.device_name),
        f"torch {_alike(bench, lambda member: member.torch)}",
        f"NCCL {nccl}" if nccl else "",
        f"driver {driver}" if driver else "",
    ]
    return f"{where}; {bench.settings.backend} on {', '.join(part for part in parts if part)}"


def headline(report: Report, bench: Bandwidth) -> str:
    """Return the verdict, or else how good the curves are: what is said of the only one, or counts."""
    if report.verdict is not None:
        return report.verdict.summary.removesuffix(".")
    if not bench.results:
        return "nothing was measured"
    # An inconclusive check must not read like "no problem found".
    unknown = [check.id for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    found = f"could not tell about {', '.join(unknown)}" if unknown else "no problem found"
    found = "no cause found" if bench.ending is not Ending.FINISHED else found
    # One curve for each series: of throughput if it was measured, because references apply to it
    by_series: dict[tuple[object, ...], Curve] = {}
    for curve in bench.curves:
        key = (curve.collective, curve.dtype, curve.redop, curve.in_place)
        if key not in by_series or curve.mode is Mode.THROUGHPUT:
            by_series[key] = curve
    chosen = list(by_series.values())
    if len(chosen) == 1:
        return f"{found}: {name_series(chosen[0])}: {chosen[0].verdict.removesuffix('.')}"
    assessments = [curve.assessment for curve in chosen]
    if len(set(assessments)) == 1:
        return f"{found}; all {len(chosen)} curves {ASSESSMENTS[assessments[0]][0]}"
    counts = [f"{assessments.count(each)} {word}" for each, (word, _) in ASSESSMENTS.items() if each in assessments]
    return found + (f"; of {len(chosen)} curves {', '.join(counts)}" if chosen else "")


def _alike(bench: Bandwidth, read: Callable[[Member], str]) -> str:
    """Return the value of all ranks, or each value with its ranks: "2.13.0 (ranks 0-6), 2.12.0 (rank 7)"."""
    ranks = grouped((read(member), member.rank) for member in bench.members)
    if len(ranks) <= 1:
        return next(iter(ranks), "")
    return ", ".join(f"{value or 'unknown'} ({format_ranks(at)})" for value, at in ranks.items())


# Name, unit, cell and weight of each column of measurements, and its weight in a latency column beside throughput,
# whose bandwidths matter more.
_QUANTITIES: tuple[tuple[str, str, Callable[[Measurement], str], int, int], ...] = (
    ("calls", "", lambda measured: str(measured.iterations), 20, 20),
    ("first", "us", lambda measured: format_us(measured.first_us), 6, 15),
    ("min", "us", lambda measured: format_us(measured.min_us), 11, 60),
    ("p50", "us", lambda measured: format_us(measured.p50_us), 95, 95),
    ("p95", "us", lambda measured: format_us(measured.p95_us), 11, 60),
    ("cv", "", lambda measured: format_share(measured.cv), 50, 55),
    ("algbw", "GB/s", lambda measured: format_gb_s(measured.algbw_gb_s), 70, 2),
    ("busbw", "GB/s", lambda measured: format_gb_s(measured.busbw_gb_s), 92, 3),
)


def comparison_section(comparison: Comparison) -> bl.Section:
    # Sizes below the requested limit come first, then those that are slower beyond the noise, the worst first.
    matter = [change for change in comparison.changes if change.below or change.ratio_high < 1]
    matter.sort(key=lambda change: (not change.below, change.ratio))
    more = [f"and {len(matter) - MAX_ROWS} more rows in report.json"] if len(matter) > MAX_ROWS else []
    columns = tuple(
        bl.Column(
            name, tuple(map(write, matter[:MAX_ROWS])), "", unit, "left" if write is name_series else "right", weight
        )
        for name, unit, weight, write in _CHANGE_COLUMNS
    )
    # The sizes by how they changed: "2 below, 1 slower, 3 faster, 36 equal within the noise"
    changes = comparison.changes
    below = sum(change.below for change in changes)
    slower = sum(change.ratio_high < 1 and not change.below for change in changes)
    faster = sum(change.ratio_low > 1 for change in changes)
    same = len(changes) - below - slower - faster
    counts = {"below the required share": below, "slower": slower, "faster": faster, "equal within the noise": same}
    missing = f"{count_of(comparison.missing, 'size')} not in the baseline"
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    counted = f"{count_of(len(changes), 'size')}: {words}" + (f"; {missing}" if comparison.missing else "")
    counted = counted if changes else f"nothing to compare: {missing}"
    return (
        bl.Heading(f"against {comparison.baseline}"),
        bl.items([f"not alike: {difference}" for difference in comparison.differences], "  "),
        *([bl.Table(columns=columns)] if matter else []),
        bl.items([*more, counted], "  "),
    )


# Name, unit, weight and cell of each column of a table of changes.
_CHANGE_COLUMNS: tuple[tuple[str, str, int, Callable[[Change], str]], ...] = (
    ("", "", 6, name_series),
    ("", "", 7, lambda change: change.mode.value),
    ("size", "", 9, lambda change: format_size(change.size_bytes)),
    ("then", "us", 4, lambda change: format_us(change.then_us)),
    ("now", "us", 4, lambda change: format_us(change.now_us)),
    ("bandwidth", "now / then", 10, lambda change: format_share(change.ratio)),
    ("between", "", 5, lambda change: f"{format_share(change.ratio_low)} and {format_share(change.ratio_high)}"),
    ("", "", 8, lambda change: "below" if change.below else "slower"),
)


def bandwidth_content(report: Report) -> bl.Content:
    bench = read_bandwidth(report)
    series = sort_series(bench.results)
    matrices = make_matrices(report, bench)
    comparison = (comparison_section(bench.comparison),) if bench.comparison is not None else ()
    warm = "cold buffers, beyond the cache" if bench.settings.cold else "warm buffers"
    conventions = f"{warm}; a call takes as long as its slowest rank; GB is 1e9 bytes; busbw as in nccl-tests"
    ended = "" if bench.ending is Ending.FINISHED else f"{bench.ending.value}, results partial"
    status = (count_of(len(bench.members), "rank"), ended, count_findings(report.findings))
    about = [describe_members(bench), conventions]
    for log in bench.nccl_logs[:1]:  # how NCCL connects, by its own log of one rank
        ways = ", ".join(f"{name} ({count})" for name, count in log.transports.items())
        interfaces = f" ({', '.join(log.interfaces)})" if log.interfaces else ""
        parts = (f"network {log.network}{interfaces}" if log.network else "", f"channels {ways}" if ways else "")
        about.append(f"NCCL on rank {log.rank}: {'; '.join(filter(None, parts))}")
    not_measured = []
    for left_out in bench.left_out:
        mode = "" if left_out.mode is None else f" {left_out.mode.value}"
        sizes = [format_size(size) for size in left_out.sizes_bytes]
        several = f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}" if sizes else "all sizes"
        span = sizes[0] if len(sizes) == 1 else several
        not_measured.append(f"{left_out.collective.value} {left_out.dtype}{mode}, {span}: {left_out.reason}")
    # Which rank comes last to most calls, if it is later than a small call takes
    late_section: tuple[bl.Section, ...] = ()
    late = max(bench.arrivals, key=lambda arrival: arrival.late_us, default=None)
    small_us = min((result.p50_us for result in bench.results if result.mode is Mode.LATENCY), default=0.0)
    if late is not None and late.share >= LATE_SHARE and late.late_us > small_us:
        calls = f"is last in {format_share(late.share)} of the calls, {format_time(late.late_us)} after the others"
        words = f"rank {late.rank} on {late.host} {calls} (median); the times above do not include it"
        late_section = ((bl.Text(words),),)
    # How the run was cut short, and where its ranks were
    stop_sections: tuple[bl.Section, ...] = ()
    if bench.stop is not None:
        signal = f" by {bench.stop.signal}" if bench.stop.signal else ""
        phase = f" in phase {bench.stop.phase}" if bench.stop.phase else ""
        seen = "the results above were measured before" if bench.results else "nothing was measured"
        text = f"{bench.ending.value}{signal}{phase}: the results are partial; {seen}"
        stop_sections = ((bl.Text(text, tone=bl.Tone.ERROR),), *places_of(report.ranks, report.verdict))
    said, tone = headline(report, bench), bl.Tone.PLAIN
    throughput = [curve for curve in bench.curves if curve.mode is Mode.THROUGHPUT]
    is_wanted = len(bench.members) > 1 and not matrices
    known = [curve for curve in throughput if curve.plateau_gb_s and curve.assessment is not Assessment.NOISY]
    if report.verdict is None and is_wanted and (throughput or not bench.results) and not known:
        tone, why = bl.Tone.WARNING, [*not_measured, *(curve.verdict.removesuffix(".") for curve in throughput)]
        said = ": ".join(["no full bandwidth was measured" if bench.results else said, *why[:1]])
    return bl.Content(
        headline=said,
        tone=tone,
        status=", ".join(filter(None, status)),
        verb=VERB,
        about=((bl.items(about),),),
        sections=(
            *(_series_section(bench, case) for case in series),
            (_chart(bench, series),),
            *(matrix_section(matrix) for matrix in matrices),
            *late_section,
            *comparison,
            *bl.titled_list("what it means for DDP", bench.advice.text if bench.advice else ()),
            *bl.titled_list("not measured", not_measured),
            *bl.titled_list("to know", bench.notes),
            *stop_sections,
            *_reason_sections(bench),
        ),
        records=bl.Records(
            names=RECORDED, rows=tuple(tuple(getattr(result, name) for name in RECORDED) for result in bench.results)
        ),
        several_hosts=len(bench.hosts) > 1,
        draw_pictures=lambda: (*curve_pictures(bench), *map(matrix_picture, matrices)),
    )


def _series_section(bench: Bandwidth, series: MeasuredCase) -> bl.Section:
    """Return a case's table, whose columns have weights that decide which are dropped, and what its curves say."""
    measured = [next(iter(row.values())) for row in series.rows]
    # Both modes share one correctness pass.
    wrongs = [[result.wrong for result in row.values() if result.wrong is not None] for row in series.rows]
    columns = (
        bl.Column("size", tuple(format_size(result.size_bytes) for result in measured), weight=100),
        bl.Column(name="count", unit="elements", cells=tuple(str(result.count) for result in measured), weight=5),
        *(
            bl.Column(
                group=mode.value,
                name=name,
                unit=unit,
                cells=tuple(write(row[mode]) if mode in row else MISSING for row in series.rows),
                weight=weight_beside if mode is Mode.LATENCY and len(series.modes) > 1 else weight,
            )
            for mode in series.modes
            for name, unit, write, weight, weight_beside in _QUANTITIES
        ),
        bl.Column("wrong", tuple(str(max(each)) if each else NOT_DEFINED for each in wrongs), weight=90),
    )
    of_series = (series.collective, series.dtype, series.redop, series.in_place)
    facts = []
    for curve in sorted(bench.curves, key=lambda curve: list(Mode).index(curve.mode)):
        if (curve.collective, curve.dtype, curve.redop, curve.in_place) != of_series:
            continue
        figures = []
        if curve.plateau_gb_s is not None:
            since = "" if curve.plateau_from_bytes is None else f" from {format_size(curve.plateau_from_bytes)} on"
            spread = "" if curve.plateau_spread is None else f" (spread {format_share(curve.plateau_spread)})"
            figures += [f"plateau {format_rate(curve.plateau_gb_s)}{since}{spread}"]
            figures += [] if curve.half_bytes is None else [f"half of it at {format_about(curve.half_bytes)}"]
        figures += [] if curve.latency_us is None else [f"{format_time(curve.latency_us)} at small sizes"]
        texts = [curve.verdict, *(["; ".join(figures)] if figures else [])]
        if (fit := curve.fit) is not None:
            residual = format_share(fit.residual)
            line = f"t = {format_time(fit.alpha_us)} + S / {format_rate(fit.bandwidth_gb_s)} fits within {residual}"
            texts.append(line if fit.fits else f"t = a + S/B does not fit: it is off by {residual}")
        facts.append(bl.FactEntry(curve.mode.value, tuple(texts), tone=ASSESSMENTS[curve.assessment][1]))
    bad = [number for number, row in enumerate(wrongs) if any(row)]
    return (
        bl.Heading(name_series(series) + (", in place" if series.in_place else "")),
        bl.Table(columns=columns, tones=dict.fromkeys(bad, bl.Tone.ERROR)),
        bl.FactList(tuple(facts), width=MODE_WIDTH + 2),
    )


def _chart(bench: Bandwidth, series: tuple[MeasuredCase, ...]) -> bl.Series:
    """Return the curves of all series. The reference is shown only if it is the same for all."""
    lines = []
    for case in series:
        results = [row[case.modes[-1]] for row in case.rows if case.modes[-1] in row]
        points = [(result.size_bytes, result.busbw_gb_s or 0.0) for result in results]
        known = tuple((size, busbw) for size, busbw in points if busbw and math.isfinite(busbw))
        lines.append(bl.ChartLine(name=name_series(case), points=known))
    references = list_references(bench)
    reference = reference_line(references[0], lines) if len(references) == 1 else None
    return bl.Series(title="busbw in GB/s over size", lines=tuple(lines), reference=reference)


def _reason_sections(bench: Bandwidth) -> tuple[bl.Section, ...]:
    """Return possible reasons for a low number. There may be some even if no number is low."""
    if not bench.reasons:
        return ()
    low = any(curve.assessment is Assessment.BELOW for curve in bench.curves)
    several = len(bench.hosts) > 1
    reasons = []
    for reason in bench.reasons:
        hosts = f"on {format_hosts(reason.hosts)}" if several and reason.hosts else ""
        whom = " ".join(filter(None, (format_ranks(reason.ranks), hosts)))
        reasons.append(bl.Item(f"{whom + ': ' if whom else ''}{reason.text} ({reason.source})", fix=reason.fix))
    title = "what could explain it" if low else "seen on the machines"
    return ((bl.Heading(title), bl.Items(tuple(reasons), mark="  - ")),)


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
    """Render measurements in the format of nccl-tests, for programs that parse its output: one block per collective.

    The lines follow ``src/common.cu`` and ``src/util.cu`` of https://github.com/NVIDIA/nccl-tests. Throughput is
    preferred, because nccl-tests measures that; its time is the mean over ranks and iterations, ours the median over
    iterations of the slowest rank, and the output says so. nccl-tests always measures both halves: here, an unmeasured
    half repeats the other one, with "N/A" for wrong elements, as nccl-tests prints without validation. A blank or "N/A"
    for any other number would break most parsers.
    """
    bench, lines = read_bandwidth(report), []
    settings = bench.settings
    # A setting is "auto" if the time budget chose it.
    warmup, iterations = ("auto" if count is None else count for count in (settings.warmup, settings.iterations))
    calls = f"warmup iters: {warmup} iters: {iterations}"
    for collective, measured in grouped((row.collective, row) for row in bench.results).items():
        mode = Mode.THROUGHPUT if any(row.mode is Mode.THROUGHPUT for row in measured) else Mode.LATENCY
        rows = [row for row in measured if row.mode is mode]
        sizes = [row.size_bytes for row in rows]
        span = f"minBytes {min(sizes)} maxBytes {max(sizes)} step: {settings.factor}(factor)"
        checked = int(any(row.wrong is not None for row in rows))
        wrong = sum(1 for row in rows if row.wrong)
        halves: dict[tuple[str, int], dict[bool, Measurement]] = {}  # one line per size and dtype
        for row in rows:
            halves.setdefault((row.dtype, row.size_bytes), {})[row.in_place] = row
        known = [row.busbw_gb_s or 0.0 for row in rows if math.isfinite(row.busbw_gb_s or 0.0)]
        average = sum(known) / len(known) if known else 0.0
        places = {row.in_place for row in rows}
        half, other = ("in place", "out-of-place") if True in places else ("out of place", "in-place")
        repeated = f"# measured {half} only: the {other} half repeats it, with {ABSENT} for #wrong"
        lines += [
            f"# Collective test starting: {PROGRAMS[collective]}",
            f"# nThread 1 nGpus 1 {span} {calls} agg iters: 1 validation: {checked} graph: 0",
            "#",
            f"# ddpdoctor allreduce-bench, {mode.value}: time is the median over iterations of the slowest rank",
            *([repeated] if len(places) == 1 else []),
            "#",
            "# Using devices",
            *(
                f"#  Rank {member.rank:2d} Group  0 Pid {member.pid:6d} on {member.host:>10} device "
                f"{member.local_rank:2d} [{member.device}] {member.device_name}"
                for member in bench.members
            ),
            "#",
            TITLE,
            HEAD.format("size", "count", "type", "redop", "root", *NAMES, *NAMES),
            HEAD.format("(B)", "(elements)", "", "", "", *UNITS, *UNITS),
            *(_row(both, len(bench.members)) for both in halves.values()),
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# Avg bus bandwidth    : {average:g} ",
            "#",
            f"# Collective test concluded: {PROGRAMS[collective]}",
            "#",
        ]
    return "".join(f"{clean(line)}\n" for line in lines)


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
