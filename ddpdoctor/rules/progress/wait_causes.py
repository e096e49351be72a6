"""What a rank without progress waits for or works on: a limit, a person, a compiler, a lock, a child, a network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Helper, LockKind
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import format_age, rank_list
from ddpdoctor.rules.progress import states as st
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.waits import native_group, own_state
from ddpdoctor.rules.progress.words import Clue, find_owner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.facts import Blocked, HelperError, LockFile, ProcessCauses, Rank, Work
    from ddpdoctor.model.findings import Place
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.answers import Problem
    from ddpdoctor.rules.progress.job_state import JobState
    from ddpdoctor.rules.progress.waits import CallPosition

# Our choice: how long torch gets after its limit to act by itself: to raise, or to let NCCL's watchdog write its dump.
GRACE_NS = 30_000_000_000
# Calls that may have a longer limit than their group; torch ends them by itself.
_OWN_LIMITS = frozenset({"barrier", "monitored_barrier"})
TOGETHER_NS = 1_000_000_000  # our choice: longest gap between the last sample before a call and the start of the call
# Our choice: a computing rank gets more than this share of a core, even if the machine has other work too.
BUSY_CORES = 0.3
# Our choice: a thread that polls with short sleeps wants a core for less of the time than this, however crowded the
# machine is.
BUSY_WANTED = 0.5
# The same limit as for progress (``launch.watch``): a loop that polls a small file stays below it.
BUSY_BYTES_S = 64 * 1024
_BATON = "/torch/utils/file_baton.py"
_LOCKS = ("/threading.py", "/queue.py", "/concurrent/futures/")
_POLLS = ("/filelock/", "/portalocker/", "/fasteners/", _BATON)
_CONNECTIONS = ("/socket.py", "/ssl.py", "/http/client.py", "/urllib3/", "/requests/", "/httpx/", "/httpcore/")
TRAINED_ON_NS = 300_000_000_000  # our choice: a queue that was filled ahead is empty by then
MOST_HOLDERS = 3
_FREES_GROUP = Clue(
    said="it has finished and is freeing its process group; it holds the GIL, and a thread of the group waits for the "
    "GIL (a deadlock in torch)",
    fix="delete the DDP model before the group (`del model`, then `dist.destroy_process_group()`): the model joins "
    "the group's threads without releasing the GIL, and a thread that frees a tensor needs the GIL",
)
_ASKS = frozenset({"cmdloop", "interact", "interaction", "raw_input", "mainloop", "embed", "prompt"})
_DEBUGGERS = ("/pdb.py", "/cmd.py", "/code.py", "/IPython/", "/ipdb/", "/pudb/", "/prompt_toolkit/", "/_pyrepl/")
# Files that are on the stack during compilation, but not while the compiled code runs.
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py", "/torch/_dynamo/symbolic_convert.py", "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/graph.py", "/torch/_inductor/codecache.py", "/torch/_inductor/async_compile.py",
    "/torch/_inductor/cpp_builder.py", "/torch/utils/cpp_extension.py", "/triton/compiler/",
    "/triton/runtime/autotuner.py",
)  # fmt: skip
_BUILDERS = re.compile(r"(?:^|/)(?:ninja|nvcc|cicc|ptxas|c\+\+|g\+\+|gcc|clang(?:\+\+)?|cc1plus|hipcc|cmake)(?: |$)")
_NETWORK = (
    "/socket.py", "/ssl.py", "/http/client.py", "/urllib/request.py", "/urllib3/", "/requests/", "/httpx/",
    "/httpcore/", "/aiohttp/", "/huggingface_hub/", "/botocore/", "/s3fs/", "/gcsfs/", "/wandb/",
)  # fmt: skip
# File systems by the kernel functions in which a process waits for a server; the names are symbols of those modules.
_FILE_SYSTEMS = {
    "NFS": re.compile(r"nfs|^rpc_|xprt"),
    "Lustre": re.compile(r"ptlrpc|^ldlm|^cl_|^ll_|^osc_|^lov_|^mdc_"),
    "FUSE": re.compile(r"fuse|request_wait_answer"),
    "Ceph": re.compile(r"ceph"),
    "SMB": re.compile(r"cifs|smb"),
    "9p": re.compile(r"^p9_|^v9fs"),
    "GPFS": re.compile(r"cxi|mmfs|^gpfs"),
    "BeeGFS": re.compile(r"beegfs|^Fhgfs"),
}
_SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
_WAITS_FOR_CHILD = frozenset({"wait4", "waitid"})
_RECEIVES = frozenset({"recvfrom", "recvmsg", "read", "poll", "ppoll"})
_USUAL_ENDS = frozenset({None, "SIGTERM"})  # no signal, and the one by which a DataLoader ends its workers
MOST_CHILDREN = 3
_HELPERS = {
    Helper.THREAD: ("a thread", "fix it, and let the rank notice: catch it in the thread, and put it on the queue"),
    Helper.CHILD: ("its child", "fix it, and let the rank notice: give the wait a timeout, and check that it is alive"),
    Helper.TASK: (
        "an asyncio task that was not awaited",
        "fix it, and await every task (asyncio.gather, TaskGroup), so that its error reaches the rank",
    ),
    Helper.CALL: (
        "a call in a pool, whose result was not read,",
        "fix it, and ask every future for its result(), so that its error reaches the rank",
    ),
}


def last_helper_errors(state: st.RankState) -> tuple[HelperError, ...]:
    """Return the errors of helpers that a rank may wait for, the last first."""
    # Not those after which it long trained on, and none if it just sleeps.
    frames = state.frames
    if frames and frames[-1].function == "sleep" and st.is_file(frames[-1], "/asyncio/"):
        return ()
    since_ns = (state.rank.last_progress_ns or 0) - TRAINED_ON_NS
    return tuple(error for error in reversed(state.rank.helper_errors) if error.error.time_ns >= since_ns)


def places_held_up(state: st.RankState) -> tuple[Place, ...]:
    """Return where a rank is that others wait for: its own line, and the line of the thread or child it waits for."""
    # The line of an error that it handles, and of a child that it waits for, come before its own. The line of a child
    # that it may wait for, at a pipe or a connection, and that of a helper's error come after it.
    rank, stack = state.rank, state.frames
    own = st.lines_seen(rank.samples) or ((rank.last_place,) if rank.last_place is not None else ())
    in_library = st.waits_in_library(stack)
    blocked = rank.causes.blocked if rank.causes is not None else None
    is_near = bool(stack) and (st.is_file(stack[-1], *_CONNECTIONS) or (blocked is not None and blocked.file == "pipe"))
    error = st.own_error(rank)
    found: list[Frame | None] = [st.innermost_user(error.frames) if error is not None else None]
    # Children that do not wait for work, last those in a collective. If the main thread of a child waits for work, as
    # that of a server does, another thread may work.
    below = [st.main_frames(child) for child in rank.children if not child.idle]
    below += [thread.frames for child in rank.children if child.idle for thread in st.other_threads(child)]
    below.sort(key=lambda frames: bool(frames) and st.is_file(frames[-1], "/torch/distributed/"))
    lines = [frame for frames in below if (frame := st.innermost_user(frames)) is not None]
    child = lines[:1] if state.doing is st.Activity.DATA or in_library or is_near else []
    found += [*own[:1], *child] if is_near else [*child, *own[:1]]
    found += [st.innermost_user(helper.error.frames) for helper in last_helper_errors(state)[:1]]
    found += own[1:]
    if len(own) <= 1 and (in_library or (stack and stack[-1].user)):  # in C code, called from the user's own line
        others = st.other_threads(rank, skip_idle=False)
        loops = [thread for thread in others if st.is_file(thread.frames[-1], "/asyncio/")]
        found += [st.innermost_user(thread.frames) for thread in (*st.other_threads(rank), *loops)]
    return st.places(rank.rank, found)


def is_limit_over(job: JobState) -> bool:
    waits = ((job.states[number], limit_s * 1e9 + GRACE_NS) for number, limit_s in limits_of(job).items())
    calls = [(state.call, state.since(job.time_ns) or 0, over_ns) for state, over_ns in waits]
    return any(call is not None and call.op not in _OWN_LIMITS and ns >= over_ns for call, ns, over_ns in calls)


def limit_words(job: JobState) -> list[str]:
    found = []
    for number, limit_s in limits_of(job).items():
        state = job.states[number]
        waited_ns = state.since(job.time_ns)
        if waited_ns is not None and state.call is not None:
            found.append((limit_s - waited_ns / 1e9, limit_s, state.call.op))
    if not found:
        return []
    left_s, limit_s, op = min(found)
    left = f"{long_words(left_s)} are left" if left_s > 0 else "it has passed"
    said = [f"torch's own timeout for this {op} is {long_words(limit_s)}; {left}"]
    if limit_s - left_s < job.facts.hang_timeout_s >= limit_s:  # a rank that waits for longer is not ended by torch
        said.append(
            f"--hang-timeout is {long_words(job.facts.hang_timeout_s)}, so torch ends the job before ddpdoctor judges "
            f"it: use a --hang-timeout below {long_words(limit_s)}"
        )
    return said


def long_words(duration_s: float) -> str:
    hours, rest = divmod(round(duration_s), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{value} {unit}" for value, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if value]
    return " ".join(parts[:2]) or "0 s"


def limits_of(job: JobState) -> dict[int, float]:
    """Return the limits of the calls that ranks wait in; if a rank did not answer, use its peers' limit."""
    ranks = tuple(job.ranks.values())
    of_peers = {group.name: group.timeout_s for rank in reversed(ranks) for group in rank.groups if group.timeout_s}
    limits: dict[int, float | None] = {}
    for number in job.waits.waiters:
        state = job.states[number]
        if state.doing is st.Activity.INIT and state.call is not None:
            limits[number] = state.rank.init_timeout_s
        elif state.doing is not st.Activity.NEW_GROUP and state.call is not None:
            name = native_group(state) if state.doing is st.Activity.NATIVE else state.call.group
            own = own_state(state.rank, name)
            limits[number] = own.timeout_s if own is not None and own.timeout_s is not None else of_peers.get(name)
    return {number: limit_s for number, limit_s in limits.items() if limit_s is not None}


