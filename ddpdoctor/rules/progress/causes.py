"""What a rank without progress waits for: a person, a compiler, a lock, a child, a file system, the network."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Helper

from ddpdoctor.rules.progress.busy import BUSY_CORES, find_work
from ddpdoctor.rules.progress.clues import Clue
from ddpdoctor.rules.progress.limits import busy_fix
from ddpdoctor.rules.progress.lock_causes import lock_clues
from ddpdoctor.rules.progress.places import innermost_user, is_file, last_helper_errors, main_frames, waits_in_library
from ddpdoctor.rules.progress.states import Activity
from ddpdoctor.rules.progress.words import file_name, first_line, place_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.facts import Blocked, LostChild, ProcessCauses, Rank
    from ddpdoctor.model.stacks import Frame

    from ddpdoctor.rules.progress.busy import Busy
    from ddpdoctor.rules.progress.job_state import JobState

_ASKS = frozenset({"cmdloop", "interact", "interaction", "raw_input", "mainloop", "embed", "prompt"})
_DEBUGGERS = ("/pdb.py", "/cmd.py", "/code.py", "/IPython/", "/ipdb/", "/pudb/", "/prompt_toolkit/", "/_pyrepl/")
_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_dynamo/symbolic_convert.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/_inductor/graph.py",
    "/torch/_inductor/codecache.py",
    "/torch/_inductor/async_compile.py",
    "/torch/_inductor/cpp_builder.py",
    "/torch/utils/cpp_extension.py",
    "/triton/compiler/",
    "/triton/runtime/autotuner.py",
)
"""Files that are on the stack during compilation, but not while the compiled code runs."""
_BUILDERS = re.compile(r"(?:^|/)(?:ninja|nvcc|cicc|ptxas|c\+\+|g\+\+|gcc|clang(?:\+\+)?|cc1plus|hipcc|cmake)(?: |$)")
_NETWORK = (
    "/socket.py", "/ssl.py", "/http/client.py", "/urllib/request.py", "/urllib3/", "/requests/", "/httpx/",
    "/httpcore/", "/aiohttp/", "/huggingface_hub/", "/botocore/", "/s3fs/", "/gcsfs/", "/wandb/",
)  # fmt: skip
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
"""File systems by the kernel functions in which a process waits for a server; the names are symbols of those
modules."""
_SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
_WAITS_FOR_CHILD = frozenset({"wait4", "waitid"})
_RECEIVES = frozenset({"recvfrom", "recvmsg", "read", "poll", "ppoll"})
_USUAL_ENDS = frozenset({"SIGTERM"})
"""The signal by which a DataLoader ends its workers."""
MOST_CHILDREN = 3


def clues_of(job: JobState, number: int) -> tuple[Clue, ...]:
    """Return what the process of a living rank shows about why it makes no progress, the surest first."""
    rank = job.rank(number)
    causes = rank.causes
    frames = main_frames(rank)
    if causes is None:
        return (*_compile_clue(frames, ()), *_lost_helpers(rank))
    busy = busy_at(job, number)
    found = [
        *_person(frames, causes.blocked),
        *_compile_clue(frames, causes.commands),
        *((Clue(said=busy.clue, fix=busy_fix(job)),) if busy is not None else ()),
        *lock_clues(job, rank, causes),
        *(_lost_helpers(rank) if busy is None else ()),
        *_lost_children(job, rank, causes),
        *(_command(frames, causes) if busy is None else ()),
        *_file_system(rank, causes),
        *(_network(frames, causes) if busy is None else ()),
    ]
    return tuple(found or _sleep(frames, causes.blocked))


def busy_at(job: JobState, number: int) -> Busy | None:
    """Return what a rank works at, or None if it does not work or is known to wait for something else."""
    rank = job.rank(number)
    causes = rank.causes
    if causes is None or causes.waits_for_lock is not None or causes.lock_file is not None:
        return None
    frames = main_frames(rank)
    vain = [*_person(frames, causes.blocked), *_lost_children(job, rank, causes)]
    return None if vain else find_work(job, number)


def compiles(rank: Rank) -> bool:
    """Return whether a rank compiles or builds an extension and uses CPU: that takes long but comes to an end."""
    busy = rank.causes.busy_cores if rank.causes is not None else rank.cpu_share
    inside = any(True for _ in _compile_clue(main_frames(rank), ()))
    return inside and busy is not None and busy >= BUSY_CORES


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


def _lost_helpers(rank: Rank) -> Iterator[Clue]:
    """Say which errors ended what worked for the rank, the last first. The rank may wait for it in vain."""
    for one in last_helper_errors(rank)[:MOST_CHILDREN]:
        who, fix = _HELPERS[one.who]
        name = f" {one.name}" if one.who is Helper.CHILD else ""
        line = innermost_user(one.error.frames)
        text = first_line(one.error.message)
        yield Clue(
            said=f"{who}{name} ended with {one.error.type} {place_words(line)}" + (f": {text}" if text else ""),
            fix=f"see {one.error.type} {place_words(line)}: {fix}",
        )


def _person(frames: tuple[Frame, ...], blocked: Blocked | None) -> Iterator[Clue]:
    """Find a debugger's prompt, or a read of the standard input: nobody can type into a rank."""
    asks = next((f for f in frames if f.function in _ASKS and not f.user and is_file(f, *_DEBUGGERS)), None)
    fix = (
        "remove the breakpoint, or attach a debugger from outside; torch.distributed.breakpoint(rank) stops one rank "
        "and makes its peers wait"
    )
    if asks is not None:
        yield Clue(said=f"waits for input in a debugger or console ({file_name(asks.file)})", fix=fix)
    elif blocked is not None and blocked.alone_on_fd0:
        where = f" ({blocked.file})" if blocked.file else ""
        yield Clue(
            said=f"waits for input on stdin{where}",
            fix="remove input() or the read of sys.stdin: nobody can type into a rank",
        )


