"""Reads a run folder, live or years later, into the facts of a job."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import ranks
from ddpdoctor.collect.answers import find_answers
from ddpdoctor.collect.machine import load_machine
from ddpdoctor.collect.nccl_warnings import read_warnings
from ddpdoctor.collect.saved_causes import read_host_causes
from ddpdoctor.collect.steps import find_children
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import GroupState, Job, Rank
from ddpdoctor.recorder import reading

if TYPE_CHECKING:
    from pathlib import Path

RUN_FORMAT = "ddpdoctor-run"
RUN_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLog:
    """What torch's elastic agent said of one attempt."""

    attempt: int = -1
    started: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By pid: rank, local_rank, world_size, at."""
    ends: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By pid: code, at."""
    closing_ns: int | None = None


def read_run(folder: Path) -> dict[str, Any]:
    """Return run.json: what was started, when and how.

    Raises:
        UserError: the folder is no run folder, or its run.json is damaged.
    """
    run = _load(folder / "run.json")
    if not isinstance(run, dict) or run.get("format") != RUN_FORMAT:
        raise UserError(
            f"{folder} is not a run folder of ddpdoctor",
            help="give the folder that `ddpdoctor wrap` named at its end (--report-dir)",
        )
    if run.get("version") != RUN_VERSION:
        raise UserError(f"{folder} has version {run.get('version')!r}, this ddpdoctor reads {RUN_VERSION}")
    return run


def read_job(folder: Path, attempt: int | None = None) -> Job:
    """Return the facts of one attempt (by default the last) of the job that a run folder holds.

    Raises:
        UserError: see ``read_run``.
    """
    run = read_run(folder)
    watch = _load(folder / "watch.json")
    watch = watch if isinstance(watch, dict) else {}
    agent = read_agent_log(folder / "agent.jsonl", attempt)
    found = _read_ranks(folder, agent, watch, run)
    now_ns = int(watch.get("now_ns") or max([r.ended_ns or r.last_progress_ns or 0 for r in found], default=0))
    nproc, nnodes = run.get("nproc"), int(run.get("nnodes") or 1)
    asked = nproc * nnodes if isinstance(nproc, int) else None
    return Job(
        now_ns=now_ns,
        hang_timeout_s=float(run.get("hang_timeout_s") or 300),
        ranks=_share_groups(found),
        world_size=asked if asked != 1 or not found else None,
        nnodes=nnodes,
        local_ranks_expected=nproc if isinstance(nproc, int) else None,
        ended=bool(watch.get("ended", True)),
        launcher_status=watch.get("launcher_status"),
        launched_ns=int(run.get("launched_ns") or 0),
        stopping_since_ns=watch.get("stopping_since_ns") or agent.closing_ns,
        interrupted_by=watch.get("interrupted_by"),
        node_rank=run.get("node_rank"),
        debug_level=str(run.get("debug_level") or "OFF"),
        torch_version=run.get("torch_version"),
        host_causes=read_host_causes(watch.get("host_causes")),
        machine=load_machine(folder),
        nccl_lines=read_warnings(folder),
    )


def read_agent_log(path: Path, attempt: int | None = None) -> AgentLog:
    """Return what the agent logged of one attempt, by default the last."""
    entries = []
    for line in _text(path).splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    wanted = max((int(e.get("attempt", -1)) for e in entries), default=-1) if attempt is None else attempt
    mine = [e for e in entries if e.get("attempt") == wanted]
    return AgentLog(
        attempt=wanted,
        started={int(e["pid"]): e for e in mine if e.get("k") == "rank"},
        ends={int(e["pid"]): e for e in mine if e.get("k") == "end"},
        closing_ns=next((int(e["at"]) for e in mine if e.get("k") == "closing"), None),
    )


def _read_ranks(folder: Path, agent: AgentLog, watch: dict[str, Any], run: dict[str, Any]) -> tuple[Rank, ...]:
    contents = _read_rings(folder / "rings") | _read_rings(folder / "evidence", "*.held")
    begun = min((int(e["at"]) for e in agent.started.values()), default=0)
    sources = ranks.find_ranks(agent.started, contents, begun)
    stop_ns = watch.get("stopping_since_ns") or agent.closing_ns
    context = ranks.Context(
        folder=folder,
        host=str(run.get("host") or "localhost"),
        attempt=max(agent.attempt, 0),
        ends=agent.ends | _child_ends(contents),
        stop_ns=min(filter(None, [stop_ns, agent.closing_ns]), default=None),
        watched=watch.get("processes") or {},
        contents=contents,
        children=find_children(contents),
        answers=find_answers(folder / "evidence"),
        lost=_read_lost(folder),
    )
    return tuple(sorted((ranks.read_rank(source, context) for source in sources), key=lambda rank: rank.rank))


def _read_rings(folder: Path, pattern: str = "*.ring") -> dict[int, reading.RingContent]:
    """Return the rings by pid, the latest where a pid came back. Damaged ones are left out."""
    found: dict[int, reading.RingContent] = {}
    for path in sorted(folder.glob(pattern)):
        try:
            content = reading.read_ring_file(path)
        except (OSError, reading.DamagedRingError):
            continue
        known = found.get(content.pid)
        if known is None or known.start_ticks <= content.start_ticks:
            found[content.pid] = content
    return found


def _child_ends(contents: dict[int, reading.RingContent]) -> dict[int, dict[str, Any]]:
    notes = (note for content in contents.values() for note in content.notes if note.get("k") == "child_end")
    return {int(note["pid"]): note for note in notes}


def _read_lost(folder: Path) -> dict[int, str]:
    """Return by pid why a process could not be recorded."""
    found = {}
    for path in folder.glob("lost-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit():
            found[int(pid)] = _text(path).partition("\n")[2] or "no reason given"
    return found


def _share_groups(found: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Give groups whose members only some ranks could tell to all ranks that used them."""
    members = {group.name: group.ranks for rank in found for group in rank.groups if group.ranks}

    def complete(group: GroupState) -> GroupState:
        return group if group.ranks else replace(group, ranks=members.get(group.name, ()))

    return tuple(replace(rank, groups=tuple(complete(group) for group in rank.groups)) for rank in found)


def _load(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
