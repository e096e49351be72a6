"""``Report.data`` of `allreduce-bench` back into the records of the model: all formats draw from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.bandwidth import (
    Advice,
    Arrival,
    Collective,
    Comparison,
    Curve,
    Ending,
    LeftOut,
    Measurement,
    Member,
    Mode,
    NcclLog,
    NodeResult,
    Pair,
    Reason,
    Settings,
)
from ddpdoctor.model.errors import UserError
from ddpdoctor.report.bandwidth.judged import read_advice, read_comparison, read_curve, read_reason
from ddpdoctor.report.fields import Fields, FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.findings import Report

Kind = TypeVar("Kind")

VERB = "allreduce-bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What a report of this verb holds."""

    settings: Settings
    members: tuple[Member, ...]
    results: tuple[Measurement, ...]
    curves: tuple[Curve, ...]
    arrivals: tuple[Arrival, ...]
    pairs: tuple[Pair, ...]
    nodes: tuple[NodeResult, ...]
    left_out: tuple[LeftOut, ...]
    nccl_logs: tuple[NcclLog, ...]
    comparison: Comparison | None
    advice: Advice | None
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    ending: Ending
    phase: str
    """In which it ended, where it did not finish."""
    signal: str | None
    """What interrupted it."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, by their lowest rank."""
        return tuple(dict.fromkeys(member.host for member in self.members))


def is_bandwidth(report: Report) -> bool:
    """Say whether a report is one of this verb."""
    return report.data.get("verb") == VERB


def read_bandwidth(report: Report) -> Bandwidth:
    """Read what was measured; raises ``UserError`` where a file was damaged."""
    if not is_bandwidth(report):
        raise UserError(f"this is no report of `ddpdoctor {VERB}`", help="Only its runs hold measured bandwidths.")
    try:
        return _read(Fields(report.data, "data"))
    except FormatError as error:
        raise UserError(f"the report cannot be read: {error}", help="The file is damaged: measure again.") from error


def _read(data: Fields) -> Bandwidth:
    stop = data.optional("stop")
    return Bandwidth(
        settings=_read_settings(data.required("settings")),
        members=_each(data, "members", _read_member),
        results=_each(data, "results", _read_measurement),
        curves=_each(data, "curves", read_curve),
        arrivals=_each(data, "arrivals", _read_arrival),
        pairs=_each(data, "pairs", _read_pair),
        nodes=_each(data, "nodes", _read_node),
        left_out=_each(data, "left_out", _read_left_out),
        nccl_logs=_each(data, "nccl_logs", _read_nccl_log),
        comparison=read_comparison(comparison) if (comparison := data.optional("comparison")) else None,
        advice=read_advice(advice) if (advice := data.optional("advice")) else None,
        reasons=_each(data, "reasons", read_reason),
        notes=data.texts("notes"),
        ending=stop.one_of("ending", Ending) if stop else Ending.FINISHED,
        phase=stop.text("phase") if stop else "",
        signal=stop.optional_text("signal") if stop else None,
    )


def _each(data: Fields, name: str, read: Callable[[Fields], Kind]) -> tuple[Kind, ...]:
    return tuple(read(item) for item in data.each(name))


def _read_settings(settings: Fields) -> Settings:
    """Read what the drawings show; the other settings stay in the file."""
    return Settings(
        redop=settings.text("redop"),
        min_size_bytes=settings.number("min_size_bytes"),
        max_size_bytes=settings.number("max_size_bytes"),
        factor=settings.number("factor"),
        backend=settings.text("backend"),
        in_place=settings.flag("in_place"),
        cold=settings.flag("cold"),
        iterations=settings.optional_number("iterations"),
        warmup=settings.optional_number("warmup"),
    )


def _read_member(member: Fields) -> Member:
    return Member(
        rank=member.number("rank"),
        local_rank=member.number("local_rank"),
        host=member.text("host"),
        pid=member.number("pid"),
        device=member.text("device"),
        device_name=member.text("device_name"),
        cores=member.number("cores"),
        version=member.text("version"),
        torch=member.text("torch"),
        nccl=member.optional_text("nccl"),
        driver=member.optional_text("driver"),
    )


def _read_measurement(row: Fields) -> Measurement:
    return Measurement(
        collective=row.one_of("collective", Collective),
        dtype=row.text("dtype"),
        redop=row.optional_text("redop"),
        mode=row.one_of("mode", Mode),
        in_place=row.flag("in_place"),
        size_bytes=row.number("size_bytes"),
        count=row.number("count"),
        iterations=row.number("iterations"),
        first_us=row.real("first_us"),
        min_us=row.real("min_us"),
        p50_us=row.real("p50_us"),
        p95_us=row.real("p95_us"),
        p50_low_us=row.real("p50_low_us"),
        p50_high_us=row.real("p50_high_us"),
        cv=row.real("cv"),
        algbw_gb_s=row.real("algbw_gb_s"),
        busbw_gb_s=row.optional_real("busbw_gb_s"),
        warm=row.flag("warm"),
        wrong=row.optional_number("wrong"),
    )


def _read_arrival(arrival: Fields) -> Arrival:
    return Arrival(
        rank=arrival.number("rank"),
        host=arrival.text("host"),
        late_us=arrival.real("late_us"),
        late_p95_us=arrival.real("late_p95_us"),
        share=arrival.real("share"),
        calls=arrival.number("calls"),
    )


def _read_pair(pair: Fields) -> Pair:
    return Pair(
        ranks=_two(pair.numbers("ranks"), pair.path),
        hosts=_two(pair.texts("hosts"), pair.path),
        latency_us=pair.real("latency_us"),
        busbw_gb_s=pair.real("busbw_gb_s"),
        cv=pair.real("cv"),
        alone=pair.flag("alone"),
    )


def _two(values: tuple[Kind, ...], path: str) -> tuple[Kind, Kind]:
    if len(values) != 2:
        raise FormatError(f"{path} has {len(values)} ends, not 2")
    return values[0], values[1]


def _read_node(node: Fields) -> NodeResult:
    return NodeResult(
        host=node.text("host"),
        peer=node.optional_text("peer"),
        ranks=node.numbers("ranks"),
        latency_us=node.real("latency_us"),
        busbw_gb_s=node.optional_real("busbw_gb_s"),
        cv=node.real("cv"),
        alone=node.flag("alone"),
    )


def _read_left_out(left_out: Fields) -> LeftOut:
    return LeftOut(
        collective=left_out.one_of("collective", Collective),
        dtype=left_out.text("dtype"),
        mode=None if left_out.optional_text("mode") is None else left_out.one_of("mode", Mode),
        sizes_bytes=left_out.numbers("sizes_bytes"),
        reason=left_out.text("reason"),
    )


def _read_nccl_log(log: Fields) -> NcclLog:
    transports = log.required("transports")
    return NcclLog(
        rank=log.number("rank"),
        network=log.optional_text("network"),
        interfaces=log.texts("interfaces"),
        transports={name: transports.number(name) for name in transports.values},
    )
