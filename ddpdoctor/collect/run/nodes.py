"""Reads a multi-node job from the reporting node's run folder, including what the other nodes recorded and sent."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.fingerprint_nodes import unite_consistency
from ddpdoctor.collect.run import runfolder
from ddpdoctor.collect.run.agent_log import log_of
from ddpdoctor.collect.run.attempts import NotThere, attempt_elsewhere, came_later, was_gone
from ddpdoctor.collect.run.clock_shift import shift_times
from ddpdoctor.collect.run.evidence import load
from ddpdoctor.collect.run.runfolder import RunFolder, read_run_folder
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import HostSeen, NodeSeen, NodesSeen, Presence
from ddpdoctor.recorder.storage.files import is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.model.facts import Job, Rank

FILE = "nodes.json"
FOLDERS = ("gathered", "nodes")
"""Subfolders with each other node's records, by its number: what it sent, or what it wrote to a shared run folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """What another node recorded, with times on the reporting node's clock."""

    seen: NodeSeen
    folder: Path
    attempt: int | None
    """By that node's own count."""
    job: Job


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run folder and the records of other nodes in it, all read once."""

    own: RunFolder
    """The run folder of the reporting node."""
    members: NodesSeen | None
    """None if the job had one node."""
    others: dict[int, RunFolder]
    """The readable run folders of other nodes, by number."""


def read_saved_run(folder: Path) -> SavedRun:
    """Read a run folder, and the other nodes' run folders in it.

    Raises:
        UserError: the folder is not a run folder, or is damaged.
    """
    own, members = read_run_folder(folder), read_nodes(folder)
    others = {}
    for seen in members.nodes if members is not None else ():
        place = _place(folder, seen)
        if members is not None and seen.number != members.own and place is not None:
            with suppress(UserError):
                others[seen.number] = read_run_folder(place)
    return SavedRun(own=own, members=members, others=others)


def job_of(saved: SavedRun, attempt: int | None = None) -> Job:
    """Return the facts of one attempt (by default the last) on all nodes.

    Raises:
        UserError: the folder is damaged.
    """
    own, members = runfolder.job_of(saved.own, attempt), saved.members
    if members is None:
        return own
    members = replace(members, nodes=tuple(one for one in members.nodes if _took_part(saved, one, members, attempt)))
    others = [node for seen in members.nodes if (node := _read_node(saved, seen, attempt)) is not None]
    return _unite(own, members, others, saved.own.path, attempt)


def read_job(folder: Path, attempt: int | None = None) -> Job:
    """Read a run folder and return the facts of one attempt; raises ``UserError`` like ``read_saved_run``."""
    return job_of(read_saved_run(folder), attempt)


def read_nodes(folder: Path) -> NodesSeen | None:
    """Return the nodes of the job, or None if it had only one or the file cannot be read."""
    return load(NodesSeen, folder / FILE)


def _read_node(saved: SavedRun, seen: NodeSeen, attempt: int | None) -> _Node | None:
    """Return what another node recorded, or None if that is missing, damaged, or of other attempts only."""
    other = saved.others.get(seen.number)
    if other is None:
        return None
    try:
        there = attempt_elsewhere(saved.own.agent, other.agent, attempt)
        job = runfolder.job_of(other, there)
    except (UserError, NotThere):
        return None
    return _Node(seen=seen, folder=other.path, attempt=there, job=shift_times(job, seen.clock_offset_ns or 0))


def _took_part(saved: SavedRun, seen: NodeSeen, members: NodesSeen, attempt: int | None) -> bool:
    """Return whether a node took part in an attempt: in an elastic job, nodes leave and others join."""
    if seen.number == members.own:
        return True
    other = saved.others.get(seen.number)
    if other is not None and came_later(saved.own.agent, other.agent, attempt):
        return False
    if not was_gone(saved.own.agent, seen.heard_ns, attempt):
        return True
    started = log_of(saved.own.agent, attempt).started.values()
    here = [one for one in members.nodes if not was_gone(saved.own.agent, one.heard_ns, attempt)]
    ranks = {one.rank for one in started}.union(*(one.ranks for one in here))
    # A static rendezvous starts the ranks again without asking who is there, and they wait for those of this node.
    is_known = all(one.ranks for one in here if one.number != members.own)
    return is_known and len(ranks) < max((one.world_size for one in started), default=0)


def _place(folder: Path, seen: NodeSeen) -> Path | None:
    places = (folder / name / str(seen.number) for name in FOLDERS)
    return next((place for place in places if is_folder(place) and (place / "run.json").is_file()), None)


def _unite(own: Job, members: NodesSeen, others: Sequence[_Node], folder: Path, attempt: int | None) -> Job:
    jobs = [own, *(node.job for node in others)]
    jobs_by_number = {node.seen.number: node.job for node in others}
    stop_ns = min((job.stopping_since_ns for job in jobs if job.stopping_since_ns is not None), default=None)
    error_ns = max((node.seen.clock_error_ns or 0 for node in others), default=0)
    number = max((rank.attempt for rank in own.ranks), default=attempt or 0)
    ranks = [_judged_by(rank, stop_ns, error_ns) for job in jobs for rank in job.ranks]
    ranks = [rank if rank.attempt == number else replace(rank, attempt=number) for rank in ranks]
    statuses = [own.launcher_status, *(node.status for node in members.nodes if node.presence is Presence.LEFT)]
    return replace(
        own,
        ranks=tuple(sorted(runfolder.share_groups(tuple(ranks)), key=lambda rank: (rank.rank, rank.host))),
        world_size=next((job.world_size for job in jobs if job.world_size is not None), None),
        nnodes=max(own.nnodes, len({node.host for node in members.nodes if node.host})),
        now_ns=max(job.now_ns for job in jobs),  # if the launcher here has ended, other nodes were seen later
        stopping_since_ns=stop_ns,
        interrupted_by=next((job.interrupted_by for job in jobs if job.interrupted_by), None),
        launcher_status=next((status for status in statuses if status), own.launcher_status),
        nccl_lines=tuple(line for job in jobs for line in job.nccl_lines),
        consistency=unite_consistency(
            folder, attempt, [(node.folder, node.attempt) for node in others], [job.consistency for job in jobs]
        ),
        members=replace(
            members,
            nodes=tuple(
                _with_facts(node, own if node.number == members.own else jobs_by_number.get(node.number))
                for node in members.nodes
            ),
        ),
        elsewhere=tuple(_host_seen(node.job) for node in others),
    )


def _judged_by(rank: Rank, stop_ns: int | None, error_ns: int) -> Rank:
    """Mark a rank that ended after somebody began to stop the job on any node, allowing for the clocks' error."""
    if stop_ns is None or rank.ended_ns is None or rank.ended_ns <= stop_ns + error_ns:
        return rank
    return replace(rank, after_stop=True)


def _with_facts(node: NodeSeen, job: Job | None) -> NodeSeen:
    """Return a node with the ranks in its records, and whether we have its records."""
    if job is None:
        return replace(node, gathered=False)
    return replace(node, gathered=True, ranks=tuple(sorted({rank.rank for rank in job.ranks})) or node.ranks)


def _host_seen(job: Job) -> HostSeen:
    return HostSeen(host=job.host, causes=job.host_causes, machine=job.machine, reached=job.reached)
