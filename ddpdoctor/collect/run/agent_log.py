"""Reads the log of the hook in torch's elastic agent: which workers it started and how each ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.run.evidence import read_text
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.recorder.storage.files import check_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MOST_ATTEMPTS = 2**16
"""Our choice: no launcher restarts a job more often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The start of a worker."""

    pid: int
    rank: int
    local_rank: int
    world_size: int
    at: int
    """In nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a process."""

    pid: int
    code: int
    """An exit status, or a signal's number below zero."""
    at: int
    """In nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The agent begins to stop its workers."""

    at: int
    """In nanoseconds."""


RECORDS: dict[Any, type[WorkerStart | End | Closing]] = {"rank": WorkerStart, "end": End, "closing": Closing}
"""The records that lines of the log hold, by the kind of line. Other kinds only name hooks or a meeting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLog:
    """What torch's elastic agent logged about one attempt."""

    attempt: int = -1
    started: dict[int, WorkerStart] = field(default_factory=dict)
    """By pid."""
    ends: dict[int, End] = field(default_factory=dict)
    """By pid."""
    closing_ns: int | None = None
    superseded_ns: int | None = None
    """When the next attempt began."""
    lacks: tuple[str, ...] = ()
    """The recorder hooks that this version of torch's agent has no place for."""
    meeting: int | None = None
    """The number that the agents of all nodes share for this attempt, or None if they logged none."""

    @property
    def begun_ns(self) -> int | None:
        """When the first worker was started, or None if none was."""
        return min((start.at for start in self.started.values()), default=None)


def read_agent_log(path: Path) -> AgentLog:
    """Return what the agent logged about the last attempt."""
    return log_of(read_entries(path))


def log_of(entries: Sequence[dict[str, Any]], attempt: int | None = None) -> AgentLog:
    """Return what the agent logged about one attempt, by default the last."""
    wanted = max((int(e.get("attempt", -1)) for e in entries), default=-1) if attempt is None else attempt
    mine = [e for e in entries if e.get("attempt") == wanted]
    return AgentLog(
        attempt=wanted,
        started={e["pid"]: decode(WorkerStart, e) for e in mine if e.get("k") == "rank"},
        ends={e["pid"]: decode(End, e) for e in mine if e.get("k") == "end"},
        closing_ns=next((e["at"] for e in mine if e.get("k") == "closing"), None),
        lacks=read_lacks(entries),
        meeting=next((e["meeting"] for e in mine if type(e.get("meeting")) is int), None),
        superseded_ns=min((e["at"] for e in entries if int(e.get("attempt", -1)) == wanted + 1), default=None),
    )


def meetings_of(entries: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Map this node's attempts to the numbers that the agents of all nodes share for them, if they logged any."""
    return {e.get("attempt", -1): e["meeting"] for e in reversed(entries) if type(e.get("meeting")) is int}


def read_lacks(entries: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return the recorder hooks that found no place in torch, from a ring's notes or an agent's log."""
    noted = [entry.get("lacks") for entry in entries if entry.get("k") == "hooks"]
    return tuple(sorted({str(hook) for hooks in noted if isinstance(hooks, list) for hook in hooks}))


def read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all readable entries of an agent's log."""
    text = read_text(path)
    try:
        check_json(text.encode())
    except ValueError:
        return []
    entries = []
    for line in text.splitlines():
        try:
            entry = parse_json(line.encode())
        except ValueError:
            continue
        if isinstance(entry, dict) and _is_agents(entry):
            entries.append(entry)
    return entries


def _is_agents(entry: dict[str, Any]) -> bool:
    kind, attempt = str(entry.get("k")), entry.get("attempt", -1)
    try:
        if kind in RECORDS:
            decode(RECORDS[kind], entry)
    except WrongValue:
        return False
    return type(attempt) is int and -1 <= attempt < MOST_ATTEMPTS
