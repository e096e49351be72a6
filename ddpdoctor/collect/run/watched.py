"""Reads watch.json, which holds what the watcher saw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import damaged_fields, read_record
from ddpdoctor.collect.run.evidence import DAMAGED, load_json
from ddpdoctor.model.facts import attempt_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ddpdoctor.model.facts import BeforeCall, HelperError, HostCauses, ProcessCauses


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedChild:
    """A descendant of a rank."""

    pid: int
    ticks: int
    state: str | None = None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRank:
    """What the watcher saw of one rank."""

    state: str | None = None
    """The state letter in /proc/PID/stat."""
    cpu_share: float | None = None
    tracer: int | None = None
    frozen_since_ns: int | None = None
    last_progress_ns: int | None = None
    starved_ns: int = 0
    asked_to_end_ns: int | None = field(default=None, metadata={"json": "told_ns"})
    """When it received SIGTERM."""
    ended_ns: int | None = None
    code: int | None = None
    oom: bool | None = None
    why: str | None = None
    """Why some facts about it are missing."""
    before_call: BeforeCall | None = None
    dumps: tuple[tuple[int, int, int], ...] = ()
    """The parts of its dump file: start offset, end offset, and time of writing."""
    children: tuple[WatchedChild, ...] = ()
    child_lines: tuple[tuple[str, int, str, int], ...] = ()
    """Lines of its ended children: file, line, function and count."""
    child_fetches: tuple[int, ...] = ()
    """The sums of ``steps.fetch_cells`` over its ended children; empty if none has ended."""
    child_errors: tuple[HelperError, ...] = ()
    """The errors of its ended children."""
    causes: ProcessCauses | None = None
    unrecorded: dict[str, str] | None = None
    """Its environment, if it is a rank without a recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedJob:
    """What the watcher saw of the job."""

    now_ns: int | None = None
    ended: bool = True
    launcher_pid: int | None = None
    launcher_status: int | None = None
    stopping_since_ns: int | None = None
    interrupted_by: str | None = None
    interrupted_ns: int | None = None
    host_causes: HostCauses | None = None
    processes: dict[int, WatchedRank] = field(default_factory=dict)

    def of(self, pid: int) -> WatchedRank:
        """Return what the watcher saw of a process, or ``UNSEEN``."""
        return self.processes.get(pid, UNSEEN)


UNSEEN = WatchedRank()


def read_watch(folder: Path, attempt: int | None) -> WatchedJob:
    """Return what the watcher saw in an attempt: the copy saved at its restart if there is one, else the last state."""
    for name in (attempt_name("watch", attempt), attempt_name("watch")):
        try:
            watch = load_json(folder / name)
        except DAMAGED:
            continue
        if isinstance(watch, dict):
            return parse_watch(watch)
    return WatchedJob()


def parse_watch(watch: Mapping[str, Any]) -> WatchedJob:
    """Return the content of watch.json without damaged values."""
    rows = watch.get("processes")
    found = {
        int(pid): _read_rank(row)
        for pid, row in (rows.items() if isinstance(rows, dict) else ())
        if isinstance(row, dict) and pid.isascii() and pid.isdecimal() and len(pid) < 20
    }
    return read_record(WatchedJob, watch, processes=found)


def _read_rank(row: dict[str, Any]) -> WatchedRank:
    """Return what was seen of one rank; ``why`` names the damaged fields, unless it already gives another reason."""
    seen, lost = read_record(WatchedRank, row), sorted(damaged_fields(WatchedRank, row))
    return replace(seen, why=seen.why or f"what the watcher saw of it is damaged ({', '.join(lost)})") if lost else seen