def find_late(job: JobState) -> tuple[int, ...]:
    limits = limits_of(job) if job.failures else {}
    gave_up: dict[CallPosition, int] = {}
    for failure in job.failures:
        position, limit_s = job.positions.get(failure.rank.rank), limits.get(failure.rank.rank)
        if failure.call is None or failure.error is None or limit_s is None or position is None:
            continue
        # The script may have handled the error for a while before the error ended the rank.
        ended_ns = failure.call.ended_ns or failure.time_ns
        if ended_ns - failure.call.started_ns >= st.NEARLY * limit_s * 1e9:
            gave_up[position] = min(ended_ns, gave_up.get(position, ended_ns))
    calls = ((n, job.states[n].call, gave_up.get(position)) for n, position in job.positions.items())
    found = {n for n, call, since in calls if call is not None and since and call.started_ns >= since}
    return tuple(sorted(found | st.came_late(job.ranks.values()).keys()))


def lines_before(job: JobState, number: int) -> tuple[Frame, ...]:
    """Return the user's lines where a rank was sampled before its pending call, the most frequent first."""
    call, seen = job.states[number].call, job.ranks[number].before_call
    if call is None or seen is None:
        return ()
    at_once = call.ended_ns is not None and call.ended_ns - call.started_ns <= TOGETHER_NS
    fits = abs(seen.until_ns - call.started_ns) <= TOGETHER_NS if seen.until_ns else at_once
    return seen.lines if fits else ()


