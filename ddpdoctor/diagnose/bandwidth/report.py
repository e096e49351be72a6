"""Builds the report of `allreduce-bench` from the measurements, and reads a saved one as the baseline of another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.diagnose.bandwidth.reasons import find_reasons
from ddpdoctor.diagnose.bandwidth.stop import describe_rank, stop_findings
from ddpdoctor.diagnose.reports import make_report
from ddpdoctor.model.bandwidth import BenchSettings, Ending, Measurement, Member
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus, report_status
from ddpdoctor.model.findings import Check, Finding, JobStatus, JobSummary, Outcome, RankRow, Severity, now
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.reading import known
from ddpdoctor.rules.bandwidth.compare import Baseline, compare
from ddpdoctor.rules.bandwidth.curve import Measured, build_curves
from ddpdoctor.rules.bandwidth.ddp import advise
from ddpdoctor.rules.engine import judge
from ddpdoctor.rules.registry import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.bandwidth import Advice, Bench, Stop
    from ddpdoctor.model.findings import Report
    from ddpdoctor.model.node import Fleet

GROUP = "bandwidth"
"""The heading of this command's checks."""
Made = TypeVar("Made")
VERB = "allreduce-bench"
Kind = TypeVar("Kind")
_HELP = "Give the report.json, or its folder, of an allreduce-bench that was run with --report-dir or --format json."


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReportOptions:
    """The user's options for the report."""

    command: tuple[str, ...] = ()
    started_at: str = ""
    """ISO 8601, UTC; empty: now."""
    fleet: Fleet | None = None
    """The machines, if they were read."""
    baseline: Baseline | None = None
    """--compare."""
    fail_below: float | None = None
    """--fail-below as a fraction, such as 0.9. None: the baseline is only shown."""
    expect_gb_s: float | None = None
    """--expect."""
    use_reference: bool = True
    """False: --reference none."""
    model_size: int | None = None
    """--model-size, in parameters."""


def build_report(bench: Bench, wanted: BenchReportOptions) -> Report:
    """Judge a bench, finished or not, and build its report. A part that raises becomes a crashed check."""
    crashed: list[Check] = []
    measured = _measured(bench, wanted, crashed)
    advice = _try("advice", lambda: advise(bench, wanted.model_size), None, crashed)
    judged = judge(rules_of("bandwidth"), {Measured: [measured]})
    nothing: tuple[Finding, ...] = ()
    stopped = _try("stop", lambda: stop_findings(bench), nothing, crashed)
    return make_report(
        command=wanted.command,
        started_at=wanted.started_at or now(),
        job=_job(bench),
        findings=(*judged.findings, *stopped),
        checks=(*judged.checks, *crashed),
        ranks=(_row(member, bench.stop) for member in bench.members),
        data=_data(measured, advice, wanted.fleet),
    )


def exit_status(report: Report, fail_on: Severity | None) -> int:
    """Return 130 if the bench was interrupted, 1 for findings at or above ``fail_on``, 3 if a check crashed.

    Return 4 if a requested check was inconclusive or the bench did not finish.
    """
    status = None if report.job is None else report.job.status
    if status is JobStatus.INTERRUPTED:
        return ExitStatus.INTERRUPTED
    found = report_status(report, fail_on)
    return found if found or status is JobStatus.FINISHED else ExitStatus.INCONCLUSIVE


def _measured(bench: Bench, wanted: BenchReportOptions, crashed: list[Check]) -> Measured:
    expect_gb_s, baseline = wanted.expect_gb_s, wanted.baseline
    curves = partial(build_curves, bench, expect_gb_s, use_reference=wanted.use_reference)
    comparison = None
    if baseline is not None:
        comparison = _try("comparison", lambda: compare(bench, baseline, wanted.fail_below), None, crashed)
    return Measured(
        bench=bench,
        curves=_try("curves", curves, (), crashed),
        comparison=comparison,
        reasons=_try("reasons", lambda: find_reasons(bench, wanted.fleet), (), crashed),
        expect_gb_s=expect_gb_s,
        fail_below=wanted.fail_below,
    )


