"""Combines what the ring, the evidence, the agent and the watcher have about one rank."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect import recorded as rec
from ddpdoctor.collect.run_files import UNSEEN, Answers, End, WatchedJob, WatchedRank, read_answer, read_text
from ddpdoctor.model import facts
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.collect.run_ranks import Source
    from ddpdoctor.model.launch import Connecting
    from ddpdoctor.model.node import Node

# A child that waits for work has a frame in one of these. Deeper frames (select, a lock) are C code or the stdlib.
IDLE_FILES = (
    "/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/pool.py", "/socketserver.py",
    "/http/server.py", "/asyncio/base_events.py", "/uvicorn/server.py",
)  # fmt: skip
THREAD_ERROR_NS = 5_000_000_000  # within this a failed thread's hook ends the process; our choice
LIMIT_SLACK_NS = 1_000_000_000  # by the clocks of two threads; our choice
LOOKS_APART_NS = 150_000_000  # the sampler reads the user's current line slightly more often than this
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-fA-F]+)[^\n]*\(most recent call first\)")
_ALONE = re.compile(r"^Stack \(most recent call first\)")  # of the main thread, which runs the handlers
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
FATAL = "Fatal Python error:"
_CURRENT = "Current thread "


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run folder holds for all attempts, read once; ``job_of_node`` makes a ``Job`` of each attempt."""

    path: Path
    run: facts.Run
    end: facts.JobEnd | None  # None if the watcher was killed or the job still runs
    agent: Sequence[dict[str, Any]]  # the log of torch's elastic agent
    contents: dict[int, ring_reading.RingContent]  # the rings, by pid
    answers: Answers
    lost: dict[int, str]  # why a process could not be recorded, or its ring not be read, by pid
    machine: Node | None
    control_flow: tuple[facts.ControlFlow, ...]
    nccl_lines: tuple[facts.NcclLine, ...]
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


def read_rank(source: Source, context: RankContext) -> facts.Rank:
    """Return all that is known about one rank, and what cannot be read."""
    try:
        content, watched = context.run.contents.get(source.pid), context.watch.processes.get(source.pid, UNSEEN)
        # Which recorder hooks failed, for example because torch lacks the function they patch
        failed = [note for note in content.notes if note.get("k") == "defect"] if content else []
        joined = rec.find_note(reversed(content.notes), "initialized", "init") if content else {}
        defects = "; ".join(sorted({f"{note.get('hook')}: {note.get('error')}" for note in failed}))
        rank = facts.Rank(
            rank=source.rank, local_rank=source.local_rank, host=context.host, pid=source.pid, attempt=context.attempt,
            life=facts.Life.RUNNING, world_size=rec.believed(joined.get("world_size") or source.world_size),
            proc_state=watched.state,
            cpu_share=watched.cpu_share, traced_by=watched.tracer or None, frozen_since_ns=watched.frozen_since_ns,
            before_call=watched.before_call, oom_killed=watched.oom, last_progress_ns=watched.last_progress_ns,
            starved_ns=watched.starved_ns, lost=context.run.lost.get(source.pid) or defects or watched.why,
            causes=rec.read_process_causes(watched.causes, [], {}) if content is None else None,
        )  # fmt: skip
        # The agent knows how it ended, but the watcher often sees the end earlier.
        end, gone_ns = context.ends.get(source.pid), watched.ended_ns
        if end is not None or gone_ns is not None:
            ended_ns = min(filter(None, (gone_ns, end.at))) if end is not None else gone_ns or 0
            after_stop = context.stop_ns is not None and ended_ns >= context.stop_ns
            rank = replace(rank, life=facts.Life.GONE, ended_ns=ended_ns, after_stop=after_stop)
        if end is not None and end.code >= 0:
            rank = replace(rank, life=facts.Life.EXITED, exit_code=end.code)
        elif end is not None:
            rank = replace(rank, life=facts.Life.SIGNALED, signal=facts.signal_name(-end.code))
        return rank if content is None else _with_ring(rank, content, source, context, watched)
    except Exception as error:  # noqa: BLE001 - damaged data of one rank must not hide the others
        why = f"what was collected of it is damaged ({type(error).__name__}: {error})"
        return facts.Rank(
            rank=source.rank, local_rank=None, host=context.host, pid=source.pid, attempt=context.attempt,
            life=facts.Life.GONE, lost=why,
        )  # fmt: skip