def _compile_clue(frames: tuple[Frame, ...], commands: Iterable[tuple[int, str]]) -> Iterator[Clue]:
    inside = [frame for frame in frames if is_file(frame, *_COMPILERS)]
    builders = [f"{command} (process {pid})" for pid, command in commands if _BUILDERS.search(command.split(" -")[0])]
    if not inside or any(is_file(frame, "/torch/utils/file_baton.py") for frame in frames):
        return
    running = f", running {builders[0]}" if builders else ""
    yield Clue(
        said=f"compiles ({file_name(inside[-1].file)}, {inside[-1].function}){running}",
        fix="compile in a warm-up step on all ranks, keep the cache (TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR) "
        "and mark changing shapes as dynamic; if it is just slow, raise --hang-timeout",
    )


def _lost_children(job: JobState, rank: Rank, causes: ProcessCauses) -> Iterator[Clue]:
    """Name children that have ended, if the rank waits in a queue, a pipe, a join or for its loader."""
    waits = waits_in_library(main_frames(rank)) or job.states[rank.rank].doing is Activity.DATA
    pipe = causes.blocked is not None and causes.blocked.file == "pipe"
    if not (waits or pipe):
        return
    lost = [child for child in causes.lost_children if _matters(child)]
    if not lost:
        return
    ended = ", ".join(_child_words(child) for child in lost[-MOST_CHILDREN:])
    yield Clue(
        said=f"may be waiting for a child that is gone: {ended}",
        fix="find out why that process ended; give the wait a timeout, and check that the process is still alive",
    )


def _matters(child: LostChild) -> bool:
    """Return whether the end of a child matters: not if it ended well as requested, or was asked to end."""
    return not child.reaped or (child.signal is not None and child.signal not in _USUAL_ENDS) or bool(child.exit_code)


def _child_words(child: LostChild) -> str:
    who = f"its child {child.pid}" + (f" ({child.name})" if child.name else "")
    if child.signal is not None:
        return f"{who} was killed by {child.signal}"
    return f"{who} exited" + (f" with status {child.exit_code}" if child.exit_code is not None else "")


def _command(frames: tuple[Frame, ...], causes: ProcessCauses) -> Iterator[Clue]:
    in_module = bool(frames) and is_file(frames[-1], "/subprocess.py", "/selectors.py")
    in_wait = causes.blocked is not None and causes.blocked.call in _WAITS_FOR_CHILD
    if not causes.commands or not (in_wait or (in_module and any(is_file(f, "/subprocess.py") for f in frames))):
        return
    pid, command = causes.commands[0]
    yield Clue(
        said=f"waits for the command `{command}` (process {pid})",
        fix=f"find out why `{command}` does not finish, and give it a timeout: subprocess.run(..., timeout=60)",
    )


def _file_system(rank: Rank, causes: ProcessCauses) -> Iterator[Clue]:
    function = causes.kernel_function
    if function is None:
        return
    kind = next((name for name, symbol in _FILE_SYSTEMS.items() if symbol.search(function)), None)
    path = causes.blocked.file if causes.blocked is not None else None
    file = f", for {path}" if path and path.startswith("/") else ""
    if kind is not None:
        yield Clue(
            said=f"waits in the kernel for the {kind} server ({function}){file}",
            fix=f"check whether that {kind} file system responds: run `timeout 5 ls` on it, and look at dmesg",
        )
    elif rank.proc_state == "D":
        yield Clue(said=f"waits in the kernel in {function}{file}")


def _network(frames: tuple[Frame, ...], causes: ProcessCauses) -> Iterator[Clue]:
    blocked = causes.blocked
    inside = next((f for f in reversed(frames[-8:]) if not f.user and is_file(f, *_NETWORK)), None)
    remote = blocked.remote if blocked is not None else None
    if remote is not None and causes.store_port is not None and remote.endswith(f":{causes.store_port}"):
        yield Clue(
            said=f"waits for a reply from the job's store ({remote}), for a key that no rank has set or for a counter",
            fix="find the rank that should have set that key, and give store.get or store.wait a timeout",
        )
    elif inside is not None or (blocked is not None and blocked.call == "connect"):
        at = f" in {file_name(inside.file)}, {inside.function}" if inside is not None else ""
        yield Clue(
            said=f"waits on the network{at}" + (f", for {remote}" if remote else ""),
            fix="give the request a timeout; download on one rank, before the first collective",
        )
    elif remote is not None and blocked is not None and blocked.call in _RECEIVES:
        yield Clue(said=f"waits for data from {remote}")


def _sleep(frames: tuple[Frame, ...], blocked: Blocked | None) -> Iterator[Clue]:
    if blocked is None or blocked.call not in _SLEEPS or not frames:
        return
    last = frames[-1]
    where = "time.sleep or another C sleep" if last.user else f"a sleep in {file_name(last.file)}, {last.function}"
    yield Clue(said=f"is in {where}")