def _try(name: str, make: Callable[[], Made], instead: Made, crashed: list[Check]) -> Made:
    """Return the result of ``make``. If it raises, record a crashed check, so that the measurements are not lost."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - the wall around a rule: these are the parts that rules share
        reason = f"{type(error).__name__}: {error}"
        crashed.append(Check(id=name, group=GROUP, outcome=Outcome.CRASHED, reason=reason))
        return instead


def _job(bench: Bench) -> JobSummary:
    ending = Ending.FINISHED if bench.stop is None else bench.stop.ending
    return JobSummary(
        world_size=len(bench.members),
        nnodes=len({member.host for member in bench.members}),
        status=JobStatus(ending.value),
        exit_status=None,
    )


def _row(member: Member, stop: Stop | None) -> RankRow:
    position = None if stop is None else next((one for one in stop.positions if one.rank == member.rank), None)
    return RankRow(
        rank=member.rank,
        local_rank=member.local_rank,
        host=member.host,
        pid=member.pid,
        state="finished" if stop is None else describe_rank(member.rank, stop),
        gpu=int(member.device.removeprefix("cuda:")) if member.device.startswith("cuda:") else None,
        stack=() if position is None else position.stack,
    )


def _data(measured: Measured, advice: Advice | None, fleet: Fleet | None) -> dict[str, Any]:
    bench = measured.bench
    return {
        "verb": VERB,
        "world_size": len(bench.members),
        "hosts": list(dict.fromkeys(member.host for member in bench.members)),
        **encode(bench),
        "curves": [encode(curve) for curve in measured.curves],
        "loads": _loads(fleet),
        "comparison": measured.comparison and encode(measured.comparison),
        "advice": advice and encode(advice),
        "reasons": [encode(reason) for reason in measured.reasons],
    }


def _loads(fleet: Fleet | None) -> list[dict[str, Any]]:
    """Return the load that other work put on each host, if it was read."""
    nodes = () if fleet is None else fleet.nodes
    loads = [(node.host, known(node.load)) for node in nodes]
    return [{"host": host, **encode(load)} for host, load in loads if load is not None]


def read_baseline(report: Report, name: str, option: str = "--compare") -> Baseline:
    """Return the baseline in a report. ``name`` is the user's argument to the option. Raises ``UserError``."""
    data = report.data
    if data.get("verb") != VERB:
        raise UserError(f"{option} {name} is not a report of allreduce-bench", help=_HELP)
    try:
        baseline = Baseline(
            name=name,
            results=_decode_all(Measurement, data.get("results")),
            members=_decode_all(Member, data.get("members")),
            settings=decode(BenchSettings, data.get("settings")),
        )
    except WrongValue as error:
        raise UserError(f"{option} {name} cannot be read: {error}", help=_HELP) from error
    if not baseline.results:
        raise UserError(f"{option} {name} has no measurements", help=_HELP)
    times = [time for one in baseline.results for time in (one.p50_low_us, one.p50_us, one.p50_high_us)]
    if not all(0 < time < math.inf for time in times):
        raise UserError(f"{option} {name} has an invalid time", help=_HELP)
    return baseline


def check_ranks(baseline: Baseline, world_size: int) -> None:
    """Raise ``UserError`` if the baseline has another number of ranks, because then its data volumes differ."""
    ranks = len(baseline.members)
    if ranks != world_size:
        raise UserError(
            f"--compare {baseline.name} is a run of {count_of(ranks, 'rank')}, and this one has {world_size}",
            help="Compare runs with the same number of ranks.",
        )


def _decode_all(kind: type[Kind], plain: Any) -> tuple[Kind, ...]:
    if not isinstance(plain, list):
        raise WrongValue("a list was expected")
    return tuple(decode(kind, one) for one in plain)