def late_problem(job: JobState, late: tuple[int, ...]) -> Problem:
    waiters = [failure for failure in job.failures if failure.rank.rank not in late]
    on_device = st.came_late(job.ranks.values())
    first = waiters[0].rank.rank
    waited = on_device[late[0]][2] if late[0] in on_device else waiters[0].call
    limit_s = limits_of(job).get(first)
    gone = f"after {long_words(limit_s)}" if limit_s is not None else "after torch's own timeout"
    who = rank_list(failure.rank.rank for failure in waiters)
    known = lines_before(job, late[0])
    was = f"; before that it was {st.place_words(known[0])}" if known and len(late) == 1 else ""
    op = waited.op if waited is not None else "the call"
    calls = [(n, on_device[n][0] if n in on_device else job.states[n].call) for n in late]
    sites = {n: call.site if n in on_device and call is not None else say.line_at(job.states[n]) for n, call in calls}
    where = tuple(place for n in late for place in st.places(n, lines_before(job, n) or (sites[n],)))
    return say.problem_of(
        job,
        late,
        confidence=Confidence.HIGH if known else Confidence.MEDIUM,
        where=where,
        summary=f"{say.who(job, late)} called {op} too late: {who} had timed out there {gone}{was}",
        evidence=(
            *(
                f"rank {n} called {st.call_words(call)} ({st.line_of(call.site)}) "
                f"{(call.started_ns - waited.started_ns) / 1e9:.1f} s after rank {first}"
                for n, call in calls
                if call is not None and waited is not None
            ),
            *limit_words(job),
            *say.cascade_words(job.failures, late),
        ),
        fix=busy_fix(job),
    )


