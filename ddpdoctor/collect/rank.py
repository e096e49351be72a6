"""Combines what the ring, the evidence, the agent and the watcher say about one rank."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.proc import list_names
from ddpdoctor.collect.recorded import (
    believed,
    device_times,
    dicts,
    find_note,
    pending_on_device,
    read_all,
    read_dump,
    read_error,
    read_errors,
    read_fetches,
    read_flight,
    read_gradient_times,
    read_groups,
    read_lacks,
    read_lines,
    read_log,
    read_models,
    read_nonfinite,
    read_or_none,
    read_parameters,
    read_process_causes,
    read_record,
    read_samples,
    read_seconds,
    read_speed,
    read_steps,
    read_unfinished,
    whole_or_0,
)
from ddpdoctor.collect.run_files import DAMAGED, End, WatchedJob, WatchedRank, read_text
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen
from ddpdoctor.model.facts import (
    Child,
    EndedByThread,
    GroupState,
    Helper,
    HelperError,
    Life,
    MeetingFile,
    Raised,
    Rank,
    Save,
    signal_name,
)
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.ring_reading import parse_group_json
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.collect.run_ranks import Source
    from ddpdoctor.model.facts import CallLog, ControlFlow, JobEnd, NcclLine, Run
    from ddpdoctor.model.launch import Connecting
    from ddpdoctor.model.node import Node

# A child that waits for work has a frame in one of these. Deeper frames (select, a lock) are C code or the stdlib.
IDLE_FILES = (
    "/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/pool.py", "/socketserver.py",
    "/http/server.py", "/asyncio/base_events.py", "/uvicorn/server.py",
)  # fmt: skip
DEFAULT_GROUP = "0"
THREAD_ERROR_NS = 5_000_000_000  # within this a failed thread's hook ends the process; our choice
LIMIT_SLACK_NS = 1_000_000_000  # by the clocks of two threads; our choice
LOOKS_APART_NS = 150_000_000  # the sampler reads the user's current line slightly more often than this
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)[^\n]*\(most recent call first\)")
_ALONE = re.compile(r"^Stack \(most recent call first\)")  # of the main thread, which runs the handlers
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
FATAL = "Fatal Python error:"
_CURRENT = "Current thread "
Answers = dict[tuple[int, int], list[tuple[int, str]]]  # number and file, by pid and start ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run folder holds for all attempts, read once; ``job_of_node`` makes a ``Job`` of each attempt."""

    path: Path
    run: Run
    end: JobEnd | None  # None if the watcher was killed or the job still runs
    agent: Sequence[dict[str, Any]]  # the log of torch's elastic agent
    contents: dict[int, ring_reading.RingContent]  # the rings, by pid
    answers: Answers
    lost: dict[int, str]  # why a process could not be recorded, or its ring not be read, by pid
    machine: Node | None
    control_flow: tuple[ControlFlow, ...]
    nccl_lines: tuple[NcclLine, ...]
    reached: tuple[Connecting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The inputs that all ranks of one attempt share."""

    run: RunFolder
    host: str
    attempt: int
    ends: dict[int, End]
    stop_ns: int | None
    watch: WatchedJob
    children: dict[int, list[ring_reading.RingContent]]
    child_errors: dict[int, list[dict[str, Any]]]  # of children whose rings are still there, by the rank's pid
    agent_lacks: tuple[str, ...] = ()


def read_rank(source: Source, context: RankContext) -> Rank:
    """Return all that is known about one rank, and what cannot be read."""
    try:
        content, watched = context.run.contents.get(source.pid), context.watch.of(source.pid)
        # Which recorder hooks failed, for example because torch lacks the function they patch
        failed = [note for note in content.notes if note.get("k") == "defect"] if content else []
        defects = "; ".join(sorted({f"{note.get('hook')}: {note.get('error')}" for note in failed}))
        rank = Rank(
            rank=source.rank, local_rank=source.local_rank, host=context.host, pid=source.pid, attempt=context.attempt,
            life=Life.RUNNING, world_size=believed(source.world_size), proc_state=watched.state,
            cpu_share=watched.cpu_share, traced_by=watched.tracer or None, frozen_since_ns=watched.frozen_since_ns,
            before_call=watched.before_call, oom_killed=watched.oom, last_progress_ns=watched.last_progress_ns,
            starved_ns=watched.starved_ns, lost=context.run.lost.get(source.pid) or defects or watched.why,
            causes=read_process_causes(watched.causes, [], {}) if content is None else None,
        )  # fmt: skip
        # The agent knows how it ended, but the watcher often sees the end earlier.
        end, gone_ns = context.ends.get(source.pid), watched.ended_ns
        if end is not None or gone_ns is not None:
            ended_ns = min(filter(None, (gone_ns, end.at))) if end is not None else gone_ns or 0
            after_stop = context.stop_ns is not None and ended_ns >= context.stop_ns
            rank = replace(rank, life=Life.GONE, ended_ns=ended_ns, after_stop=after_stop)
        if end is not None and end.code >= 0:
            rank = replace(rank, life=Life.EXITED, exit_code=end.code)
        elif end is not None:
            rank = replace(rank, life=Life.SIGNALED, signal=signal_name(-end.code))
        return rank if content is None else _with_ring(rank, content, source, context, watched)
    except Exception as error:  # noqa: BLE001 - damaged data of one rank must not hide the others
        why = f"what was collected of it is damaged ({type(error).__name__}: {error})"
        return Rank(
            rank=source.rank, local_rank=None, host=context.host, pid=source.pid, attempt=context.attempt,
            life=Life.GONE, lost=why,
        )  # fmt: skip


def _with_ring(
    rank: Rank, content: ring_reading.RingContent, source: Source, context: RankContext, watched: WatchedRank
) -> Rank:
    log, notes, cells, raised = read_log(content.slots), content.notes, content.cells, read_errors(content.notes)
    last = {str(note.get("k")): note for note in notes}  # the last note of each kind
    evidence = {} if watched.dumps else read_answer(context.run.answers, content.pid, content.start_ticks)
    world = find_note(reversed(notes), "initialized", "init")
    rank = replace(rank, ended_by_thread=_ended_by_thread(rank, last, raised, cells))
    leaving, init = last.get("exit", {}), find_note(notes, "init")
    in_handler = any(call.started_ns == cells["handling_ns"] for call in log.open())
    handled = evidence.get("handled") or (last.get("handled") if in_handler else None)
    children = context.children.get(content.pid, ())
    began_ns, ended_ns = cells["save_began_ns"], cells["save_ended_ns"]
    return replace(
        _with_device_calls(_with_stacks(rank, content, context, watched, evidence), content, context, evidence, log),
        recorded=True, answered=bool(evidence), started_ns=cells["started_ns"],
        world_size=believed(world.get("world_size") or source.world_size),
        init_timeout_s=read_seconds(last.get("init", {}).get("timeout_s")),
        init_ns=init.get("at") if isinstance(init.get("at"), int) else None,
        meeting=read_or_none(MeetingFile, init.get("meeting")), initialized=bool(cells["initialized"]),
        main_ended_ns=cells["main_ended_ns"] or None, exit_call=read_or_none(Frame, leaving.get("frame")),
        exit_asked=hide_in_text(leaving["status"]) if isinstance(leaving.get("status"), str) else None,
        exit_signal=str(leaving.get("signal") or ""), recent_calls=log.ended(), children=_children(watched, context),
        causes=read_process_causes(watched.causes, notes, evidence), raised=raised,
        helper_errors=_helper_errors(raised, evidence, source, context),
        handled=read_error(handled) if handled else None, models=read_models(notes),
        parameters=read_parameters(notes), unfinished=read_unfinished(notes), loaders=read_loaders(notes, evidence),
        nonfinite=read_nonfinite(notes), step_times=read_steps(content), speed=read_speed(content),
        gradient_times=read_gradient_times(notes),
        fetch_times=read_fetches(children, watched.child_fetches, max(0, cells["loader_workers"] - 1) or None),
        lines_seen=read_lines(content, children, watched.child_lines),
        lacks=tuple(sorted({*read_lacks(notes), *context.agent_lacks})),
        last_save=(Save(began_ns=began_ns, ended_ns=ended_ns if ended_ns >= began_ns else None) if began_ns else None),
        steps=cells["steps"], batches=cells["batches"], epochs=cells["epochs"],
    )  # fmt: skip


def _ended_by_thread(
    rank: Rank, last: dict[str, dict[str, Any]], raised: tuple[Raised, ...], cells: Mapping[str, int]
) -> EndedByThread | None:  # fmt: skip
    """Return the thread that ended a process, or None if its main thread may have left or been stopped from outside."""
    if rank.life not in (Life.EXITED, Life.SIGNALED) or rank.exit_code == 0 or rank.after_stop:
        return None
    if rank.signal in {"SIGALRM", "SIGVTALRM", "SIGPROF"}:  # of its own timers
        return EndedByThread()
    noted = last.get("ended_by_thread")
    if noted and rank.life is Life.EXITED:
        of_thread = (r.time_ns for r in raised if r.uncaught and not r.thread_is_main)
        ended_ns = rank.ended_ns or 0  # its own error is the reason, and no limit
        failed = any(ended_ns - THREAD_ERROR_NS < time_ns <= ended_ns for time_ns in of_thread)
        return None if failed else EndedByThread(place=read_or_none(Frame, noted.get("frame")))
    limit_ns = cells["own_limit_ns"]
    by_limit = rank.exit_code == 1 and limit_ns and (rank.ended_ns or 0) > limit_ns - LIMIT_SLACK_NS
    return EndedByThread() if by_limit and not cells["main_ended_ns"] and "exit" not in last else None


def _with_stacks(
    rank: Rank, content: ring_reading.RingContent, context: RankContext, watched: WatchedRank, evidence: dict[str, Any]
) -> Rank:
    process = find_note(content.notes, "process")
    main, roots = process.get("main"), tuple(str(root) for root in process.get("roots") or ())
    path = context.run.path / "evidence" / f"{content.pid}-{content.start_ticks}"
    on_request, fatal, struck = split_dump(read_text(f"{path}.dump"))
    ended = find_note(reversed(content.notes), "ended_by_thread")
    if ended:  # written at the end, after any answer
        stack = {"thread": "MainThread", "main": 1, "frames": ended.get("stack")}
        evidence = {"looks": [{"at": ended.get("at"), "stacks": [stack]}]}
    samples = read_samples(evidence)
    if not samples:  # those that a signal triggered, one for each part of the dump file
        parts = (
            (time_ns, parse_stacks(on_request[start:end], main if isinstance(main, int) else None, roots))
            for start, end, time_ns in watched.dumps
        )
        samples = tuple(StackSample(time_ns=at, by="signal", stacks=stacks) for at, stacks in parts if stacks)
    if not samples and (stacks := parse_stacks(read_text(f"{path}.term"), None, roots)):
        # Written on SIGTERM, by ranks that were not asked for evidence in time
        samples = (StackSample(time_ns=content.cells["heartbeat_ns"], by="signal", stacks=stacks),)
    # The user's last known line: that of the last call, or of the sampler if its last sample is newer
    last, place = content.slots[-1] if len(content.slots) else None, content.place
    looked_ns = content.cells["heartbeat_ns"] - LOOKS_APART_NS
    last_place = Frame(file=place[0], line=place[1], function=place[2], user=True) if place else None
    if last is not None and last.site is not None and (place is None or last.started_ns > looked_ns):
        last_place = read_or_none(Frame, last.site)
    return replace(
        rank,
        samples=samples,
        last_place=last_place,
        fatal_place=_innermost_user(parse_stacks(struck, main, roots))
        or _innermost_user(parse_stacks(fatal, main, roots)),
        fatal_outside=bool(fatal) and not struck,
    )


def _with_device_calls(
    rank: Rank, content: ring_reading.RingContent, context: RankContext, evidence: dict[str, Any], log: CallLog
) -> Rank:
    """Add the groups, and the calls that have not ended on the host or on the device."""
    # The groups that the rank last reported (in its evidence or at a failed call), or infer them from calls. A slow
    # start can trigger a request for evidence. If the job fails later, that answer is out of date, and the calls count
    # instead.
    # By group, the highest sequence number among ended calls and the starts of phases
    highest: dict[str, int] = {}
    for kind, at in log.last.items():
        name = kind.group or DEFAULT_GROUP
        number = log.numbers[at] - (1 if kind.numbered and not log.ended_ns[at] else 0)
        if log.numbers[at] > 0 and kind.op != "work_wait":
            highest[name] = max(highest.get(name, 0), number)
    raised = (note for note in reversed(content.notes) if note.get("k") == "raised")
    reported = [found for entry in (evidence, *raised) if (found := read_groups(entry.get("groups")))]
    members = {group.name: group.ranks for groups in reported[:1] for group in groups}
    inferred = tuple(
        GroupState(name=name, ranks=members.get(name, ()), backend="", enqueued=number)
        for name, number in sorted(highest.items())
    )
    fresh = (groups for groups in reported if all(highest.get(group.name, 0) <= group.enqueued + 1 for group in groups))
    groups = next(fresh, inferred)
    # torch's dump is newer than the answer of a process that has ended.
    is_over = content.pid in context.ends or context.watch.of(content.pid).ended_ns is not None
    dumped = read_dump(context.run.path, content) if is_over or not evidence else None
    flight = dumped or read_flight(evidence)
    on_nccl = "nccl" in str(find_note(reversed(content.notes), "initialized").get("backend")).lower()
    unread = dumped is None and evidence.get("flight_recorder") is None and not is_over
    return replace(
        rank,
        groups=groups,
        device_unread=(on_nccl and unread) or (flight.untold is not None and flight.idle is None),
        device_idle=flight.idle,
        open_calls=(*log.open(), *pending_on_device(flight, log, groups)),
        device_times=device_times(flight, content.notes),
    )


def _innermost_user(stacks: tuple[Stack, ...]) -> Frame | None:
    ordered = sorted(stacks, key=lambda stack: not stack.is_main)
    return next((frame for stack in ordered for frame in reversed(stack.frames) if frame.user), None)


def _helper_errors(
    raised: tuple[Raised, ...], evidence: dict[str, Any], source: Source, context: RankContext
) -> tuple[HelperError, ...]:
    """Return the errors of a rank's threads, tasks, pools and children; the watcher kept those of ended children."""
    found = [HelperError(who=Helper.THREAD, error=r) for r in raised if r.uncaught and not r.thread_is_main]
    for entry in dicts(evidence.get("helpers")):
        who = Helper.TASK if entry.get("who") == Helper.TASK.value else Helper.CALL
        found.append(HelperError(who=who, name=str(entry.get("name") or ""), error=read_error(entry)))
    pids = {source.pid, source.stands_for}
    rows = (context.watch.of(pid).child_errors for pid in pids if pid is not None)
    kept = {(error.name, error.error.time_ns): error for row in rows for error in row}
    still = [entry for pid in pids if pid is not None for entry in context.child_errors.get(pid, ())]
    kept |= {(error.name, error.error.time_ns): error for error in read_all(HelperError, still)}
    return tuple(sorted((*found, *kept.values()), key=lambda error: error.error.time_ns))


def _children(watched: WatchedRank, context: RankContext) -> tuple[Child, ...]:
    found = []
    for child in watched.children:
        content = context.run.contents.get(child.pid)
        is_recorded = content is not None and content.start_ticks == child.ticks
        samples = read_samples(read_answer(context.run.answers, child.pid, child.ticks)) if is_recorded else ()
        # It waits for work if its last sample has a queue's frame below the last user frame.
        stacks = [stack.frames for sample in samples[-1:] for stack in sample.stacks if stack.is_main]
        below = itertools.takewhile(lambda frame: not frame.user, reversed(stacks[0] if stacks else ()))
        idle = any(frame.file.endswith(IDLE_FILES) for frame in below)
        found.append(Child(pid=child.pid, name=child.name, proc_state=child.state, samples=samples, idle=idle))
    return tuple(found)


def find_answers(folder: Path) -> Answers:
    """Return the answers in the evidence folder, which is listed only once for all ranks."""
    found: Answers = {}
    for name in list_names(folder):
        stem, dot, kind = name.partition(".")
        numbers = stem.split("-")
        if dot and kind == "json" and len(numbers) == 3 and all(number.isdigit() for number in numbers):
            pid, ticks, request = map(int, numbers)
            found.setdefault((pid, ticks), []).append((request, str(folder / name)))
    return found


def read_answer(answers: Answers, pid: int, ticks: int) -> dict[str, Any]:
    """Return the latest readable answer of a process, or an empty dict."""
    for _, path in sorted(answers.get((pid, ticks), ()), reverse=True):
        try:
            body = parse_group_json(read_plain(path))
        except DAMAGED:
            continue
        if isinstance(body, dict):
            return body
    return {}


def parse_stacks(text: str, main_ident: int | None, roots: tuple[str, ...]) -> tuple[Stack, ...]:
    """Return the stacks of one dump; ``roots`` are the folders of the rank's standard library."""
    stacks: list[Stack] = []
    frames: list[Frame] | None = None
    thread: str | None = None
    for line in [*text.splitlines(), ""]:
        head = _THREAD.match(line)
        alone = _ALONE.match(line)
        if head or alone or not line.startswith("  "):
            if frames:
                is_main = thread is None or (main_ident is not None and int(thread, 16) == main_ident)
                name = "MainThread" if thread is None or is_main else f"thread 0x{thread.lstrip('0')}"
                stacks.append(Stack(thread=name, is_main=is_main, is_daemon=False, frames=tuple(reversed(frames))))
            frames, thread = [] if head or alone else None, head.group(2) if head else None
        elif frames is not None and (match := _FRAME.match(line)):
            file, number, function = match.groups()
            is_ours = file.startswith("<") or "/ddpdoctor/recorder/" in file
            user = not is_ours and not ring_layout.is_library_path(file, roots)
            frames.append(Frame(file=file, line=int(number) if number.isdigit() else 0, function=function, user=user))
    return tuple(stacks)


def split_dump(text: str) -> tuple[str, str, str]:
    """Return what was dumped on request, the part from the fatal error on, and of that the thread that the signal hit.

    The second is empty if there was no fatal error, and the third if the thread runs no Python.
    """
    on_request, fatal, after = text.partition(FATAL)
    _, current, struck = after.partition(_CURRENT)
    return on_request, fatal + after, current + struck.partition("\n\n")[0]


def read_loaders(notes: Iterable[dict[str, Any]], evidence: dict[str, Any]) -> tuple[LoaderSeen, ...] | None:
    """Return the loaders in the order of first use, or None; later notes and the evidence replace earlier ones."""
    loaders: dict[int, dict[str, Any]] = {}
    passes: dict[int, dict[int, dict[str, Any]]] = {}
    strays: dict[int, dict[str, Any]] = {}
    for note in (*notes, *dicts(evidence.get("loaders"))):
        if note.get("k") == "loader":
            loaders[whole_or_0(note.get("n"))] = note
        elif note.get("k") == "pass":
            passes.setdefault(whole_or_0(note.get("l")), {})[whole_or_0(note.get("p"))] = note
        elif note.get("k") == "epoch_call":
            strays[whole_or_0(note.get("n"))] = note
    if not loaders:
        return None
    calls = [note for _, note in sorted(strays.items()) if not note.get("used")]
    found = []
    for number, note in sorted(loaders.items()):
        of_loader = sorted(passes.get(number, {}).items())
        ordered = [entry for _, entry in of_loader]
        epochs = tuple(read_record(EpochSeen, entry, trained=whole_or_0(entry.get("bw")) > 0) for entry in ordered)
        loader = read_record(
            LoaderSeen, note, indices_seen=not note.get("it") and any(epoch.drawn for epoch in epochs), epochs=epochs,
            passes=of_loader[-1][0] if of_loader else 0,
            trained_batches=max((whole_or_0(entry.get("tb")) for entry in ordered), default=0),
            in_join=any(bool(entry.get("j")) for entry in ordered),
            stray_calls=read_all(EpochCall, [call for call in calls if call.get("N") == note.get("N") is not None]),
        )  # fmt: skip
        found.append(replace(loader, samples=None) if any(entry.get("w") for entry in ordered) else loader)
    return tuple(found)
