"""Reads what the ranks of a trial wrote, one file each; ``recorder/tuning/leaving.py`` writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.tuning import TrialRecord, TrialStop, TriedBlock
from ddpdoctor.recorder.storage.files import parse_json, read_plain

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER = "tuning"
MAX_BYTES = 16 * 2**20
"""Our choice: a line has about 100 bytes, so this is over 100,000 blocks."""
NS_PER_MS = 1e6

Lines = list[dict[str, Any]]


def read_trial(folder: Path) -> TrialRecord:
    """Return what the ranks of a run recorded of a trial; an empty record if there is nothing."""
    ranks = [lines for path in sorted((folder / FOLDER).glob("*.jsonl")) if (lines := _read_lines(path))]
    plan, launch, late = (_first(ranks, key) for key in ("plan", "launch", "late"))
    tries = _last(ranks, "tries")
    end = _end(ranks)
    return TrialRecord(
        settings=_texts(plan.get("plan")),
        late=_texts(late.get("late")),
        rounds=_int(plan.get("rounds")),
        blocks=tuple(_blocks(ranks)),
        refused=tuple(_refused(ranks).items()),
        stop=_stop(end),
        reason=str(end.get("reason", "")),
        models=_int(end.get("models")),
        forwards=_int((plan or launch).get("forwards")),
        trying=str(tries.get("tries", "")),
        round=_int(tries.get("round")),
        needed_steps=_int((plan or launch).get("needs")),
        fits=_texts(launch.get("fits")),
    )


def _read_lines(path: Path) -> Lines:
    """Return the lines of a rank's file. The last one may be cut off."""
    try:
        texts = read_plain(path, MAX_BYTES).splitlines()
    except OSError:
        return []
    return [line for text in texts if (line := _parse(text)) is not None]


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = parse_json(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _blocks(ranks: list[Lines]) -> Iterable[TriedBlock]:
    """Yield the blocks that each rank has ended."""
    found: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    for lines in ranks:
        for line in lines:
            steps = line.get("steps_ns")
            if isinstance(steps, list) and steps and all(isinstance(ns, int) for ns in steps):
                key = (_int(line.get("round")), str(line.get("setting")))
                found.setdefault(key, []).append(tuple(ns / NS_PER_MS for ns in steps))
    for (number, setting), columns in found.items():
        if len(columns) == len(ranks) and len({len(column) for column in columns}) == 1:
            yield TriedBlock(round=number, setting=setting, ranks_ms=tuple(columns))


def _refused(ranks: list[Lines]) -> dict[str, str]:
    """Return the reason for each setting that was refused. The reason of the rank that refused it counts."""
    found: dict[str, str] = {}
    for lines in ranks:
        for line in lines:
            if "refused" in line:
                setting, reason = str(line["refused"]), str(line.get("reason", ""))
                if setting not in found or not reason.startswith("another rank"):
                    found[setting] = reason
    return found


def _end(ranks: list[Lines]) -> dict[str, Any]:
    """Return the end that a rank came to by itself."""
    known = {stop.value for stop in TrialStop}
    return next((line for lines in ranks for line in lines if line.get("end") in known), {})


def _stop(end: dict[str, Any]) -> TrialStop:
    return TrialStop(end["end"]) if "end" in end else TrialStop.CUT_SHORT


def _first(ranks: list[Lines], key: str) -> dict[str, Any]:
    return next((line for lines in ranks for line in lines if key in line), {})


def _last(ranks: list[Lines], key: str) -> dict[str, Any]:
    return next((line for lines in ranks for line in reversed(lines) if key in line), {})


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in value) if isinstance(value, list) else ()


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
