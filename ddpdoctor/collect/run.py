"""Reads the facts of a job from a run folder, while it runs or long after, and from those of its other nodes."""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from operator import is_
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import run_files
from ddpdoctor.collect.fingerprint_files import Writer
from ddpdoctor.collect.fingerprint_nodes import read_consistency, unite_consistency
from ddpdoctor.collect.rank import RankContext, RunFolder, read_rank
from ddpdoctor.collect.recorded import believed, errors_of_child, find_children, read_all
from ddpdoctor.collect.run_ranks import find_ends, find_ranks, interruption_ns, is_on_one_host, stop_of_others
from ddpdoctor.model import facts
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Connecting
from ddpdoctor.model.node import Node
from ddpdoctor.model.stacks import StackSample
from ddpdoctor.model.steps import Speed, StepParts, StepTimes
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage import ring_reading
from ddpdoctor.recorder.storage.files import is_folder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    Entries = Sequence[dict[str, Any]]  # what the agent of one node logged in all attempts
    # What was seen of another node, its folder, the attempt by its own count, and its job by the reporting node's clock
    _Node = tuple[facts.NodeSeen, Path, int | None, facts.Job]

JUDGED_ATTEMPTS = 10  # How many earlier attempts we judge. Without a limit, each restart would make the report slower.
NODES_NAME = "nodes.json"
NODE_FOLDERS = ("gathered", "nodes")  # what each other node sent, or wrote to a shared run folder, by its number
BEATS_NS = 3_000_000_000  # three heartbeats: who was silent for longer when ranks started was not there; our choice
# The records with times, or with records that have times. Times are their fields that end in "_ns".
TIMED: frozenset[Any] = frozenset({
    facts.BeforeCall, facts.Call, facts.Child, EpochCall, EpochSeen, facts.HelperError, facts.Job, LoaderSeen,
    facts.Raised, facts.Rank, facts.Save, Speed, StackSample, StepParts, StepTimes,
})  # fmt: skip
_HOLDERS = TIMED | {facts.CallLog, tuple}


def read_run_folder(folder: Path, *, kept: bool = True) -> RunFolder:
    """Read a run folder; with ``kept``, with the copies of rings kept before a signal. Raises ``UserError``."""
    for name in run_files.FOLDERS:  # a link could lead anywhere
        part = folder / name
        if part.is_symlink() or (part.exists() and not is_folder(part)):
            raise UserError(
                f"{folder} is damaged: {name} in it is not a folder, or is a link",
                help="Copy the run folder with the files instead of links, for example with `cp -rL` or tar.",
            )
    run = _read_run_json(folder)
    try:
        contents: dict[int, ring_reading.RingContent] = {}  # the latest ring of each pid
        damaged: dict[int, str] = {}
        copies = sorted((folder / "evidence").glob("*.held")) if kept else ()
        for path in (*sorted((folder / "rings").glob("*.ring")), *copies):
            try:
                content = ring_reading.read_ring_file(path)
            except (OSError, ring_reading.DamagedRingError) as error:
                pid = path.name.partition("-")[0]
                if pid.isdigit():
                    why = (error.strerror or "not to be read") if isinstance(error, OSError) else str(error)
                    damaged[int(pid)] = f"its record cannot be read: {why}"
                continue
            known = contents.get(content.pid)
            if known is None or known.start_ticks <= content.start_ticks:
                contents[content.pid] = content
        lost = {pid: why for pid, why in damaged.items() if pid not in contents}
        for path in folder.glob("lost-*"):
            pid = path.name.split("-")[1]
            if pid.isascii() and pid.isdecimal():
                lost[int(pid)] = run_files.read_text(path).partition("\n")[2] or "no reason given"
        return RunFolder(
            path=folder, run=run, end=run_files.load(facts.JobEnd, folder / facts.END_NAME),
            agent=run_files.read_entries(folder / "agent.jsonl"), contents=contents, lost=lost,
            answers=run_files.find_answers(folder / "evidence"),
            machine=run_files.load(Node, folder / run_files.MACHINE_NAME),
            control_flow=run_files.load(tuple[facts.ControlFlow, ...], folder / run_files.CONTROL_FLOW_NAME) or (),
            nccl_lines=run_files.read_warnings(folder),
            reached=run_files.load(tuple[Connecting, ...], folder / facts.REACHED_NAME) or (),
        )  # fmt: skip
    except Exception as error:
        raise _damage(folder, error) from error