def busy_fix(job: JobState) -> str:
    limits = limits_of(job).values()
    beyond = f"more than {long_words(min(limits))}" if limits else "longer than torch's own timeout"
    return (
        f"split this work between the ranks, or do it before init_process_group; if the others must wait {beyond}, "
        "raise the group's timeout: init_process_group(timeout=timedelta(hours=2))"
    )


@dataclass(frozen=True, slots=True)
class Busy:
    """What a rank does."""

    # The text after "rank 0:": "has used 97% of a core for 30 s", "its child gcc (process 77) uses 100% of a core".
    said: str
    may_spin: bool = False  # only its CPU time is known, and an endless loop uses CPU time too
    by_child: bool = False  # a child does the work; ``said`` names it


def busy_at(job: JobState, number: int) -> Busy | None:
    state, rank = job.states[number], job.ranks[number]
    causes = rank.causes
    if causes is None or causes.work is None or causes.waits_for_lock is not None or causes.lock_file is not None:
        return None
    if [*_person(state.frames, causes.blocked), *_lost_children(state, causes)]:
        return None
    work, receiving = causes.work, causes.receiving
    file = causes.blocked.file if causes.blocked is not None else None
    where = st.file_name(file) if file and file.startswith("/") else ""
    # Which bytes the rank moves, the surest evidence first.
    if receiving is not None and receiving.bytes_s >= BUSY_BYTES_S:
        return Busy(f"receives {_rate(receiving.bytes_s)} from {receiving.remote}")
    if moved := _moved(work, where):
        return Busy(moved)
    for child in causes.working_children:
        if does := _computed(child.work) or _moved(child.work):
            return Busy(f"its child {child.name} (process {child.pid}) {does}", by_child=True)
    computed = _computed(work)
    if not computed:
        return None
    since = st.seconds(job.time_ns - rank.last_progress_ns) if rank.last_progress_ns is not None else ""
    if (rank.cpu_share or 0) >= BUSY_CORES and since:
        computed = f"has used {rank.cpu_share:.0%} of a core {since}"
    return Busy(computed, may_spin=True)


def _moved(work: Work, where: str = "") -> str:
    for does, way, bytes_s in (("writes", "to", work.written_bytes_s), ("reads", "from", work.read_bytes_s)):
        if bytes_s is not None and bytes_s >= BUSY_BYTES_S:
            return f"{does} {_rate(bytes_s)}{f' {way} {where}' if where else ''}"
    return ""


def _computed(work: Work) -> str:
    """Return "uses 97% of a core", and on a crowded machine how much it wants; "" if it hardly computes."""
    if work.cores >= BUSY_CORES:
        return f"uses {work.cores:.0%} of a core"
    crowded = work.wanted is not None and work.wanted >= BUSY_WANTED
    return f"wants {work.wanted:.0%} but gets {work.cores:.0%} of a core" if crowded else ""


def _rate(bytes_s: float) -> str:
    if bytes_s >= 1e9:
        return f"{bytes_s / 1e9:.1f} GB/s"
    return f"{bytes_s / 1e6:.{0 if bytes_s >= 1e7 else 1}f} MB/s"


