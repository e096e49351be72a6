"""Reads the facts of a job from a run folder, while it runs or long after."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.fingerprint_files import Writer
from ddpdoctor.collect.fingerprint_nodes import read_consistency
from ddpdoctor.collect.rank import ranks
from ddpdoctor.collect.rank.answers import find_answers
from ddpdoctor.collect.rank.rings import read_rings
from ddpdoctor.collect.rank.steps import errors_of_child, find_children
from ddpdoctor.collect.recorded import read_all
from ddpdoctor.collect.run.agent_log import AgentLog, End, log_of, read_entries
from ddpdoctor.collect.run.control_flow import FILE as CONTROL_FLOW_NAME
from ddpdoctor.collect.run.ends import find_ends, interruption_ns, stop_of_others
from ddpdoctor.collect.run.evidence import DAMAGED, check_folders, load, load_json, read_text
from ddpdoctor.collect.run.machine import FILE as MACHINE_NAME
from ddpdoctor.collect.run.nccl_warnings import read_warnings
from ddpdoctor.collect.run.sources import RankTraces, Source, find_ranks, is_on_one_host
from ddpdoctor.collect.run.watched import WatchedJob, read_watch
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import (
    END_NAME,
    REACHED_NAME,
    RUN_FORMAT,
    RUN_VERSION,
    ControlFlow,
    GroupState,
    Job,
    JobEnd,
    Rank,
    Run,
)
from ddpdoctor.model.node import Node
from ddpdoctor.model.reaching import Connecting
from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ddpdoctor.collect.rank.answers import Answers
    from ddpdoctor.collect.rank.rings import Rings
    from ddpdoctor.model.facts import NcclLine
    from ddpdoctor.recorder.storage import ring_reading

JUDGED_ATTEMPTS = 10
"""How many earlier attempts we judge. Without a limit, each restart would make the report slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run folder holds for all attempts; it is read once, and ``job_of`` makes a ``Job`` of each attempt."""

    path: Path
    run: Run
    end: JobEnd | None
    """None if the watcher was killed or the job still runs."""
    agent: Sequence[dict[str, Any]]
    """The log of torch's elastic agent."""
    rings: Rings
    answers: Answers
    lost: dict[int, str]
    """Why a process could not be recorded, by pid."""
    machine: Node | None
    control_flow: tuple[ControlFlow, ...]
    nccl_lines: tuple[NcclLine, ...]
    reached: tuple[Connecting, ...]


def read_run_folder(folder: Path, *, kept: bool = True) -> RunFolder:
    """Read a run folder. With ``kept``, copies of rings that were kept before a signal replace these rings.

    Raises:
        UserError: the folder is not a run folder, or is damaged.
    """
    check_folders(folder)
    run = _read_run(folder)
    with _wall(folder):
        return RunFolder(
            path=folder,
            run=run,
            end=load(JobEnd, folder / END_NAME),
            agent=read_entries(folder / "agent.jsonl"),
            rings=read_rings(folder, kept=kept),
            answers=find_answers(folder / "evidence"),
            lost=_read_lost(folder),
            machine=load(Node, folder / MACHINE_NAME),
            control_flow=load(tuple[ControlFlow, ...], folder / CONTROL_FLOW_NAME) or (),
            nccl_lines=read_warnings(folder),
            reached=load(tuple[Connecting, ...], folder / REACHED_NAME) or (),
        )


def job_of(folder: RunFolder, attempt: int | None = None) -> Job:
    """Return the facts of one attempt, by default the last.

    Raises:
        UserError: the folder is damaged.
    """
    with _wall(folder.path):
        return _job_of(folder, attempt)


@contextmanager
def _wall(folder: Path) -> Iterator[None]:
    """Turn any exception into a ``UserError`` that names the folder."""
    try:
        yield
    except Exception as error:  # damaged files can raise anything
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder} is damaged, and cannot be judged ({reason})") from error