def job_of_node(folder: RunFolder, attempt: int | None = None) -> facts.Job:
    """Return the facts of one attempt, by default the last; raises ``UserError``."""
    try:
        run, path, contents = folder.run, folder.path, folder.contents
        watch, agent = run_files.read_watch(path, attempt), run_files.log_of(folder.agent, attempt)
        sources = find_ranks(agent.started, contents, watch, agent.superseded_ns)
        notes = [note for content in contents.values() for note in content.notes]
        coded = [note for note in notes if note.get("k") == "child_end" and type(note.get("code")) is int]
        known = agent.ends | {end.pid: end for end in read_all(run_files.End, coded)}
        pid, code = watch.launcher_pid, watch.launcher_status
        if pid is not None and code is not None:  # the command itself may be a rank
            ended_ns = watch.processes.get(pid, run_files.UNSEEN).ended_ns
            known[pid] = run_files.End(pid=pid, code=code, at=ended_ns or watch.now_ns or 0)
        ends = find_ends(sources, contents, path, watch, known)
        # The agent, ddpdoctor, the user or another launcher began to stop the ranks.
        stops_ns = [watch.stopping_since_ns, interruption_ns(sources, ends, watch), agent.closing_ns]
        if not agent.started:
            stops_ns.append(stop_of_others(sources, ends, watch))
        stop_ns = min(filter(None, stops_ns), default=None)
        context = RankContext(
            run=folder, host=run.host or "localhost", attempt=max(agent.attempt, 0), ends=ends, stop_ns=stop_ns,
            watch=watch, children=find_children(contents), agent_lacks=agent.lacks,
            child_errors=grouped([pair for content in contents.values() for pair in errors_of_child(content)]),
        )  # fmt: skip
        ranks = tuple(sorted((read_rank(source, context) for source in sources), key=lambda rank: rank.rank))
        world_size, nnodes, local_ranks, may_run_elsewhere = _read_shape(run, agent, contents)
        # torch's debug level when a rank made its group; before that, and in old runs, the level that we chose
        begun = [note for note in notes if note.get("k") == "initialized"]
        levels = [str(note["debug_level"]) for note in begun if note.get("debug_level")]
        chosen = run.debug_level or "OFF"
        writers = []
        for ring in (contents[source.pid] for source in sources if source.pid in contents):
            began_ns, ended_ns = ring.cells["started_ns"], watch.processes.get(ring.pid, run_files.UNSEEN).ended_ns
            writers.append(Writer(pid=ring.pid, ticks=ring.start_ticks, began_ns=began_ns, ended_ns=ended_ns))
        return facts.Job(
            now_ns=watch.now_ns or max([rank.ended_ns or rank.last_progress_ns or 0 for rank in ranks], default=0),
            hang_timeout_s=run.hang_timeout_s or 300.0, ranks=share_groups(ranks),
            world_size=believed(world_size) if world_size != 1 or not ranks else None, nnodes=nnodes,
            local_ranks_expected=local_ranks, may_run_elsewhere=may_run_elsewhere, ended=watch.ended,
            launcher_status=watch.launcher_status, launched_ns=run.launched_ns or 0, stopping_since_ns=stop_ns,
            interrupted_by=watch.interrupted_by, node_rank=run.node_rank,
            debug_level=levels[-1] if levels else "OFF" if chosen == "AUTO" else chosen, entry=run.entry,
            backend=str(begun[-1].get("backend") or "") if begun else "",
            host_causes=watch.host_causes, machine=folder.machine,
            control_flow=folder.control_flow, consistency=read_consistency(path, run, attempt, writers),
            speed_asked=run.speed, nccl_lines=folder.nccl_lines, host=run.host, reached=folder.reached,
        )  # fmt: skip
    except Exception as error:
        raise _damage(folder.path, error) from error