def lock_clues(job: JobState, state: st.RankState, causes: ProcessCauses) -> Iterator[Clue]:
    rank, frames = state.rank, state.frames
    # ``destroy_process_group`` drops torch's reference. The reducer of a DDP model holds the last one, and its
    # destructor joins the group's threads without releasing the GIL. Seen with Gloo on torch 2.13.
    waits = causes.blocked is not None and causes.blocked.call == "futex"
    is_unheard = waits and rank.recorded and not rank.answered and not rank.open_calls
    if is_unheard and any(call.op == "destroy_process_group" for call in rank.recent_calls[-1:]):
        yield _FREES_GROUP
    elif causes.waits_for_lock is not None:
        lock = causes.waits_for_lock
        yield _held(lock.path, find_owner(job, rank.host, lock.holder_pid, lock.holder))
    elif causes.lock_file is not None and causes.lock_file.kind is not LockKind.KERNEL:
        if causes.lock_file.exists:
            yield _marker(job, rank, causes.lock_file)
    elif any(st.is_file(frame, *_POLLS) for frame in frames[-6:]):
        yield _polled(job, rank, causes, frames)
    elif waits and frames and (frames[-1].user or st.is_file(frames[-1], *_LOCKS)):
        # The kernel does not know which thread holds the lock, or whether another process holds it.
        threads = [(s.thread, st.innermost_user(s.frames)) for s in st.other_threads(rank, skip_idle=False)]
        named = [f"{name} ({st.line_of(frame)})" for name, frame in threads if frame is not None][:MOST_HOLDERS]
        if named:
            yield Clue(said=f"sleeps until another thread wakes it (futex); its other threads: {', '.join(named)}")


def is_left_behind(causes: ProcessCauses | None) -> bool:
    """Return whether a rank polls for an existing lock file whose owner is gone, as far as that can be known."""
    file = causes.lock_file if causes is not None else None
    if file is None or file.kind is LockKind.KERNEL or not file.exists or file.holders or file.named_lives:
        return False
    return not (file.shared or file.unseen or file.named_host) or file.named_lives is False


def is_surely_left(causes: ProcessCauses | None) -> bool:
    """Return whether surely no process will remove that file: its owner would have it open or be named in it."""
    file = causes.lock_file if causes is not None else None
    known = file is not None and (file.kind is LockKind.MARKER or file.named_lives is False)
    return known and file is not None and not file.shared and is_left_behind(causes)


def is_held_outside(job: JobState, rank: Rank) -> bool:
    """Return whether a rank waits for a lock that a living process outside the job holds."""
    causes = rank.causes
    if causes is None:
        return False
    owners = [owner.pid for owner in causes.lock_file.holders] if causes.lock_file is not None else []
    if causes.waits_for_lock is not None and causes.waits_for_lock.holder_pid is not None:
        owners.append(causes.waits_for_lock.holder_pid)
    here = [other for other in job.ranks.values() if other.host == rank.host]
    own = {pid for other in here for pid in (other.pid, *(child.pid for child in other.children))}
    return bool(owners) and own.isdisjoint(owners)


def _marker(job: JobState, rank: Rank, file: LockFile) -> Clue:
    """Judge a wait for a file's removal: its owner, if known, and whether any process is left to remove it."""
    waits = f"waits for lock file {file.path} to be removed"
    owner = file.holders[0] if file.holders else None
    if owner is not None:
        name, who = find_owner(job, rank.host, owner.pid, owner.command)
        fix = f"check what {name} is doing; if it hangs, kill it and `rm {file.path}`"
        return Clue(f"{waits}; {who} has it open", fix)
    age = f"; it is {format_age(file.age_s)} old" if file.age_s is not None else ""
    if file.named_lives:
        fix = f"check what process {file.named_pid} is doing; if it does not use the lock, `rm {file.path}`"
        return Clue(f"{waits}; the file names process {file.named_pid}{age}", fix)
    named = f", and process {file.named_pid}, which it names, is gone" if file.named_lives is False else ""
    if is_left_behind(rank.causes):
        said = f"{waits}; no visible process has it open{named}{age}: its owner exited without removing it"
        return Clue(said, f"`rm {file.path}`; let one rank build first, and the others load the result")
    why = (
        f"it names a process on {file.named_host}"
        if file.named_host
        else "it is on a network file system, so a process on another host may own it"
        if file.shared
        else f"{file.unseen} processes of its owner could not be inspected"
    )
    nobody = f"no process on this host has it open{named}{age}"
    fix = f"if no process uses it anymore: `rm {file.path}`"
    return Clue(f"{waits}; {nobody}; it is unknown whether its owner is alive: {why}", fix)


