"""Appends the hosts that a verdict blames to a file that ``srun --exclude`` reads."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import FaultOrigin

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.model.findings import Report


def exclude_hosts(path: Path, report: Report, file: Path) -> str:
    """Append hosts with a reason and the time, unless they are in the file already. Return what went wrong.

    Only faults of a machine or of the network exclude hosts. A network fault of all hosts of a job excludes none.
    """
    hosts = hosts_to_exclude(report)
    if not hosts or report.verdict is None:
        return ""
    reason = " ".join(f"{report.verdict.code} {report.verdict.kind}: {report.verdict.summary}".split())
    with path.open("a+", encoding="utf-8") as excluded:
        fcntl.flock(excluded, fcntl.LOCK_EX)
        excluded.seek(0)
        known = {line.strip() for line in excluded}
        new = [host for host in hosts if host not in known]
        if new:
            excluded.write(f"# {report.ended_at} {reason} ({file})\n" + "".join(f"{host}\n" for host in new))
            excluded.flush()
            os.fsync(excluded.fileno())
    return f"{', '.join(new)} excluded in {path}" if new else ""


def hosts_to_exclude(report: Report) -> tuple[str, ...]:
    """Return the hosts that the verdict blames for a fault of theirs."""
    verdict = report.verdict
    if verdict is None or verdict.origin not in {FaultOrigin.MACHINE, FaultOrigin.NETWORK}:
        return ()
    named = verdict.hosts or tuple(dict.fromkeys(row.host for row in report.ranks if row.rank in verdict.ranks))
    others = {row.host for row in report.ranks} - set(named)
    return named if others or verdict.origin is FaultOrigin.MACHINE else ()
