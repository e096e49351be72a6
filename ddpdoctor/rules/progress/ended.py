"""DD603, DD604, DD605, DD609 and DD612: a rank has ended or should have, cleanly or not, and blocks the others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Helper
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.model.known_errors import SHM_FIX, find_known
from ddpdoctor.model.node import DEVICE_ERROR
from ddpdoctor.model.reading import known as known_of
from ddpdoctor.model.words import format_memory, grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.environment.gpus import OTHER_XID, XIDS
from ddpdoctor.rules.progress import states as st
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.branches import AT_THE_END, find_turning
from ddpdoctor.rules.progress.job_state import Cause, JobState, asked_if, causes_at, machines_of
from ddpdoctor.rules.progress.mismatch import COMPLAINTS, SPLITS_FIT, names_words, other_words, reducer_clues
from ddpdoctor.rules.progress.stuck import judge_lost, left_file_problem
from ddpdoctor.rules.progress.wait_causes import clues_of
from ddpdoctor.rules.progress.words import Clue, fix_of, sentences
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.facts import Call, Rank, Space
    from ddpdoctor.model.stacks import Frame

NEARLY_FULL = 0.9  # our choice: above this share of a limit, the memory in use blocked the next allocation
# Our choice: if more than this share of torch's reserved memory is unused, its free pieces are too small.
FRAGMENTED = 0.15
_OF_DEVICE = re.compile(r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_OF_HOST = re.compile(r"DefaultCPUAllocator|allocate memory|std::bad_alloc|Unable to allocate")
_ASKED = re.compile(r"you tried to allocate (\d+) bytes")
_OF_SHARED = re.compile(r"shared memory|</?torch_|\bshm\b|/dev/shm|bus error", re.IGNORECASE)
_WORKER = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) (?P<how>.*)")
LESS = "use less memory per rank: smaller batches, fewer loader workers or less prefetching"
_PID = re.compile(r"\bpid='?(\d+)")  # the driver's "pid=4711, name=python"; it writes "pid='<unknown>'" too
_FATAL_DUMP = frozenset({"SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGILL"})
_STEP_TOGETHER = (
    "give every rank the same number of steps (drop_last=True, model.join()), and call dist.barrier() before the "
    "script ends"
)
_OOM_WORDS = {
    True: "the kernel's OOM killer sent the signal",
    False: "the kernel's OOM killer did not send the signal",
    None: "it is unknown whether the kernel's OOM killer sent the signal",
}
# The interpreter waits here at its end until everything that was put into a queue has been read.
QUEUES_FILE = "/multiprocessing/queues.py"
# Share of a core above which an ending process counts as working. Our choice: one that waits uses none.
AT_WORK_SHARE = 0.02
# CPU seconds that an interpreter gets to shut down, however long that takes on crowded cores. Our choice: freeing torch
# takes about 1 s.
TEARDOWN_CPU_S = 10.0


def memory_clues(job: JobState, failure: st.Failure) -> tuple[Clue, ...]:
    rank, error = failure.rank, failure.error
    at_error = rank.causes.at_error if rank.causes is not None else None
    # /dev/shm when it was fullest: at the time of an error, a worker's files may already be gone
    seen = (at_error if error is not None else None, causes_at(job.facts, rank.host))
    spaces = [causes.shared_memory for causes in seen if causes is not None and causes.shared_memory is not None]
    shared = max(spaces, key=lambda space: space.used_bytes, default=None)
    if error is None:
        if rank.signal == "SIGBUS":
            return tuple(_of_shared(shared))
        space, _ = _limit(job, rank)
        killed = rank.signal == "SIGKILL" and rank.oom_killed is not False and (rank.oom_killed or _is_full(space))
        return tuple(_use(job, rank)) if killed else ()
    text = f"{error.type}: {error.message}"
    if error.type == "OutOfMemoryError" or _OF_DEVICE.search(text):
        devices = at_error.devices if at_error is not None else ()
        loose = any(gpu.reserved_bytes - gpu.allocated_bytes > FRAGMENTED * gpu.reserved_bytes for gpu in devices)
        more = "; much reserved memory is unused: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if loose else ""
        fix = f"use less GPU memory: smaller batches, activation checkpointing or sharding{more}"
        used = [
            f"on GPU {device.device}, tensors used {format_memory(device.allocated_bytes)} "
            f"(peak {format_memory(device.most_allocated_bytes)}), and torch had reserved "
            f"{format_memory(device.reserved_bytes)} (peak {format_memory(device.most_reserved_bytes)})"
            for device in devices
        ]
        return (*map(Clue, used), Clue("the GPU ran out of memory", fix)) if used else ()
    if worker := _WORKER.search(text):  # a signal ended a loader's worker: /dev/shm was full, or memory ran out
        if "Bus error" in worker["how"] or _is_full(shared):
            return tuple(_of_shared(shared))
        return tuple(_use(job, rank)) if "Killed" in worker["how"] else ()
    if _OF_SHARED.search(text):
        return tuple(_of_shared(shared, refused="No space left" in text))
    if error.type != "MemoryError" and not _OF_HOST.search(text):
        return ()
    found = []
    if at_error is not None and at_error.address_space is not None:
        space, asked = at_error.address_space, _ASKED.search(text)
        more = f", and it asked for {format_memory(int(asked[1]))} more" if asked else ""
        found.append(Clue(
            f"its address space was {format_memory(space.used_bytes)} of the {format_memory(space.limit_bytes)} "
            f"that RLIMIT_AS (ulimit -v) allows{more}",
            f"{LESS}, or raise the limit: ulimit -v unlimited",
        ))  # fmt: skip
    if at_error is None or at_error.memory is None:
        return (*found, *_use(job, rank))
    resident, most = map(format_memory, (at_error.memory.used_bytes, at_error.memory.most_bytes))
    limit, whose = _limit(job, rank)
    of = f", of the {format_memory(limit.limit_bytes)} that {whose}" if limit is not None else ""
    return (*found, Clue(f"had {resident} resident when it failed (peak {most}){of}", LESS))


def _use(job: JobState, rank: Rank) -> Iterator[Clue]:
    if rank.causes is None or rank.causes.memory is None:
        return
    space, whose = _limit(job, rank)
    said = f"used {format_memory(rank.causes.memory.most_bytes)} when last measured"
    if space is not None:
        said += f", of the {format_memory(space.limit_bytes)} that {whose}"
    below = rank.causes.children_memory
    if below is not None and rank.causes.children_count:
        said += f"; its {rank.causes.children_count} child processes used {format_memory(below.most_bytes)}"
    yield Clue(said=said, fix=f"{LESS}, or raise the memory limit")


def _limit(job: JobState, rank: Rank) -> tuple[Space | None, str]:
    host = causes_at(job.facts, rank.host)
    if host is None:
        return None, ""
    if host.group is not None and (host.machine is None or host.group.limit_bytes < host.machine.limit_bytes):
        return host.group, "its cgroup allows"
    return host.machine, "the machine has"


def _is_full(space: Space | None) -> bool:
    return space is not None and space.used_bytes >= NEARLY_FULL * space.limit_bytes


def _of_shared(space: Space | None, *, refused: bool = False) -> Iterator[Clue]:
    if space is None:
        return
    size, used = format_memory(space.limit_bytes), format_memory(space.used_bytes)
    if refused or _is_full(space):
        state = "it was full" if _is_full(space) else "the request did not fit"
        yield Clue(
            said=f"/dev/shm had {used} of {size} in use: {state}",  # noqa: S108 - a name in a sentence
            fix=f"{SHM_FIX}, or use fewer loader workers",
        )
    else:
        yield Clue(
            said=f"/dev/shm used at most {used} of {size} when measured; "  # noqa: S108 - likewise
            "it may have been full between measurements"
        )


@rule("DD603", "early-exit", Severity.ERROR, "A rank exited with status 0 while others were waiting for it")
@asked_if(Cause.EARLY_EXIT)
def check_early_exit(job: JobState) -> Answer:
    """Report a rank that ended without an error before it had done its part in a collective."""
    blamed = job.early
    first = job.ranks[blamed[0]]
    # How it parted from a rank that waits for it, unless an exit call explains it.
    turning = None
    waiting = [n for n, at in sorted(job.positions.items()) if blamed[0] in at.group.members and n != blamed[0]]
    if waiting and first.exit_call is None:
        position, states = job.positions[waiting[0]], (job.states[blamed[0]], job.states[waiting[0]])
        seq = position.seq if position.seq is not None else AT_THE_END
        turning = find_turning(job.facts.control_flow, *states, position.group.name, seq, (None, None))
    lines = turning.lines if turning is not None else ()
    where = tuple(place for n in blamed for place in st.places(n, [*lines, _way_out(job.ranks[n])]))
    last = _way_out(first)
    at = f", last seen {st.place_words(last)}" if last is not None else ""
    waiters = say.waiters_words(job, blamed)
    by_signal = grouped((job.ranks[n].exit_signal, n) for n in blamed if job.ranks[n].exit_signal)
    fix = turning.fix if turning is not None and turning.parting.is_earlier else _STEP_TOGETHER
    if first.exit_signal:
        fix = (
            f"do not exit in the handler of {first.exit_signal}: set a flag there, all_reduce it (MAX) at the end of "
            "each step, and let all ranks save and leave the loop in the same step"
        )
    elif first.exit_call is not None:
        fix = (
            f"do not exit {st.place_words(first.exit_call)} on some ranks only: all_reduce the decision (MAX), and let "
            "all ranks leave in the same step; if something is wrong, raise an error instead"
        )
    finding = say.problem_of(
        job,
        blamed,
        where=where,
        summary=f"{say.who(job, blamed)} exited with status 0{at}" + (f"; {waiters}" if waiters else ""),
        evidence=(
            *([turning.words(say.who(job, blamed))] if turning is not None else ()),
            *[f"{rank_list(ranks)} called exit in the script's {name} handler" for name, ranks in by_signal.items()],
            *say.others(job, blamed),
            *say.progress_words(job, blamed),
            *say.cascade_words(job.failures, blamed),
        ),
        fix=fix,
    )
    return judged([finding], certain=not job.is_ending())


def _way_out(rank: Rank) -> Frame | None:
    last = _last_located(rank)
    return rank.exit_call or (last.site if last is not None else None) or rank.last_place


def _last_located(rank: Rank) -> Call | None:
    still_open = [call for call in rank.open_calls if call.site is not None]
    return still_open[-1] if still_open else rank.recent_calls.last_of_kinds(lambda kind: bool(kind.site))


@rule("DD604", "crash", Severity.ERROR, "A rank raised an exception or exited with an error status")
@asked_if(Cause.FAILURE)
def check_crash(job: JobState) -> Answer:
    """Report the rank whose own code failed first."""
    root = job.root_failure
    assert root is not None
    if root.by_signal:
        return skipped("a signal ended the first rank that failed")
    left = left_file_problem(job) if not root.by_itself else None
    return judged([left or _failed(job, root)], certain=not job.is_ending())


@rule("DD605", "killed", Severity.ERROR, "A rank was killed by a signal")
@asked_if(Cause.FAILURE, Cause.NODE_LOST)
def check_killed(job: JobState) -> Answer:
    """Report the rank that was killed by a signal, and which signal."""
    if job.cause is Cause.NODE_LOST:
        return judge_lost(job)
    root = job.root_failure
    assert root is not None
    if not root.by_signal:
        return skipped("the first rank that failed raised an exception or exited with an error status")
    left = left_file_problem(job) if not root.rank.initialized else None  # Gloo can abort on such addresses
    return judged([left or _failed(job, root)], certain=not job.is_ending())


def _failed(job: JobState, root: st.Failure) -> Problem:
    together = tuple(failure for failure in job.failures if failure is root or st.is_same_bug(root, failure))
    blamed = tuple(sorted(failure.rank.rank for failure in together))
    where: tuple[Place, ...] = ()
    for failure in together:  # its line, after that of what it followed from, and the line by which the script left
        then = failure.then.site if failure.then is not None else None
        left_at = failure.rank.exit_call if failure.error is not None else None
        where += st.places(failure.rank.rank, [st.first_line_of(failure), st.failure_line(failure), then, left_at])
    clues = memory_clues(job, root) or reducer_clues(job, root) or _driver_clues(job, root)
    helper = st.error_of_helper(root)
    error = helper.error if helper is not None else root.error and (root.error.first or root.error)
    known = find_known(f"{error.type}: {error.message}") if error is not None else None
    raisers, of_several = blamed, False
    # A text may name the rank that it is about and another one, which need not have raised it yet.
    if known is not None:
        raised = [(failure.rank.rank, failure.error) for failure in together]
        named = {raiser: known.ranks(error.message) for raiser, error in raised if error is not None}
        sharing = {n for raiser, ranks in named.items() if len(ranks) > 1 and raiser in ranks for n in ranks}
        if sharing and sharing <= job.states.keys():
            blamed, of_several = tuple(sorted(sharing)), True
            raisers = tuple(n for n in raisers if n in sharing)
    if known is not None and (not any(clue.fix for clue in clues) or DEVICE_ERROR.search(known.shown)):
        clues = (*clues, Clue(said=f"{known.means} (at fault: {known.fault})", fix=known.fix))
    seen = _signal_words(root)
    if root.error is not None and root.error.passed_on_as:
        seen.append(f"torch raised {root.error.passed_on_as} because of this error")
    seen += _then_words(root)
    # The line of the loader is named, but torch raises a worker's end wherever the rank is.
    if root.error is not None and st.is_lost_worker(root):
        died = "a worker of this DataLoader died; torch raised the error when the rank was"
        seen.append(f"{died} {st.place_words(st.innermost_user(root.error.frames))}")
    in_reducer = root.error is not None and root.error.reducer is not None
    alone = root.call is None and not root.by_watchdog
    return say.problem_of(
        job,
        blamed,
        confidence=Confidence.HIGH if alone else Confidence.LOW if root.by_signal else Confidence.MEDIUM,
        where=tuple(sorted(where, key=lambda place: place.rank)),
        summary=_summary(root, say.who(job, raisers), raisers, where),
        evidence=(
            *seen,
            *sentences(dict.fromkeys(blamed if of_several or in_reducer else (root.rank.rank,), clues)),
            *(other_words(job) if in_reducer else ()),
            *say.cascade_words(job.failures, blamed),
            *say.others(job, [*blamed, *(failure.rank.rank for failure in job.failures)]),
            *say.progress_words(job, blamed),
        ),
        fix=fix_of(
            clues, _fix(root, next(iter(where), None), {failure.rank.rank for failure in job.failures} - set(blamed))
        ),
        origin=known.origin if known is not None else None,
    )


def _driver_clues(job: JobState, root: st.Failure) -> tuple[Clue, ...]:
    # An error of a device may also be a fault of the GPU that the driver wrote of no process, or in a container of one
    # with another pid there; one of another pid may be another job's.
    rank = root.rank
    of_device = root.error is not None and DEVICE_ERROR.search(root.error.message) is not None
    if rank.started_ns is None or not (of_device or root.by_signal):
        return ()
    logs = (known_of(machine.kernel_log) for machine in machines_of(job.facts) if machine.host == rank.host)
    ran_s = (job.facts.now_ns - rank.started_ns) / 1e9
    others = {other.pid for other in job.ranks.values() if other.host == rank.host} - {rank.pid}
    found = {}
    for xid in (xid for log in logs if log is not None for xid in log.xids):
        severity, meaning, fix = XIDS.get(xid.code, OTHER_XID)
        written = _PID.search(xid.text)
        pid = int(written[1]) if written is not None else None
        of_gpu = of_device and severity is not Severity.INFO and pid not in others
        if xid.age_s is None or xid.age_s > ran_s or not (pid == rank.pid or of_gpu):
            continue
        whose = "of this process" if pid == rank.pid else "without a process" if pid is None else f"of process {pid}"
        is_own = severity is not Severity.INFO and pid in (rank.pid, None)
        said = f"the kernel's log has Xid {xid.code} {whose}, at the GPU {xid.bus_id}: {meaning}"
        found[said] = Clue(said=said, fix=fix.replace("{index}", xid.bus_id) if is_own else "")
    return tuple(found.values())


def _then_words(root: st.Failure) -> list[str]:
    said = []
    if root.then is not None:
        said.append(
            f"while it handled this error it called {root.then.op} {st.place_words(root.then.site)}, which the other "
            "ranks do not call now; the error is printed only after that"
        )
    if (helper := st.error_of_helper(root)) is not None:
        whose = "the rank reports the end of its child" if helper.who is Helper.CHILD else "its thread ended the rank"
        said.append(f"{whose}{' ' * bool(helper.name)}{helper.name}: {say.how_words(root)}")
    elif st.first_line_of(root) is not None and root.error is not None:
        said.append(f"the script then raised {root.error.type} {st.place_words(st.failure_line(root))}")
    return said


def _summary(root: st.Failure, who: str, blamed: tuple[int, ...], where: tuple[Place, ...]) -> str:
    at = st.place_words(next((place for place in where if place.rank == root.rank.rank), None))
    helper, error = st.error_of_helper(root), root.error
    first = helper.error if helper is not None else error.first if error and st.first_line_of(root) else None
    if (raised := first or error) is not None:
        whose = f"a {helper.who.value} of {who}" if helper is not None else who
        how = "passed on an error from a child process: " if first is None and raised.from_child else "raised "
        reducer, message = raised.reducer if first is None else None, st.first_line(raised.message)
        message = COMPLAINTS[reducer.what].format(names_words(reducer)) if reducer is not None else message
        return f"{whose} {how}{raised.type} {at}" + (f": {message}" if message else "")
    if not root.by_signal:
        return f"{who} exited with {say.how_words(root).removeprefix('exit ')}" + (f" {at}" if where else "")
    was = verb(blamed, "was", "were")
    killer = f"the kernel's OOM killer ({root.rank.signal})" if root.rank.oom_killed else root.rank.signal
    how = f"{who} {was} killed by {killer}" if root.rank.signal else f"{who} ended for an unknown reason"
    if root.rank.fatal_place is not None:
        return f"{how} {at}"
    return f"{how}; it was last seen {at}" if where else how


def _signal_words(root: st.Failure) -> list[str]:
    if not root.by_signal:
        return []
    found = []
    rank = root.rank
    if rank.signal == "SIGKILL":
        found.append(_OOM_WORDS[rank.oom_killed])
    if rank.fatal_place is None and rank.last_place is not None:
        found.append(f"it was last seen {st.place_words(rank.last_place)}")
    last = _last_located(rank)
    if rank.fatal_place is None and last is not None:
        found.append(f"its last recorded call was {last.op} {st.place_words(last.site)}")
    if rank.signal in _FATAL_DUMP and rank.fatal_place is not None:
        found.append(f"the stack dump at the signal shows it {st.place_words(rank.fatal_place)}")
    if root.by_watchdog:
        other = "then another rank or the network is at fault"
        found.append(
            f"a thread without Python raised the signal at torch's timeout, as the NCCL watchdog does; {other}"
        )
    elif root.call is not None:
        found.append(f"it was in {root.call.op}; an abort there often hits a rank that did nothing wrong")
    return found


def _fix(root: st.Failure, place: Place | None, followed: AbstractSet[int]) -> str:
    if root.then is not None:
        return (
            f"fix the error {st.place_words(place)}; do not call collectives in finally, in except or at exit: let the "
            "process end with its error, and the launcher stops the others"
        )
    if not root.by_signal:
        caused = "; it caused the errors of the other ranks" if followed else ""
        return f"fix the error {st.place_words(place)}{caused}"
    if root.call is not None and root.call.op.startswith("all_to_all"):
        return SPLITS_FIT
    if root.rank.oom_killed:
        return "use less memory per rank (fewer loader workers, smaller batches), or raise the memory limit"
    if root.by_watchdog:
        return (
            'search every rank\'s log for "Watchdog caught collective operation timeout": the rank with the lowest '
            "last completed collective held up the others; run again with a --hang-timeout below torch's timeout"
        )
    if root.rank.signal in _FATAL_DUMP:
        full = "; SIGBUS may mean a full /dev/shm or a truncated mapped file" if root.rank.signal == "SIGBUS" else ""
        return f"check the native code that is called {st.place_words(place)}{full}"
    return "find out who sent the signal: check the batch system's log, dmesg and any watchdog"


@rule("DD609", "exit-hang", Severity.ERROR, "The script has finished, but its process does not exit")
def check_exit_hang(job: JobState) -> Answer:
    """Report a rank whose script has finished but whose process keeps running."""
    if job.failures:
        return skipped(Cause.FAILURE.value)
    ended = [n for n in job.living if job.states[n].doing is st.Activity.SHUTTING_DOWN and n not in job.early]
    now = job.time_ns
    since_ns = {n: now - (job.ranks[n].main_ended_ns or now) for n in ended}
    # Without what was seen of them while their scripts still ran.
    since = [(rank, rank.main_ended_ns or 0) for rank in (job.ranks[n] for n in ended)]
    ranks = {r.rank: replace(r, samples=tuple(s for s in r.samples if s.time_ns >= at_ns)) for r, at_ns in since}
    # An interpreter that has joined its threads, including ddpdoctor's, and still computes takes itself down.
    shares = {n: rank.cpu_share or 0.0 for n, rank in ranks.items() if not rank.samples}
    at_work = {n: share for n, share in shares.items() if ranks[n].proc_state == "R" or share > AT_WORK_SHARE}
    takes_down = {n for n, share in at_work.items() if share * since_ns[n] / 1e9 < TEARDOWN_CPU_S}
    blamed = tuple(n for n in ended if since_ns[n] >= job.timeout_ns and n not in takes_down)
    if not blamed:
        return unknown(f"{rank_list(ended)} finished just now") if ended and not job.facts.ended else passed()
    kept = {n: [s for s in st.other_threads(ranks[n], skip_idle=False) if not s.is_daemon] for n in blamed}
    where: tuple[Place, ...] = ()
    for n in blamed:  # what keeps the process alive: a thread, an exit function, or a child
        lines: list[Frame | None] = [st.innermost_user(stack.frames) for stack in kept[n]]
        lines += [frame for frame in st.lines_seen(ranks[n].samples) if frame.user]
        where += st.places(n, [*lines, *(st.innermost_user(st.main_frames(child)) for child in ranks[n].children)])
    first = next(iter(where), None)
    clues = sentences({n: clues_of(job, n) for n in blamed[: say.MAX_CLASSES]})
    found = []
    for number in blamed[: say.MAX_CLASSES]:
        rank, names = ranks[number], [stack.thread for stack in kept[number]]
        found += [f"threads of rank {number} that the interpreter waits for: {', '.join(names)}"] if names else []
        found += [f"children of rank {number}: {', '.join(c.name for c in rank.children)}"] if rank.children else []
        frames = st.main_frames(rank)
        if frames and st.innermost_user(frames) is None:
            found.append(f"Python itself is {st.place_words(frames[-1])} on rank {number}")
    seen = [*found, *clues, *say.process_words(job, blamed), *say.others(job, blamed)]
    finding = say.problem_of(
        job,
        blamed,
        confidence=Confidence.HIGH if where else Confidence.MEDIUM,
        where=where,
        summary=f"{say.who(job, blamed)} finished the script, but the "
        f"{verb(blamed, 'process does', 'processes do')} not exit"
        + (f": code is still running {st.place_words(first)}" if first is not None else ""),
        evidence=(f"the process has kept running {st.seconds(since_ns[blamed[0]])} after the script finished", *seen),
        fix="empty the multiprocessing queue before the script ends, or call its cancel_join_thread()"
        if any(st.is_file(frame, QUEUES_FILE) for frame in st.main_frames(ranks[blamed[0]]))
        else "stop that thread, child process or atexit function before the script ends, or make the thread a daemon",
        step=None,
    )
    return judged([finding], certain=set(job.living) <= {*blamed, *job.quiet}, may_resume=True)


@rule("DD612", "exit-abort", Severity.INFO, "A rank aborted at exit, after its script had finished")
def check_exit_abort(job: JobState) -> Answer:
    """Report a rank that died of SIGABRT, SIGSEGV or SIGBUS after its script had finished without an error."""
    aborted = [job.ranks[n] for n in sorted(job.states) if st.aborted_at_exit(job.ranks[n]) and n not in job.early]
    alike = grouped(((rank.signal or "a signal", rank.fatal_place), rank.rank) for rank in aborted)
    status = job.facts.launcher_status
    problems = []
    for (signal, line), ranks in alike.items():
        died = "aborted" if signal == "SIGABRT" else f"died of {signal}"
        seen = "a known bug in Gloo, pytorch#190489"
        if line is not None:
            seen = f"the stack dump shows it {st.place_words(line)}"
        elif signal != "SIGABRT":
            seen = f"native code crashed, or the dump of an abort did: {seen}"
        problems.append(Problem(
            ranks=tuple(ranks),
            where=tuple(place for n in ranks for place in st.places(n, [line])),
            summary=f"{rank_list(ranks)} {died} at exit, after the script had finished; training is not affected",
            evidence=(
                f"{signal} while the interpreter was shutting down: {seen}",
                *([f"the launcher counts that as a failure: its exit status is {status}"] if status else []),
            ),
            fix=f"check the native code that is called {st.place_words(line)}"
            if line is not None
            else "call dist.barrier() and then dist.destroy_process_group() as the last lines of the script",
        ))  # fmt: skip
    return judged(problems)