def _held(path: str | None, holder: tuple[str, str]) -> Clue:
    what = f"the lock on {path}" if path else "a lock on a file"
    fix = f"release the lock in {holder[0]} before it waits for other ranks, or acquire it with a timeout"
    return Clue(f"waits for {what}; {holder[1]} holds it", fix)


def _polled(job: JobState, rank: Rank, causes: ProcessCauses, frames: tuple[Frame, ...]) -> Clue:
    path = causes.lock_path
    if any(st.is_file(frame, _BATON) for frame in frames):
        file = path or "the file `lock` in the build folder"
        return Clue(
            said=f"waits for {file} to be removed: it marks a build of a C++ extension by another process",
            fix=f"if no process is building that extension, its build died: delete {file}; build it on one rank before "
            "the others load it",
        )
    if causes.lock_file is not None and causes.lock_file.holders:
        holder = causes.lock_file.holders[0]
        return _held(path, find_owner(job, rank.host, holder.pid, holder.command))
    locks = [lock for lock in causes.locks_of_others if path is None or lock.path == path][:MOST_HOLDERS]
    owners = [find_owner(job, rank.host, lock.holder_pid, lock.holder) for lock in locks]
    if path is not None and owners:
        return _held(path, owners[0])
    if owners:
        listed = ", ".join(f"{lock.path} by {owner}" for lock, (_, owner) in zip(locks, owners, strict=True))
        return Clue(said=f"polls for a lock file; held locks: {listed}")
    name = path or "the lock file"
    said = f"polls for the lock file {path or 'of a library'}; no process of this job holds a lock on it"
    return Clue(said, f"find out who locks {name} (another job or host), or acquire it with a timeout")


def clues_of(job: JobState, number: int) -> tuple[Clue, ...]:
    state, rank = job.states[number], job.ranks[number]
    causes, frames = rank.causes, state.frames
    if causes is None:
        return (*_compile_clue(frames, ()), *lost_helpers(state))
    busy, blocked, function = busy_at(job, number), causes.blocked, causes.kernel_function
    spins = ": it is computing, or spinning in a loop that waits" if busy is not None and busy.may_spin else ""
    found = [
        *_person(frames, blocked),
        *_compile_clue(frames, causes.commands),
        *((Clue(said=f"{busy.said}{spins}", fix=busy_fix(job)),) if busy is not None else ()),
        *lock_clues(job, state, causes),
        *(lost_helpers(state) if busy is None else ()),
        *_lost_children(state, causes),
        *(_command(frames, causes) if busy is None and causes.commands else ()),
    ]
    if function is not None:
        kind = next((name for name, symbol in _FILE_SYSTEMS.items() if symbol.search(function)), None)
        path = blocked.file if blocked is not None else None
        file = f", for {path}" if path and path.startswith("/") else ""
        if kind is not None:
            said = f"waits in the kernel for the {kind} server ({function}){file}"
            fix = f"check whether that {kind} file system responds: run `timeout 5 ls` on it, and look at dmesg"
            found.append(Clue(said, fix))
        elif rank.proc_state == "D":
            found.append(Clue(f"waits in the kernel in {function}{file}"))
    if busy is None:
        found += _network_clues(frames, causes)
    if not found and blocked is not None and blocked.call in _SLEEPS and frames:
        last = frames[-1]
        library = f"a sleep in {st.file_name(last.file)}, {last.function}"
        found.append(Clue(f"is in {'time.sleep or another C sleep' if last.user else library}"))
    return tuple(found)


def compiles(state: st.RankState) -> bool:
    """Return whether a rank compiles or builds an extension and uses CPU: that is slow but ends."""
    causes = state.rank.causes
    busy = causes.busy_cores if causes is not None else state.rank.cpu_share
    inside = any(True for _ in _compile_clue(state.frames, ()))
    return inside and busy is not None and busy >= BUSY_CORES


def lost_helpers(state: st.RankState) -> Iterator[Clue]:
    for error in last_helper_errors(state)[:MOST_CHILDREN]:
        who, fix = _HELPERS[error.who]
        name = f" {error.name}" if error.who is Helper.CHILD else ""
        line = st.innermost_user(error.error.frames)
        text = st.first_line(error.error.message)
        what = f"{error.error.type} {st.place_words(line)}"
        yield Clue(f"{who}{name} ended with {what}" + (f": {text}" if text else ""), f"see {what}: {fix}")