def _damage(folder: Path, error: Exception) -> UserError:
    """Return the error to raise for any exception while a run folder is read: damaged files can raise anything."""
    return UserError(f"{folder} is damaged, and cannot be judged ({type(error).__name__}: {error})")


def _read_run_json(folder: Path) -> facts.Run:
    try:
        plain = run_files.load_json(folder / "run.json")
    except run_files.DAMAGED:
        plain = None
    if not isinstance(plain, dict) or plain.get("format") != facts.RUN_FORMAT:
        raise UserError(
            f"{folder} is not a run folder of ddpdoctor",
            help="give the folder that `ddpdoctor wrap` printed at its end (--report-dir)",
        )
    if plain.get("version") != facts.RUN_VERSION:
        raise UserError(f"{folder} has version {plain.get('version')!r}, this ddpdoctor reads {facts.RUN_VERSION}")
    try:
        return decode(facts.Run, plain)
    except WrongValue as wrong:
        raise UserError(f"{folder}: run.json is damaged: {wrong}") from wrong


def _read_shape(
    run: facts.Run, agent: run_files.AgentLog, contents: dict[int, ring_reading.RingContent]
) -> tuple[int | None, int, int | None, bool]:
    """Return the world size, the number of hosts, the ranks expected here, and whether ranks may run elsewhere.

    If a launcher has only one rank, that rank counts as a node, and its world size is the number of nodes.
    """
    if run.launcher != "command":
        local, nnodes = run.nproc, run.nnodes or 1
        world = run.world_size or (None if local is None else local * nnodes)
        return world, nnodes, local, nnodes > 1 or (world is not None and world != local)
    if agent.started:
        local = len(agent.started)
        world = max(local, *(start.world_size for start in agent.started.values()))
        nnodes = -(-world // local)
        return world, nnodes, local, nnodes > 1
    return None, 1, None, not is_on_one_host(contents.values())


def share_groups(found: tuple[facts.Rank, ...]) -> tuple[facts.Rank, ...]:
    """Fill in the members of groups on ranks that do not know them, from ranks that do."""
    members = {group.name: group.ranks for rank in found for group in rank.groups if group.ranks}
    shared = {ranks: ranks for ranks in members.values()}  # otherwise a thousand ranks keep a thousand equal tuples

    filled = []
    for rank in found:
        groups = []
        for group in rank.groups:
            ranks = group.ranks or members.get(group.name, ())
            ranks = shared.get(ranks, ranks)
            groups.append(group if group.ranks is ranks else replace(group, ranks=ranks))
        filled.append(rank if all(map(is_, groups, rank.groups)) else replace(rank, groups=tuple(groups)))
    return tuple(filled)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run folder and the records of other nodes in it, all read once."""

    own: RunFolder  # the run folder of the reporting node
    members: facts.NodesSeen | None  # None if the job had one node
    others: dict[int, RunFolder]  # the readable run folders of other nodes, by number


def read_saved_run(folder: Path) -> SavedRun:
    """Read a run folder, and the other nodes' run folders in it; raises ``UserError``."""
    own, members = read_run_folder(folder), run_files.load(facts.NodesSeen, folder / NODES_NAME)
    others = {}
    for seen in members.nodes if members is not None else ():
        places = (folder / name / str(seen.number) for name in NODE_FOLDERS)
        place = next((place for place in places if is_folder(place) and (place / "run.json").is_file()), None)
        if members is not None and seen.number != members.own and place is not None:
            with suppress(UserError):
                others[seen.number] = read_run_folder(place)
    return SavedRun(own=own, members=members, others=others)


def job_of(saved: SavedRun, attempt: int | None = None) -> facts.Job:
    """Return the facts of one attempt (by default the last) on all nodes; raises ``UserError``."""
    own, members = job_of_node(saved.own, attempt), saved.members
    if members is None:
        return own
    members = replace(members, nodes=tuple(node for node in members.nodes if _took_part(saved, node, members, attempt)))
    others: list[_Node] = []
    for seen in members.nodes:
        other = saved.others.get(seen.number)
        with suppress(UserError, NotThere):  # it is damaged, or of other attempts only
            if other is not None:
                there = attempt_elsewhere(saved.own.agent, other.agent, attempt)
                job = job_of_node(other, there)
                others.append((seen, other.path, there, shift_times(job, seen.clock_offset_ns or 0)))
    return _unite(own, members, others, saved.own.path, attempt)


def read_job(folder: Path, attempt: int | None = None) -> facts.Job:
    """Read a run folder and return the facts of one attempt; raises ``UserError`` like ``read_saved_run``."""
    return job_of(read_saved_run(folder), attempt)


def _took_part(saved: SavedRun, seen: facts.NodeSeen, members: facts.NodesSeen, attempt: int | None) -> bool:
    """Return whether a node took part in an attempt: in an elastic job, nodes leave and others join."""
    if seen.number == members.own:
        return True
    other = saved.others.get(seen.number)
    if other is not None and came_later(saved.own.agent, other.agent, attempt):
        return False
    if not was_gone(saved.own.agent, seen.heard_ns, attempt):
        return True
    started = run_files.log_of(saved.own.agent, attempt).started.values()
    here = [node for node in members.nodes if not was_gone(saved.own.agent, node.heard_ns, attempt)]
    ranks = {start.rank for start in started}.union(*(node.ranks for node in here))
    # A static rendezvous starts the ranks again without asking who is there, and they wait for those of this node.
    is_known = all(node.ranks for node in here if node.number != members.own)
    return is_known and len(ranks) < max((start.world_size for start in started), default=0)


def _unite(
    own: facts.Job, members: facts.NodesSeen, others: Sequence[_Node], folder: Path, attempt: int | None
) -> facts.Job:
    jobs = [own, *(job for *_, job in others)]
    jobs_by_number = {seen.number: job for seen, *_, job in others} | {members.own: own}
    stop_ns = min((job.stopping_since_ns for job in jobs if job.stopping_since_ns is not None), default=None)
    error_ns = max((seen.clock_error_ns or 0 for seen, *_ in others), default=0)
    number = max((rank.attempt for rank in own.ranks), default=attempt or 0)
    ranks = []
    for rank in (rank for job in jobs for rank in job.ranks):
        # It may have ended after somebody began to stop the job on any node; the clocks of nodes are not exact.
        is_late = stop_ns is not None and rank.ended_ns is not None and rank.ended_ns > stop_ns + error_ns
        is_other = rank.attempt != number or (is_late and not rank.after_stop)
        after_stop = is_late or rank.after_stop
        ranks.append(replace(rank, attempt=number, after_stop=after_stop) if is_other else rank)
    nodes = []
    for node in members.nodes:
        job = jobs_by_number.get(node.number)
        here = tuple(sorted({rank.rank for rank in job.ranks})) if job is not None else ()
        nodes.append(replace(node, gathered=job is not None, ranks=here or node.ranks))
    statuses = [own.launcher_status, *(node.status for node in members.nodes if node.presence is facts.Presence.LEFT)]
    return replace(
        own,
        ranks=tuple(sorted(share_groups(tuple(ranks)), key=lambda rank: (rank.rank, rank.host))),
        world_size=next((job.world_size for job in jobs if job.world_size is not None), None),
        nnodes=max(own.nnodes, len({node.host for node in members.nodes if node.host})),
        now_ns=max(job.now_ns for job in jobs),  # if the launcher here has ended, other nodes were seen later
        stopping_since_ns=stop_ns,
        interrupted_by=next((job.interrupted_by for job in jobs if job.interrupted_by), None),
        launcher_status=next((status for status in statuses if status), own.launcher_status),
        nccl_lines=tuple(line for job in jobs for line in job.nccl_lines),
        consistency=unite_consistency(
            folder, attempt, [(path, there) for _, path, there, _ in others], [job.consistency for job in jobs]
        ),
        members=replace(members, nodes=tuple(nodes)),
        elsewhere=tuple(
            facts.HostSeen(host=job.host, causes=job.host_causes, machine=job.machine, reached=job.reached)
            for *_, job in others
        ),
    )


class NotThere(Exception):  # noqa: N818 - says what it is
    """The other node was not part of an attempt."""


def attempt_elsewhere(own: Entries, other: Entries, attempt: int | None) -> int | None:
    """Return the other node's number for an attempt of this node (None: the last); raises ``NotThere``.

    Agents of all nodes share a number, the round of their rendezvous. Without it, both nodes count alike.
    """
    meeting = run_files.log_of(own, attempt).meeting
    last = run_files.log_of(other)
    if meeting is None or (last.meeting is None and last.attempt < 0):
        return attempt
    # This node's attempts, with the numbers that the agents of all nodes share for them, if they logged any
    meetings = {e.get("attempt", -1): e["meeting"] for e in reversed(other) if type(e.get("meeting")) is int}
    for number, met in sorted(meetings.items(), reverse=True):
        if met == meeting and number >= 0:
            return None if number == last.attempt else number
    raise NotThere


def was_gone(own: Entries, heard_ns: int | None, attempt: int | None) -> bool:
    """Return whether a node's last message came before an attempt began, so that the agents connected without it."""
    log = run_files.log_of(own, attempt)
    if log.meeting is None or log.begun_ns is None or heard_ns is None:
        return False
    return heard_ns + BEATS_NS < log.begun_ns


def came_later(own: Entries, other: Entries, attempt: int | None) -> bool:
    """Return whether another node's log shows that it joined after an attempt began."""
    meeting, last = run_files.log_of(own, attempt).meeting, run_files.log_of(other)
    if meeting is None or last.meeting is None or last.meeting <= meeting:
        return False
    try:
        attempt_elsewhere(own, other, attempt)
    except NotThere:
        return True
    return False


def shift_times(value: Any, ahead_ns: int) -> Any:
    """Return a job, or a part of it, with its times moved to the reporting host's clock; its own is ahead of it."""
    if not ahead_ns:
        return value
    if isinstance(value, facts.CallLog):
        return value.shifted(ahead_ns)
    if isinstance(value, tuple):
        return tuple(shift_times(record, ahead_ns) for record in value) if value and type(value[0]) in TIMED else value
    new: dict[str, Any] = {}
    for name in (field.name for field in fields(value)):
        old = getattr(value, name)
        if not name.endswith("_ns"):
            new[name] = shift_times(old, ahead_ns) if type(old) in _HOLDERS else old
        elif isinstance(old, tuple):
            new[name] = tuple(time_ns - ahead_ns for time_ns in old)
        elif isinstance(old, array):
            new[name] = array("q", [time_ns - ahead_ns for time_ns in old])
        else:  # None and 0 mean that it is not known
            new[name] = old and old - ahead_ns
        if new[name] is old:
            del new[name]
    return replace(value, **new)


def read_loggers(run_dir: Path) -> tuple[facts.Logger, ...]:
    """Return each logger that the ranks use, as the lowest rank that uses it does; raises ``UserError``."""
    folder = read_run_folder(run_dir)
    found: dict[str, facts.Logger] = {}
    for rank in sorted(job_of_node(folder).ranks, key=lambda rank: rank.rank):
        content = folder.contents.get(rank.pid or 0)
        for note in content.notes if content is not None else ():
            name, place = note.get("logger"), note.get("place")
            if note.get("k") == "logger" and isinstance(name, str) and isinstance(place, dict):
                texts = {str(key): str(value) for key, value in place.items()}
                found.setdefault(name, facts.Logger(name=name, place=texts))
    return tuple(found.values())