def _with_ring(
    rank: facts.Rank, content: ring_reading.RingContent, source: Source, context: RankContext, watched: WatchedRank
) -> facts.Rank:
    log, notes, cells = rec.read_log(content.slots), content.notes, content.cells
    raised = rec.read_errors(notes)
    last = {str(note.get("k")): note for note in notes}  # the last note of each kind
    leaving, init = last.get("exit", {}), rec.find_note(notes, "init")
    evidence = {} if watched.dumps else read_answer(context.run.answers, content.pid, content.start_ticks)
    rank = replace(rank, ended_by_thread=_ended_by_thread(rank, last, raised, cells))
    is_over = content.pid in context.ends or watched.ended_ns is not None
    in_handler, recent = any(call.started_ns == cells["handling_ns"] for call in log.open()), log.ended()
    handled = evidence.get("handled") or (last.get("handled") if in_handler else None)
    children = context.children.get(content.pid, ())
    # What the last backward left out, for the first model whose last note still says so
    last_said = {(str(n.get("group")), n.get("model")): n for n in notes if n.get("k") == "unfinished"}.values()
    said = (rec.read_or_none(facts.ReducerSaid, note) for note in last_said)
    began_ns, ended_ns = cells["save_began_ns"], cells["save_ended_ns"]
    save = facts.Save(began_ns=began_ns, ended_ns=ended_ns if ended_ns >= began_ns else None)
    return replace(
        _with_stacks(rank, content, context, watched, evidence), children=_children(watched, context),
        helper_errors=_helper_errors(raised, evidence, source, context),
        **rec.device_facts(context.run.path, content, evidence, log, is_over=is_over), recorded=True,
        answered=bool(evidence), started_ns=cells["started_ns"],
        init_timeout_s=rec.read_seconds(last.get("init", {}).get("timeout_s")),
        init_ns=init.get("at") if isinstance(init.get("at"), int) else None,
        meeting=rec.read_or_none(facts.MeetingFile, init.get("meeting")), initialized=bool(cells["initialized"]),
        main_ended_ns=cells["main_ended_ns"] or None, exit_call=rec.read_or_none(Frame, leaving.get("frame")),
        exit_asked=hide_in_text(leaving["status"]) if isinstance(leaving.get("status"), str) else None,
        exit_signal=str(leaving.get("signal") or ""), recent_calls=recent,
        causes=rec.read_process_causes(watched.causes, notes, evidence), raised=raised,
        handled=rec.read_error(handled) if handled else None, models=rec.read_models(notes),
        parameters=rec.read_parameters(notes), unfinished=next(filter(None, said), None),
        loaders=rec.read_loaders(notes, evidence), nonfinite=rec.read_nonfinite(notes),
        step_times=rec.read_steps(content), speed=rec.read_speed(content),
        gradient_times=rec.read_gradient_times(notes),
        fetch_times=rec.read_fetches(children, watched.child_fetches, max(0, cells["loader_workers"] - 1) or None),
        lines_seen=rec.read_lines(content, children, watched.child_lines),
        lacks=tuple(sorted({*rec.read_lacks(notes), *context.agent_lacks})),
        last_save=save if began_ns else None, steps=cells["steps"], batches=cells["batches"], epochs=cells["epochs"],
    )  # fmt: skip


def _ended_by_thread(
    rank: facts.Rank, last: dict[str, dict[str, Any]], raised: tuple[facts.Raised, ...], cells: Mapping[str, int]
) -> facts.EndedByThread | None:
    """Return the thread that ended a process, or None if its main thread may have left or been stopped from outside."""
    if rank.life not in (facts.Life.EXITED, facts.Life.SIGNALED) or rank.exit_code == 0 or rank.after_stop:
        return None
    if rank.signal in {"SIGALRM", "SIGVTALRM", "SIGPROF"}:  # of its own timers
        return facts.EndedByThread()
    noted = last.get("ended_by_thread")
    if noted and rank.life is facts.Life.EXITED:
        of_thread = (r.time_ns for r in raised if r.uncaught and not r.thread_is_main)
        ended_ns = rank.ended_ns or 0  # its own error is the reason, and no limit
        failed = any(ended_ns - THREAD_ERROR_NS < time_ns <= ended_ns for time_ns in of_thread)
        return None if failed else facts.EndedByThread(place=rec.read_or_none(Frame, noted.get("frame")))
    limit_ns = cells["own_limit_ns"]
    by_limit = rank.exit_code == 1 and limit_ns and (rank.ended_ns or 0) > limit_ns - LIMIT_SLACK_NS
    return facts.EndedByThread() if by_limit and not cells["main_ended_ns"] and "exit" not in last else None


