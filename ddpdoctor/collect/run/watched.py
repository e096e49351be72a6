"""Reads watch.json: what the watcher saw of the processes, of which each value is of its kind or left out."""

from __future__ import annotations

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


def read_watch(folder: Path, attempt: int | None) -> dict[str, Any]:
    """Return what the watcher saw: of an attempt that was restarted as it was saved then, else the last."""
    names = [] if attempt is None else [f"watch-{attempt}.json"]
    for name in (*names, "watch.json"):
        try:
            watch = load_json(folder / name)
        except DAMAGED:
            continue
        if isinstance(watch, dict):
            return {**_sound(watch, WATCH_FIELDS), "processes": _rows(watch.get("processes"))}
    return {}


def _rows(rows: Any) -> dict[str, dict[str, Any]]:
    """Return the processes by pid; one of which something is damaged says so, where nothing else is wrong with it."""
    found = {}
    for pid, row in rows.items() if isinstance(rows, dict) else ():
        if isinstance(row, dict) and pid.isascii() and pid.isdecimal() and len(pid) < 20:
            sound = _sound(row, ROW_FIELDS)
            lost = sorted(row.keys() - sound.keys())
            why = f"what the watcher saw of it is damaged ({', '.join(lost)})" if lost else None
            found[pid] = {**sound, "why": sound.get("why") or why}
    return found


def _sound(values: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in kinds or is_sound(value, kinds[name])}


def is_sound(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether a value is of one of these kinds, and a number of no more than 64 bits."""
    return type(value) in kinds and not (isinstance(value, int | float) and not -MOST <= value < MOST)
