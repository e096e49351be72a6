"""Combines what the ring, the evidence, the agent and the watcher say about one rank."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.rank.answers import Answers, dicts, read_answer, read_groups, read_looks, read_seconds
from ddpdoctor.collect.rank.call_logs import read_log
from ddpdoctor.collect.rank.dumps import parse_stacks, split_fatal, struck_thread
from ddpdoctor.collect.rank.flight import device_times, noted_times, pending_on_device, read_dump, read_flight
from ddpdoctor.collect.rank.frames import read_frame, read_frames
from ddpdoctor.collect.rank.loaders import read_loaders
from ddpdoctor.collect.rank.notes import read_models, read_nonfinite, read_reducer, read_unfinished
from ddpdoctor.collect.rank.saved_causes import read_process_causes
from ddpdoctor.collect.rank.steps import read_fetches, read_lines, read_steps
from ddpdoctor.collect.run.agent_log import read_lacks
from ddpdoctor.collect.run.evidence import read_text
from ddpdoctor.collect.run.sources import Source, process_note
from ddpdoctor.model.facts import BeforeCall, Child, GroupState, Life, Raised, Rank
from ddpdoctor.model.stacks import Frame, Look, Stack
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.collect.run.watched import Watch, Watched
    from ddpdoctor.model.call_log import CallLog
    from ddpdoctor.recorder.storage import ring_reading

MOST_RANKS = 2**18
"""Our choice: more than twice the size of the largest known jobs."""
IDLE_FILES = ("/multiprocessing/queues.py", "/multiprocessing/connection.py", "/multiprocessing/pool.py")
"""A child that waits for work has a frame in one of these. Deeper frames (select, a lock) are C code or the stdlib."""
DEFAULT_GROUP = "0"
LOOKS_APART_NS = 150_000_000
"""The sampler reads the user's current line slightly more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs that all ranks of one attempt share."""

    folder: Path
    host: str
    attempt: int
    ends: dict[int, dict[str, Any]]
    stop_ns: int | None
    watch: Watch
    contents: dict[int, ring_reading.RingContent]
    children: dict[int, list[ring_reading.RingContent]]
    answers: Answers
    lost: dict[int, str]
    agent_lacks: tuple[str, ...] = ()


def read_rank(source: Source, context: Context) -> Rank:
    """Return all that is known about one rank, and what cannot be read."""
    try:
        return _read_rank(source, context)
    except Exception as error:  # noqa: BLE001 - damaged data of one rank must not hide the others
        why = f"what was collected of it is damaged ({type(error).__name__}: {error})"
        return Rank(
            rank=source.rank, local_rank=None, host=context.host, pid=source.pid, attempt=context.attempt,
            life=Life.GONE, lost=why,
        )  # fmt: skip


def _read_rank(source: Source, context: Context) -> Rank:
    content = context.contents.get(source.pid)
    watched = context.watch.of(source.pid)
    seen = Rank(
        rank=source.rank,
        local_rank=source.local_rank,
        host=context.host,
        pid=source.pid,
        attempt=context.attempt,
        life=Life.RUNNING,
        world_size=believed(source.world_size),
        proc_state=watched.state,
        cpu_share=watched.cpu_share,
        traced_by=watched.tracer or None,
        frozen_since_ns=watched.frozen_since_ns,
        before_call=_before_call(watched.before_call),
        oom_killed=watched.oom,
        last_progress_ns=watched.last_progress_ns,
        lost=context.lost.get(source.pid) or _defects(content) or watched.why,
        causes=read_process_causes(watched.causes, [], {}) if content is None else None,
    )
    ended = _with_end(seen, context, watched)
    return ended if content is None else _with_ring(ended, content, source, context)


def believed(world_size: int | None) -> int | None:
    """Return the world size, or None if only a damaged file can hold one so large: rules loop over all ranks."""
    return world_size if world_size is not None and world_size <= MOST_RANKS else None


def _defects(content: ring_reading.RingContent | None) -> str | None:
    """Return which recorder hooks failed, for example because torch lacks the function they patch; None if none did."""
    notes = [note for note in content.notes if note.get("k") == "defect"] if content else []
    return "; ".join(sorted({f"{note.get('hook')}: {note.get('error')}" for note in notes})) or None


def _with_end(rank: Rank, context: Context, watched: Watched) -> Rank:
    """Add how and when the rank ended: the agent knows how, but the watcher often sees the end earlier."""
    end = context.ends.get(rank.pid or 0)
    gone_ns = watched.ended_ns
    if end is None:
        if gone_ns is None:
            return rank
        return replace(rank, life=Life.GONE, ended_ns=gone_ns, after_stop=_after(gone_ns, context.stop_ns))
    ended_ns = min(filter(None, (gone_ns, int(end["at"]))))
    rank = replace(rank, ended_ns=ended_ns, after_stop=_after(ended_ns, context.stop_ns))
    code = int(end["code"])
    if code >= 0:
        return replace(rank, life=Life.EXITED, exit_code=code)
    return replace(rank, life=Life.SIGNALED, signal=_signal_name(-code))


