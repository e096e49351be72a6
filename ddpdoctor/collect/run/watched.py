"""Reads watch.json, which holds what the watcher saw, and drops values of the wrong type."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.evidence import DAMAGED, load_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NOTHING = type(None)
WATCH_FIELDS: dict[str, tuple[type, ...]] = {
    "now_ns": (int, NOTHING),
    "ended": (bool,),
    "launcher_pid": (int, NOTHING),
    "launcher_status": (int, NOTHING),
    "stopping_since_ns": (int, NOTHING),
    "interrupted_by": (str, NOTHING),
    "interrupted_ns": (int, NOTHING),
}
ROW_FIELDS: dict[str, tuple[type, ...]] = {
    "state": (str, NOTHING),
    "cpu_share": (int, float, NOTHING),
    "tracer": (int, NOTHING),
    "ended_ns": (int, NOTHING),
    "told_ns": (int, NOTHING),
    "last_progress_ns": (int, NOTHING),
    "code": (int, NOTHING),
    "oom": (bool, NOTHING),
    "why": (str, NOTHING),
    "dumps": (list, NOTHING),
    "children": (list, NOTHING),
    "child_lines": (list, NOTHING),
}
MOST = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the watcher saw of one process; fields of type ``Any`` are checked where they are used."""

    state: str | None = None
    """The state letter in /proc/PID/stat."""
    cpu_share: float | None = None
    tracer: int | None = None
    frozen_since_ns: int | None = None
    last_progress_ns: int | None = None
    told_ns: int | None = None
    """When it received SIGTERM."""
    ended_ns: int | None = None
    code: int | None = None
    oom: bool | None = None
    why: str | None = None
    """Why some facts about it are missing."""
    before_call: Any = None
    dumps: Any = None
    """The parts of its dump file: start offset, end offset, and time of writing."""
    children: Any = None
    child_lines: Any = None
    child_fetches: Any = None
    causes: Any = None
    unrecorded: Any = None
    """Its environment, if it is a rank without a recorder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What the watcher saw of the job."""

    now_ns: int | None = None
    ended: bool = True
    launcher_pid: int | None = None
    launcher_status: int | None = None
    stopping_since_ns: int | None = None
    interrupted_by: str | None = None
    interrupted_ns: int | None = None
    host_causes: Any = None
    processes: Mapping[int, Watched] = field(default_factory=dict)

    def of(self, pid: int) -> Watched:
        """Return what the watcher saw of a process, or ``UNSEEN``."""
        return self.processes.get(pid, UNSEEN)


UNSEEN = Watched()


def read_watch(folder: Path, attempt: int | None) -> Watch:
    """Return what the watcher saw in an attempt: the copy saved at its restart if there is one, else the last state."""
    names = [] if attempt is None else [f"watch-{attempt}.json"]
    for name in (*names, "watch.json"):
        try:
            watch = load_json(folder / name)
        except DAMAGED:
            continue
        if isinstance(watch, dict):
            return parse_watch(watch)
    return Watch()


def parse_watch(watch: Mapping[str, Any]) -> Watch:
    """Return the content of watch.json without values of the wrong type."""
    known = _known(_sound(watch, WATCH_FIELDS), Watch)
    return Watch(**{**known, "processes": _rows(watch.get("processes"))})


def _rows(rows: Any) -> dict[int, Watched]:
    """Return the processes by pid; ``why`` names the damaged fields, unless it already gives another reason."""
    found = {}
    for pid, row in rows.items() if isinstance(rows, dict) else ():
        if isinstance(row, dict) and pid.isascii() and pid.isdecimal() and len(pid) < 20:
            sound = _sound(row, ROW_FIELDS)
            lost = sorted(row.keys() - sound.keys())
            why = f"what the watcher saw of it is damaged ({', '.join(lost)})" if lost else None
            found[int(pid)] = Watched(**{**_known(sound, Watched), "why": sound.get("why") or why})
    return found


def _known(values: Mapping[str, Any], kind: type[Watch | Watched]) -> dict[str, Any]:
    return {one.name: values[one.name] for one in fields(kind) if one.name in values}


def _sound(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in kinds or is_sound(value, kinds[name])}


def is_sound(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value has one of these types and, if it is a number, fits into 64 bits."""
    return type(value) in kinds and not (isinstance(value, int | float) and not -MOST <= value < MOST)