def _with_stacks(
    rank: facts.Rank,
    content: ring_reading.RingContent,
    context: RankContext,
    watched: WatchedRank,
    evidence: dict[str, Any],
) -> facts.Rank:
    process = rec.find_note(content.notes, "process")
    ended = rec.find_note(reversed(content.notes), "ended_by_thread")
    main, roots = process.get("main"), tuple(str(root) for root in process.get("roots") or ())
    path = context.run.path / "evidence" / f"{content.pid}-{content.start_ticks}"
    if ended:  # written at the end, after any answer
        stack = {"thread": "MainThread", "main": 1, "frames": ended.get("stack")}
        evidence = {"looks": [{"at": ended.get("at"), "stacks": [stack]}]}
    samples = rec.read_samples(evidence)
    on_request, fatal, struck = split_dump(read_text(f"{path}.dump"))
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
        last_place = rec.read_or_none(Frame, last.site)
    return replace(
        rank,
        samples=samples,
        last_place=last_place,
        fatal_place=_innermost_user(parse_stacks(struck, main, roots))
        or _innermost_user(parse_stacks(fatal, main, roots)),
        fatal_outside=bool(fatal) and not struck,
    )


def _innermost_user(stacks: tuple[Stack, ...]) -> Frame | None:
    ordered = sorted(stacks, key=lambda stack: not stack.is_main)
    return next((frame for stack in ordered for frame in reversed(stack.frames) if frame.user), None)


def _helper_errors(
    raised: tuple[facts.Raised, ...], evidence: dict[str, Any], source: Source, context: RankContext
) -> tuple[facts.HelperError, ...]:
    """Return the errors of a rank's threads, tasks, pools and children; the watcher kept those of ended children."""
    found = [facts.HelperError(who=facts.Helper.THREAD, error=r) for r in raised if r.uncaught and not r.thread_is_main]
    for entry in rec.dicts(evidence.get("helpers")):
        who = facts.Helper.TASK if entry.get("who") == facts.Helper.TASK.value else facts.Helper.CALL
        found.append(facts.HelperError(who=who, name=str(entry.get("name") or ""), error=rec.read_error(entry)))
    pids = [pid for pid in (source.pid, source.stands_for) if pid is not None]
    rows = (context.watch.processes.get(pid, UNSEEN).child_errors for pid in pids)
    kept = {(error.name, error.error.time_ns): error for row in rows for error in row}
    still = [entry for pid in pids for entry in context.child_errors.get(pid, ())]
    kept |= {(error.name, error.error.time_ns): error for error in rec.read_all(facts.HelperError, still)}
    return tuple(sorted((*found, *kept.values()), key=lambda error: error.error.time_ns))


def _children(watched: WatchedRank, context: RankContext) -> tuple[facts.Child, ...]:
    found = []
    for child in watched.children:
        content = context.run.contents.get(child.pid)
        is_recorded = content is not None and content.start_ticks == child.ticks
        samples = rec.read_samples(read_answer(context.run.answers, child.pid, child.ticks)) if is_recorded else ()
        # It waits for work if its last sample has a queue's frame below the last user frame.
        stacks = [stack.frames for sample in samples[-1:] for stack in sample.stacks if stack.is_main]
        below = itertools.takewhile(lambda frame: not frame.user, reversed(stacks[0] if stacks else ()))
        idle = any(frame.file.endswith(IDLE_FILES) for frame in below)
        found.append(facts.Child(pid=child.pid, name=child.name, proc_state=child.state, samples=samples, idle=idle))
    return tuple(found)


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
    """Return what was dumped on request, what from a fatal error on, and of that the thread (of Python) that it hit."""
    on_request, fatal, after = text.partition(FATAL)
    _, current, struck = after.partition(_CURRENT)
    return on_request, fatal + after, current + struck.partition("\n\n")[0]