def _after(moment: int, stop_ns: int | None) -> bool:
    return stop_ns is not None and moment >= stop_ns


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_ring(rank: Rank, content: ring_reading.RingContent, source: Source, context: Context) -> Rank:
    """Add what the process itself recorded."""
    watched = context.watch.of(content.pid)
    log = read_log(content.slots)
    notes = content.notes
    process = process_note(content)
    roots = tuple(str(root) for root in process.get("roots") or ())
    evidence = {} if watched.dumps else read_answer(context.answers, content.pid, content.start_ticks)
    on_request, fatal = split_fatal(_read_dump(context.folder, content))
    looks = read_looks(evidence) or _signal_looks(on_request, process.get("main"), roots, watched)
    looks = looks or _last_look(context.folder, content, roots)
    world: dict[str, Any] = next((n for n in reversed(notes) if n.get("k") in ("initialized", "init")), {})
    begun: dict[str, Any] = next((n for n in reversed(notes) if n.get("k") == "init"), {})
    leaving: dict[str, Any] = next((n for n in reversed(notes) if n.get("k") == "exit"), {})
    groups = _groups(evidence, notes, log)
    dumped = read_dump(context.folder, content) if _is_over(content, context) or not evidence else None
    flight = dumped or read_flight(evidence)
    cells = content.cells
    return replace(
        rank,
        recorded=True,
        answered=bool(evidence),
        started_ns=cells["started_ns"],
        world_size=believed(world.get("world_size") or source.world_size),
        init_timeout_s=read_seconds(begun.get("timeout_s")),
        initialized=bool(cells["initialized"]),
        main_ended_ns=cells["main_ended_ns"] or None,
        exit_call=read_frame(leaving.get("frame")),
        exit_asked=leaving.get("status"),
        last_place=_last_place(content),
        fatal_place=_innermost_user(parse_stacks(struck_thread(fatal), process.get("main"), roots))
        or _innermost_user(parse_stacks(fatal, process.get("main"), roots)),
        fatal_outside=bool(fatal) and not struck_thread(fatal),
        open_calls=(*log.open(), *pending_on_device(flight, log, groups)),
        device_times=device_times(flight) or noted_times(notes),
        recent_calls=log.ended(),
        groups=groups,
        looks=looks,
        children=_children(watched, context),
        causes=read_process_causes(watched.causes, notes, evidence),
        raised=_raised(notes),
        handled=next(iter(_raised([dict(evidence.get("handled") or {}, k="raised")])), None)
        if evidence.get("handled")
        else None,
        models=read_models(notes),
        unfinished=read_unfinished(notes),
        loaders=read_loaders(notes, evidence),
        nonfinite=read_nonfinite(notes),
        step_times=read_steps(content),
        fetch_times=read_fetches(context.children.get(content.pid, ()), watched.child_fetches),
        lines_seen=read_lines(content, context.children.get(content.pid, ()), watched.child_lines or ()),
        lacks=tuple(sorted({*read_lacks(notes), *context.agent_lacks})),
        steps=cells["steps"],
        batches=cells["batches"],
        epochs=cells["epochs"],
    )


def _is_over(content: ring_reading.RingContent, context: Context) -> bool:
    """Return whether a process has ended, which makes torch's dump newer than the process's answer."""
    return content.pid in context.ends or context.watch.of(content.pid).ended_ns is not None


def _before_call(row: Any) -> BeforeCall | None:
    if not isinstance(row, dict):
        return None
    lines = tuple(Frame(file=str(f), line=int(n), function=str(name), user=True) for f, n, name in row["lines"])
    return BeforeCall(until_ns=int(row["until_ns"]), lines=lines)


def _last_place(content: ring_reading.RingContent) -> Frame | None:
    """Return the user's last known line: that of the last call, or of the sampler if its last sample is newer."""
    last = content.slots[-1] if len(content.slots) else None
    looked_ns = content.cells["heartbeat_ns"] - LOOKS_APART_NS
    if last is not None and last.site is not None and (content.place is None or last.started_ns > looked_ns):
        return read_frame(last.site)
    return _place(content.place)


def _place(place: tuple[str, int, str] | None) -> Frame | None:
    return Frame(file=place[0], line=place[1], function=place[2], user=True) if place else None


def _innermost_user(stacks: tuple[Stack, ...]) -> Frame | None:
    for stack in sorted(stacks, key=lambda stack: not stack.is_main):
        for frame in reversed(stack.frames):
            if frame.user:
                return frame
    return None