def _person(frames: tuple[Frame, ...], blocked: Blocked | None) -> Iterator[Clue]:
    asks = next((f for f in frames if f.function in _ASKS and not f.user and st.is_file(f, *_DEBUGGERS)), None)
    fix = (
        "remove the breakpoint, or attach a debugger from outside; torch.distributed.breakpoint(rank) stops one rank "
        "and makes its peers wait"
    )
    if asks is not None:
        yield Clue(said=f"waits for input in a debugger or console ({st.file_name(asks.file)})", fix=fix)
    elif blocked is not None and blocked.alone_on_fd0:
        where = f" ({blocked.file})" if blocked.file else ""
        typed = "remove input() or the read of sys.stdin: a rank gets no keyboard input"
        yield Clue(f"waits for input on stdin{where}", typed)


def _compile_clue(frames: tuple[Frame, ...], commands: Iterable[tuple[int, str]]) -> Iterator[Clue]:
    inside = [frame for frame in frames if st.is_file(frame, *_COMPILERS)]
    builders = [f"{command} (process {pid})" for pid, command in commands if _BUILDERS.search(command.split(" -")[0])]
    if not inside or any(st.is_file(frame, "/torch/utils/file_baton.py") for frame in frames):
        return
    running = f", running {builders[0]}" if builders else ""
    yield Clue(
        said=f"compiles ({st.file_name(inside[-1].file)}, {inside[-1].function}){running}",
        fix="compile in a warm-up step on all ranks, keep the cache (TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR) "
        "and mark changing shapes as dynamic; if it is just slow, raise --hang-timeout",
    )


def _lost_children(state: st.RankState, causes: ProcessCauses) -> Iterator[Clue]:
    waits = st.waits_in_library(state.frames) or state.doing is st.Activity.DATA
    pipe = causes.blocked is not None and causes.blocked.file == "pipe"
    if not (waits or pipe):
        return
    gone = causes.lost_children
    lost = [child for child in gone if not child.reaped or child.exit_code or child.signal not in _USUAL_ENDS]
    if not lost:
        return
    ended = []
    for child in lost[-MOST_CHILDREN:]:
        status = f" with status {child.exit_code}" if child.exit_code is not None else ""
        how = f"was killed by {child.signal}" if child.signal is not None else f"exited{status}"
        ended.append(f"its child {child.pid}{f' ({child.name})' if child.name else ''} {how}")
    fix = "find out why that process ended; give the wait a timeout, and check that the process is still alive"
    yield Clue(f"may be waiting for a child that is gone: {', '.join(ended)}", fix)


def _command(frames: tuple[Frame, ...], causes: ProcessCauses) -> Iterator[Clue]:
    in_module = bool(frames) and st.is_file(frames[-1], "/subprocess.py", "/selectors.py")
    in_wait = causes.blocked is not None and causes.blocked.call in _WAITS_FOR_CHILD
    if in_wait or (in_module and any(st.is_file(f, "/subprocess.py") for f in frames)):
        pid, command = causes.commands[0]
        fix = f"find out why `{command}` does not finish, and give it a timeout: subprocess.run(..., timeout=60)"
        yield Clue(f"waits for the command `{command}` (process {pid})", fix)


def _network_clues(frames: tuple[Frame, ...], causes: ProcessCauses) -> Iterator[Clue]:
    blocked = causes.blocked
    inside = next((f for f in reversed(frames[-8:]) if not f.user and st.is_file(f, *_NETWORK)), None)
    remote = blocked.remote if blocked is not None else None
    if remote is not None and causes.store_port is not None and remote.endswith(f":{causes.store_port}"):
        said = f"waits for a reply from the job's store ({remote}), for a key that no rank has set or for a counter"
        yield Clue(said, "find the rank that should have set that key, and give store.get or store.wait a timeout")
    elif inside is not None or (blocked is not None and blocked.call == "connect"):
        at = f" in {st.file_name(inside.file)}, {inside.function}" if inside is not None else ""
        fix = "give the request a timeout; download on one rank, before the first collective"
        yield Clue(f"waits on the network{at}" + (f", for {remote}" if remote else ""), fix)
    elif remote is not None and blocked is not None and blocked.call in _RECEIVES:
        yield Clue(said=f"waits for data from {remote}")
