"""Describes a run in words: the measurement, the setup, how it ended, and the main result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Assessment, Ending, Mode
from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.model.sides import grouped
from ddpdoctor.report.bandwidth.results import name_series
from ddpdoctor.report.findings import count_findings
from ddpdoctor.report.names import format_hosts, format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.bandwidth import Curve, Member, NcclLog
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth

WORDS = {
    Assessment.BELOW: "below the reference",
    Assessment.NOISY: "too noisy to say",
    Assessment.HEALTHY: "healthy",
    Assessment.NO_REFERENCE: "without a reference",
    Assessment.NOT_REACHED: "short of the plateau",
    Assessment.NOT_DEFINED: "n/a",
}
"""In the order in which they are counted."""


def describe_run(bench: Bandwidth) -> list[str]:
    """Describe the members, the conventions of the numbers, and NCCL's connections."""
    return [describe_members(bench), describe_conventions(bench), *map(_describe_log, bench.nccl_logs[:1])]


def describe_members(bench: Bandwidth) -> str:
    """Name ranks, hosts, backend, devices and versions. Values that differ are listed with their ranks."""
    where = f"{count_of(len(bench.members), 'rank')} on {format_hosts(bench.hosts)}"
    parts = [
        _alike(bench, lambda member: member.device_name),
        f"torch {_alike(bench, lambda member: member.torch)}",
        *_optional("NCCL", bench, lambda member: member.nccl),
        *_optional("driver", bench, lambda member: member.driver),
    ]
    return f"{where}; {bench.settings.backend} on {', '.join(part for part in parts if part)}"


def describe_conventions(bench: Bandwidth) -> str:
    """Explain the conventions of the numbers."""
    warm = "cold buffers, beyond the cache" if bench.settings.cold else "warm buffers"
    return f"{warm}; a call takes as long as its slowest rank; GB is 1e9 bytes; busbw as in nccl-tests"


def headline(report: Report, bench: Bandwidth) -> str:
    """Return the verdict, or else how good the curves are."""
    if report.verdict is not None:
        return _sentence(report.verdict.summary)
    if not bench.results:
        return "nothing was measured"
    return _nothing_found(report, bench) + describe_assessments(bench.curves)


def describe_end(report: Report, bench: Bandwidth) -> str:
    """Say how the run ended, and how many findings there are."""
    ended = "" if bench.ending is Ending.FINISHED else f"{bench.ending.value}, results partial"
    parts = (count_of(len(bench.members), "rank"), ended, count_findings(report.findings))
    return ", ".join(filter(None, parts))


def _nothing_found(report: Report, bench: Bandwidth) -> str:
    """Say that there is no verdict. An inconclusive check must not read like "no problem found"."""
    if bench.ending is not Ending.FINISHED:
        return "no cause found"
    unknown = [check.id for check in report.checks if check.outcome is Outcome.INCONCLUSIVE]
    return f"could not tell about {', '.join(unknown)}" if unknown else "no problem found"


def describe_assessments(curves: Sequence[Curve]) -> str:
    """Say how good the curves are: the verdict if there is only one, or else counts."""
    chosen = _choose(curves)
    if not chosen:
        return ""
    if len(chosen) == 1:
        return f": {name_series(chosen[0])}: {_sentence(chosen[0].verdict)}"
    assessments = [curve.assessment for curve in chosen]
    if len(set(assessments)) == 1:
        return f"; all {len(chosen)} curves {WORDS[assessments[0]]}"
    counts = [f"{assessments.count(one)} {word}" for one, word in WORDS.items() if one in assessments]
    return f"; of {len(chosen)} curves {', '.join(counts)}"


def _choose(curves: Sequence[Curve]) -> list[Curve]:
    """Choose one curve per series. Throughput is preferred, because references apply to it."""
    chosen: dict[tuple[object, ...], Curve] = {}
    for curve in curves:
        key = (curve.collective, curve.dtype, curve.redop, curve.in_place)
        if key not in chosen or curve.mode is Mode.THROUGHPUT:
            chosen[key] = curve
    return list(chosen.values())


def _sentence(text: str) -> str:
    return text.removesuffix(".")


def _describe_log(log: NcclLog) -> str:
    """Say how NCCL connects, according to its own log of one rank."""
    ways = ", ".join(f"{name} ({count})" for name, count in log.transports.items())
    interfaces = f" ({', '.join(log.interfaces)})" if log.interfaces else ""
    network = f"network {log.network}{interfaces}" if log.network else ""
    return (
        f"NCCL on rank {log.rank}: {'; '.join(part for part in (network, f'channels {ways}' if ways else '') if part)}"
    )


def _optional(name: str, bench: Bandwidth, read: Callable[[Member], str | None]) -> list[str]:
    known = _alike(bench, lambda member: read(member) or "")
    return [f"{name} {known}"] if known else []


def _alike(bench: Bandwidth, read: Callable[[Member], str]) -> str:
    """Return the value of all ranks, or each value with its ranks: "2.13.0 (ranks 0-6), 2.12.0 (rank 7)"."""
    ranks = grouped((read(member), member.rank) for member in bench.members)
    if len(ranks) <= 1:
        return next(iter(ranks), "")
    return ", ".join(f"{value or 'unknown'} ({format_ranks(at)})" for value, at in ranks.items())