def _raised(notes: list[dict[str, Any]]) -> tuple[Raised, ...]:
    """Return each exception once: it is noted when its call fails, and again when it ends the process."""
    found: list[Raised] = []
    for note in notes:
        if note.get("k") != "raised":
            continue
        raised = Raised(
            type=str(note.get("type")), message=_message(note), time_ns=int(note.get("at") or 0),
            thread_is_main=bool(note.get("main")), uncaught=bool(note.get("uncaught")), in_call=note.get("call"),
            frames=read_frames(note.get("frames")), from_child=bool(note.get("child")),
            reducer=read_reducer(note.get("reducer")),
            passed_on_as=str(note.get("as") or ""), of_ranks=_numbers(note.get("ranks")),
        )  # fmt: skip
        if found and not found[-1].uncaught and (found[-1].type, found[-1].message) == (raised.type, raised.message):
            found.pop()
        found.append(raised)
    return tuple(found)


def _numbers(value: Any) -> tuple[int, ...]:
    return tuple(number for number in value if isinstance(number, int)) if isinstance(value, list) else ()


def _message(note: dict[str, Any]) -> str:
    """Return an error's text. If a child passed the error on, that is the last line of the child's traceback."""
    text = hide_in_text(str(note.get("text")))  # earlier recorders did not hide secrets
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix(f"{note.get('type')}: ") if note.get("child") and lines else text


def _groups(evidence: dict[str, Any], notes: list[dict[str, Any]], log: CallLog) -> tuple[GroupState, ...]:
    """Return the groups that the rank last reported (in its evidence or at a failed call), or infer them from calls.

    A slow start can trigger a request for evidence. If the job fails later, that answer is out of date, and the
    calls count instead.
    """
    highest = _highest_numbers(log)
    raised = (note for note in reversed(notes) if note.get("k") == "raised")
    told = [found for entry in (evidence, *raised) if (found := read_groups(entry.get("groups")))]
    fresh = next((groups for groups in told if not any(_is_outdated(group, highest) for group in groups)), None)
    if fresh is not None:
        return fresh
    members = {group.name: group.ranks for groups in told[:1] for group in groups}
    return tuple(
        GroupState(name=name, ranks=members.get(name, ()), backend="", enqueued=number)
        for name, number in sorted(highest.items())
    )


def _is_outdated(group: GroupState, highest: dict[str, int]) -> bool:
    """Return whether a call has a number beyond the next one that the group's reported counter allows."""
    return highest.get(group.name, 0) > group.enqueued + 1


def _highest_numbers(log: CallLog) -> dict[str, int]:
    """Return, by group, the highest sequence number among ended calls and the starts of phases."""
    highest: dict[str, int] = {}
    for kind, at in log.last.items():
        name = kind.group or DEFAULT_GROUP
        number = log.numbers[at] - (1 if kind.numbered and not log.ended_ns[at] else 0)
        if log.numbers[at] > 0 and kind.op != "work_wait":
            highest[name] = max(highest.get(name, 0), number)
    return highest


def _read_dump(folder: Path, content: ring_reading.RingContent) -> str:
    return read_text(folder / "evidence" / f"{content.pid}-{content.start_ticks}.dump")


def _signal_looks(text: str, main: Any, roots: tuple[str, ...], watched: Watched) -> tuple[Look, ...]:
    """Return the stack samples that a signal triggered, one for each part of the dump file."""
    looks = []
    for start, end, moment in watched.dumps or ():
        stacks = parse_stacks(text[start:end], main if isinstance(main, int) else None, roots)
        if stacks:
            looks.append(Look(time_ns=moment, by="signal", stacks=stacks))
    return tuple(looks)


def _last_look(folder: Path, content: ring_reading.RingContent, roots: tuple[str, ...]) -> tuple[Look, ...]:
    """Return the stack that a rank wrote on SIGTERM, for ranks that were not asked for evidence in time."""
    path = folder / "evidence" / f"{content.pid}-{content.start_ticks}.term"
    stacks = parse_stacks(read_text(path), None, roots)
    return (Look(time_ns=content.cells["heartbeat_ns"], by="signal", stacks=stacks),) if stacks else ()


def _children(watched: Watched, context: Context) -> tuple[Child, ...]:
    found = []
    for entry in dicts(watched.children):
        content = context.contents.get(entry["pid"])
        if content is not None and content.start_ticks != entry.get("ticks"):
            content = None
        looks = read_looks(read_answer(context.answers, content.pid, content.start_ticks)) if content else ()
        found.append(
            Child(pid=entry["pid"], name=str(entry.get("name", "")), proc_state=entry.get("state"), looks=looks,
                  idle=is_idle(looks))
        )  # fmt: skip
    return tuple(found)


def is_idle(looks: tuple[Look, ...]) -> bool:
    """Return whether a child waits for work: its last sample has a queue's frame below the last user frame."""
    for look in looks[-1:]:
        for stack in look.stacks:
            if stack.is_main:
                below = _below_user(stack.frames)
                return any(frame.file.endswith(IDLE_FILES) for frame in below)
    return False


def _below_user(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    last = max((i for i, frame in enumerate(frames) if frame.user), default=-1)
    return frames[last + 1 :]
