"""What was measured, with what and where: the lines over the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.report.hosts import format_hosts
from ddpdoctor.report.page import plural
from ddpdoctor.report.ranks import format_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.model.bandwidth import Member, NcclLog
    from ddpdoctor.model.findings import Report
    from ddpdoctor.report.bandwidth.reading import Bandwidth


def describe_run(bench: Bandwidth) -> list[str]:
    """Say who took part, with what, and how the numbers are meant."""
    return [describe_members(bench), describe_conventions(bench), *map(_describe_log, bench.nccl_logs[:1])]


def describe_members(bench: Bandwidth) -> str:
    """Name ranks, hosts, backend, devices and versions; what differs between ranks is said of each."""
    where = f"{plural(len(bench.members), 'rank')} on {format_hosts(bench.hosts)}"
    parts = [
        _alike(bench, lambda member: member.device_name),
        f"torch {_alike(bench, lambda member: member.torch)}",
        *_optional("NCCL", bench, lambda member: member.nccl),
        *_optional("driver", bench, lambda member: member.driver),
    ]
    return f"{where}; {bench.settings.backend} on {', '.join(part for part in parts if part)}"


def describe_conventions(bench: Bandwidth) -> str:
    """Say how the numbers are meant."""
    warm = "cold buffers, beyond the cache" if bench.settings.cold else "warm buffers"
    return f"{warm}; a call takes as long as its slowest rank; GB is 1e9 bytes; busbw as in nccl-tests"


def describe_time(report: Report) -> str:
    """Say when it was measured: "2026-01-02 03:04:05 UTC"."""
    return f"{report.started_at[:19].replace('T', ' ')} UTC"


def _describe_log(log: NcclLog) -> str:
    """Say how NCCL connects, by its own log of one rank."""
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
    """Return what all ranks have, or who has what: "2.13.0 (ranks 0-6), 2.12.0 (rank 7)"."""
    ranks: dict[str, list[int]] = {}
    for member in bench.members:
        ranks.setdefault(read(member), []).append(member.rank)
    if len(ranks) <= 1:
        return next(iter(ranks), "")
    return ", ".join(f"{value or 'unknown'} ({format_ranks(at)})" for value, at in ranks.items())