def _read_run(folder: Path) -> Run:
    """Return run.json, which says what was started, when and how."""
    try:
        plain = load_json(folder / "run.json")
    except DAMAGED:
        plain = None
    if not isinstance(plain, dict) or plain.get("format") != RUN_FORMAT:
        raise UserError(
            f"{folder} is not a run folder of ddpdoctor",
            help="give the folder that `ddpdoctor wrap` named at its end (--report-dir)",
        )
    if plain.get("version") != RUN_VERSION:
        raise UserError(f"{folder} has version {plain.get('version')!r}, this ddpdoctor reads {RUN_VERSION}")
    try:
        return decode(Run, plain)
    except WrongValue as wrong:
        raise UserError(f"{folder}: run.json is damaged: {wrong}") from wrong


def _job_of(folder: RunFolder, attempt: int | None) -> Job:
    run, path = folder.run, folder.path
    watch = read_watch(path, attempt)
    agent = log_of(folder.agent, attempt)
    processes = _find_processes(folder, agent, watch)
    stop_ns = _stop_ns(agent, watch, processes)
    found = _read_ranks(folder, agent, watch, processes, stop_ns)
    now_ns = watch.now_ns or max([r.ended_ns or r.last_progress_ns or 0 for r in found], default=0)
    shape = _read_shape(run, agent, processes)
    return Job(
        now_ns=now_ns,
        hang_timeout_s=run.hang_timeout_s or 300.0,
        ranks=share_groups(found),
        world_size=ranks.believed(shape.world_size) if shape.world_size != 1 or not found else None,
        nnodes=shape.nnodes,
        local_ranks_expected=shape.local_ranks,
        may_run_elsewhere=shape.may_run_elsewhere,
        ended=watch.ended,
        launcher_status=watch.launcher_status,
        launched_ns=run.launched_ns or 0,
        stopping_since_ns=stop_ns,
        interrupted_by=watch.interrupted_by,
        node_rank=run.node_rank,
        debug_level=_debug_level(run, processes.contents.values()),
        entry=run.entry,
        torch_version=run.torch_version,
        host_causes=watch.host_causes,
        machine=folder.machine,
        control_flow=folder.control_flow,
        consistency=read_consistency(path, run, attempt, _writers(processes, watch)),
        speed_asked=run.speed,
        nccl_lines=folder.nccl_lines,
        host=run.host,
        reached=folder.reached,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Processes:
    """The processes of one attempt: what they wrote, which of them are ranks, and how they ended."""

    contents: dict[int, ring_reading.RingContent]
    sources: list[Source]
    ends: dict[int, End]


def _find_processes(folder: RunFolder, agent: AgentLog, watch: WatchedJob) -> _Processes:
    contents = folder.rings.contents
    sources = find_ranks(
        RankTraces(started=agent.started, contents=contents, watch=watch, until_ns=agent.superseded_ns)
    )  # fmt: skip
    known = agent.ends | _child_ends(contents) | _launcher_end(watch)
    return _Processes(
        contents=contents,
        sources=sources,
        ends=find_ends(sources, contents, folder.path, watch, known),
    )


def _debug_level(run: Run, contents: Iterable[ring_reading.RingContent]) -> str:
    """Return torch's debug level when a rank made its group; before that, and in old runs, the level we chose."""
    notes = [note for content in contents for note in content.notes if note.get("k") == "initialized"]
    known = [str(note["debug_level"]) for note in notes if note.get("debug_level")]
    chosen = run.debug_level or "OFF"
    return known[-1] if known else "OFF" if chosen == "AUTO" else chosen


def _launcher_end(watch: WatchedJob) -> dict[int, End]:
    """Return the end of the command itself, which may be a rank."""
    pid, code = watch.launcher_pid, watch.launcher_status
    if pid is None or code is None:
        return {}
    return {pid: End(pid=pid, code=code, at=watch.of(pid).ended_ns or watch.now_ns or 0)}


def _stop_ns(agent: AgentLog, watch: WatchedJob, processes: _Processes) -> int | None:
    """Return when the agent, ddpdoctor, the user or another launcher began to stop the ranks."""
    interrupted = interruption_ns(processes.sources, processes.ends, watch)
    times_ns = [watch.stopping_since_ns, interrupted, agent.closing_ns]
    if not agent.started:
        times_ns.append(stop_of_others(processes.sources, processes.ends, watch))
    return min(filter(None, times_ns), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """How many ranks a job has, and on how many hosts."""

    world_size: int | None
    nnodes: int
    local_ranks: int | None
    may_run_elsewhere: bool


def _read_shape(run: Run, agent: AgentLog, processes: _Processes) -> _Shape:
    """Return the shape from torchrun's arguments, from its agent's log, or from the ranks' environment.

    If a launcher has only one rank, that rank counts as a node of its own, and its world size is the number of nodes.
    """
    if run.launcher != "command":
        local, nnodes = run.nproc, run.nnodes or 1
        world = run.world_size or (None if local is None else local * nnodes)
        elsewhere = nnodes > 1 or (world is not None and world != local)
        return _Shape(world_size=world, nnodes=nnodes, local_ranks=local, may_run_elsewhere=elsewhere)
    if agent.started:
        local = len(agent.started)
        world = max(local, *(start.world_size for start in agent.started.values()))
        nnodes = -(-world // local)
        return _Shape(world_size=world, nnodes=nnodes, local_ranks=local, may_run_elsewhere=nnodes > 1)
    here = is_on_one_host(processes.contents.values())
    return _Shape(world_size=None, nnodes=1, local_ranks=None, may_run_elsewhere=not here)


def _read_ranks(
    folder: RunFolder,
    agent: AgentLog,
    watch: WatchedJob,
    processes: _Processes,
    stop_ns: int | None,
) -> tuple[Rank, ...]:
    contents = processes.contents
    context = ranks.Context(
        folder=folder.path,
        host=folder.run.host or "localhost",
        attempt=max(agent.attempt, 0),
        ends=processes.ends,
        stop_ns=stop_ns,
        watch=watch,
        contents=contents,
        children=find_children(contents),
        child_errors=grouped(pair for content in contents.values() for pair in errors_of_child(content)),
        answers=folder.answers,
        lost=folder.rings.damaged | folder.lost,
        agent_lacks=agent.lacks,
    )
    return tuple(sorted((ranks.read_rank(source, context) for source in processes.sources), key=lambda rank: rank.rank))


def _writers(processes: _Processes, watch: WatchedJob) -> list[Writer]:
    """Return the ranks' processes that can have written fingerprints of their replicas."""
    found = [processes.contents[source.pid] for source in processes.sources if source.pid in processes.contents]
    return [
        Writer(
            pid=content.pid,
            ticks=content.start_ticks,
            began_ns=content.cells["started_ns"],
            ended_ns=watch.of(content.pid).ended_ns,
        )
        for content in found
    ]


def _child_ends(contents: dict[int, ring_reading.RingContent]) -> dict[int, End]:
    notes = [note for content in contents.values() for note in content.notes if note.get("k") == "child_end"]
    return {end.pid: end for end in read_all(End, [note for note in notes if type(note.get("code")) is int])}


def _read_lost(folder: Path) -> dict[int, str]:
    """Return, by pid, why a process could not be recorded."""
    found = {}
    for path in folder.glob("lost-*"):
        pid = path.name.split("-")[1]
        if pid.isascii() and pid.isdecimal():
            found[int(pid)] = read_text(path).partition("\n")[2] or "no reason given"
    return found


def share_groups(found: tuple[Rank, ...]) -> tuple[Rank, ...]:
    """Fill in the members of groups on ranks that do not know them, from ranks that do."""
    members = {group.name: group.ranks for rank in found for group in rank.groups if group.ranks}
    shared = {ranks: ranks for ranks in members.values()}  # otherwise a thousand ranks keep a thousand equal tuples

    def complete(group: GroupState) -> GroupState:
        known = members.get(group.name, ())
        if group.ranks is known:
            return group
        ranks = group.ranks or known
        return replace(group, ranks=shared.get(ranks, ranks))

    def fill(rank: Rank) -> Rank:
        groups = tuple(map(complete, rank.groups))
        return rank if all(map(is_, groups, rank.groups)) else replace(rank, groups=groups)

    return tuple(map(fill, found))
