"""The content of `allreduce-bench` reports: measurements, setup, slow ranks, and what they mean for DDP."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_size, format_time
from ddpdoctor.model.bandwidth import Assessment, Mode
from ddpdoctor.report.bandwidth.comparison import comparison_section
from ddpdoctor.report.bandwidth.curves import curve_facts, pick_curves
from ddpdoctor.report.bandwidth.matrix import make_matrices, matrix_section
from ddpdoctor.report.bandwidth.numbers import format_share
from ddpdoctor.report.bandwidth.pictures import curve_pictures, matrix_picture
from ddpdoctor.report.bandwidth.reading import VERB, read_bandwidth
from ddpdoctor.report.bandwidth.results import make_records, name_series, series_table, sort_series
from ddpdoctor.report.bandwidth.run import describe_end, describe_run, headline
from ddpdoctor.report.blocks import ChartLine, Content, Heading, Item, Items, Series, Text, Tone, items, titled_list
from ddpdoctor.report.classes import places_of
from ddpdoctor.report.names import format_hosts, format_ranks

if TYPE_CHECKING:
    from ddpdoctor.model.bandwidth import Arrival, LeftOut, Reason
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth
    from ddpdoctor.report.bandwidth.results import MeasuredCase
    from ddpdoctor.report.blocks import Section

LATE_SHARE = 0.8
"""A rank that comes last to this share of the calls is reported. Our choice: the same as for stragglers of a job."""


def bandwidth_content(report: Report) -> Content:
    """Return the content of a run. Raises ``UserError`` if the report is damaged."""
    bench = read_bandwidth(report)
    series = sort_series(bench.results)
    matrices = make_matrices(report, bench)
    comparison = (comparison_section(bench.comparison),) if bench.comparison is not None else ()
    return Content(
        headline=headline(report, bench),
        status=describe_end(report, bench),
        verb=VERB,
        about=((items(describe_run(bench)),),),
        sections=(
            *(_series_section(bench, one) for one in series),
            (_chart(bench, series),),
            *(matrix_section(one) for one in matrices),
            *_late_sections(bench),
            *comparison,
            *titled_list("what it means for DDP", bench.advice.text if bench.advice else ()),
            *titled_list("not measured", [_describe_left_out(one) for one in bench.left_out]),
            *titled_list("to know", bench.notes),
            *_stop_sections(report, bench),
            *_reason_sections(bench),
        ),
        records=make_records(bench.results),
        several_hosts=len(bench.hosts) > 1,
        pictures=(*curve_pictures(bench), *map(matrix_picture, matrices)),
    )


def _series_section(bench: Bandwidth, series: MeasuredCase) -> Section:
    title = name_series(series) + (", in place" if series.in_place else "")
    return (Heading(text=title), series_table(series), curve_facts(pick_curves(bench.curves, series)))


def _chart(bench: Bandwidth, series: tuple[MeasuredCase, ...]) -> Series:
    """Return the curves of all series. The reference is shown only if it is the same for all."""
    lines = tuple(ChartLine(name=name_series(one), points=_points(one)) for one in series)
    references = {curve.reference for curve in bench.curves if curve.reference is not None}
    sizes = [size for line in lines for size, _ in line.points]
    reference = None
    if len(references) == 1:
        (known,) = references
        since = max(known.min_size_bytes, min(sizes, default=1))
        reference = ChartLine(name=known.text, points=((since, known.gb_s), (max([since, *sizes]), known.gb_s)))
    return Series(title="busbw in GB/s over size", lines=lines, reference=reference)


def _points(series: MeasuredCase) -> tuple[tuple[int, float], ...]:
    mode = series.modes[-1]
    rows = [row[mode] for row in series.rows if mode in row]
    return tuple((one.size_bytes, one.busbw_gb_s) for one in rows if one.busbw_gb_s and math.isfinite(one.busbw_gb_s))


def _late_sections(bench: Bandwidth) -> tuple[Section, ...]:
    late = _find_late(bench)
    return () if late is None else ((Text(text=_describe_late(late)),),)


def _stop_sections(report: Report, bench: Bandwidth) -> tuple[Section, ...]:
    """Return how the run was cut short, and where its ranks were."""
    if bench.stop is None:
        return ()
    signal = f" by {bench.stop.signal}" if bench.stop.signal else ""
    phase = f" in phase {bench.stop.phase}" if bench.stop.phase else ""
    seen = "the results above were measured before" if bench.results else "nothing was measured"
    text = f"{bench.ending.value}{signal}{phase}: the results are partial; {seen}"
    return ((Text(text=text, tone=Tone.ERROR),), *places_of(report.ranks, report.verdict))


def _reason_sections(bench: Bandwidth) -> tuple[Section, ...]:
    """Return possible reasons for a low number. There may be some even if no number is low."""
    if not bench.reasons:
        return ()
    low = any(curve.assessment is Assessment.BELOW for curve in bench.curves)
    several = len(bench.hosts) > 1
    reasons = tuple(Item(text=_describe_reason(one, several=several), fix=one.fix) for one in bench.reasons)
    title = "what could explain it" if low else "seen on the machines"
    return ((Heading(text=title), Items(items=reasons, mark="  - ")),)


def _find_late(bench: Bandwidth) -> Arrival | None:
    """Return the rank that comes last to most calls, if it is later than a small call takes."""
    latest = max(bench.arrivals, key=lambda arrival: arrival.late_us, default=None)
    small = min((one.p50_us for one in bench.results if one.mode is Mode.LATENCY), default=0.0)
    if latest is None or latest.share < LATE_SHARE or latest.late_us <= small:
        return None
    return latest


def _describe_late(late: Arrival) -> str:
    """Say which rank comes late, and that the times of the collectives do not include the delay."""
    share, time = format_share(late.share), format_time(late.late_us)
    calls = f"is last in {share} of the calls, {time} after the others (median)"
    return f"rank {late.rank} on {late.host} {calls}; the times above do not include it"


def _describe_left_out(one: LeftOut) -> str:
    """Say what was not measured, and why."""
    mode = "" if one.mode is None else f" {one.mode.value}"
    sizes = [format_size(size) for size in one.sizes_bytes]
    span = (
        sizes[0] if len(sizes) == 1 else f"{len(sizes)} sizes from {sizes[0]} to {sizes[-1]}" if sizes else "all sizes"
    )
    return f"{one.collective.value} {one.dtype}{mode}, {span}: {one.reason}"


def _describe_reason(reason: Reason, *, several: bool) -> str:
    """Describe a reason with its ranks, hosts and source. ``several``: there is more than one host."""
    hosts = f"on {format_hosts(reason.hosts)}" if several and reason.hosts else ""
    whom = " ".join(part for part in (format_ranks(reason.ranks), hosts) if part)
    return f"{whom + ': ' if whom else ''}{reason.text} ({reason.source})"
