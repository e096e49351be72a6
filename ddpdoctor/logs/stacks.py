"""Reads stacks: of py-spy, pystack, faulthandler and torch's debug server; and all else that ``attach`` saved."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.lines import DocumentFormat, Found, LineReader, origin_of, split_line
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.attached import FORMAT, AskedNodes, AttachedJob, Movement, RankLook, SeenRank
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.stacks import Frame
from ddpdoctor.recorder.storage.ring_layout import is_library_path

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from ddpdoctor.logs.lines import Document, Line
    from ddpdoctor.model.attached import Refusal

# The standard library, a torch that is run from its sources, launchers, and ddpdoctor.
_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python\d\.\d+t?[/\\]|[/\\]Python\d+[/\\]Lib[/\\]"
    r"|(?:^|[/\\])torch[/\\](?:distributed|nn|autograd|utils|optim|cuda|multiprocessing|amp|fx|_\w+)[/\\.]"
    r"|[/\\]bin[/\\](?:torchrun|accelerate|deepspeed|lightning|fabric|ray|horovodrun|pytest|ddpdoctor)$"
    r"|(?:^|[/\\])ddpdoctor[/\\](?:recorder|cli|launch)[/\\]"
)
# Packages whose paths samplers print from their own folder on: "torch/autograd/graph.py".
_PACKAGES = frozenset((
    "accelerate", "datasets", "deepspeed", "lightning", "megatron", "numpy", "pytorch_lightning", "ray", "torch",
    "torchdata", "torchvision", "transformers",
))  # fmt: skip
_PROGRAMS = ("<stdin>", "<string>")


def foreign_frame(file: str, line: int, function: str) -> Frame:
    """Return a frame of a stack that may come from another machine."""
    return Frame(file=file, line=line, function=function, user=is_foreign_user_file(file))


@lru_cache(maxsize=4096)
def is_foreign_user_file(file: str) -> bool:
    """Return whether a path is that of a user's own file, not of Python, an installed package or ddpdoctor."""
    if file.startswith("<"):
        return file in _PROGRAMS
    if is_library_path(file, ()) or _LIBRARY.search(file):
        return False
    first = re.split(r"[/\\]", file, maxsplit=1)[0].removesuffix(".py")
    is_relative = not file.startswith(("/", ".", "~")) and ":" not in first
    return not (is_relative and (first in sys.stdlib_module_names or first in _PACKAGES))


_INIT = frozenset({
    "init_process_group", "_create_c10d_store", "_store_based_barrier", "_new_process_group_helper", "next_rendezvous",
    "_torchelastic_worker_rendezvous_handler", "_env_rendezvous_handler", "_tcp_rendezvous_handler",
})  # fmt: skip
_EXIT = frozenset({"_shutdown", "_exit_function", "destroy_process_group", "_run_exitfuncs", "_finalize_join"})
_LOADER = frozenset({"_try_get_data", "_get_data", "_next_data"})
_DEVICE = ("_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_COLLECTIVE_NAMES = ("_engine_run_backward", "c10d::", "Work::wait", "ncclAllReduce", "ncclKernel", "gloo::")
_COLLECTIVE_FILES = (
    "torch/distributed/", "torch/nn/parallel/distributed.py", "deepspeed/comm/", "horovod/", "libnccl", "libgloo",
)  # fmt: skip
_WORKER = "_worker_loop"
_AGENT_FILES = ("torch/distributed/elastic/agent/", "torch/distributed/run.py", "torch/distributed/launcher/api.py")
_BACKWARD = "_engine_run_backward"
_C10D = "torch/distributed/distributed_c10d.py"


def is_agent(stack: Sequence[Frame]) -> bool:
    """Return whether it is the stack of torchrun's agent, which is not a rank."""
    return any(_is_in(frame, _AGENT_FILES) for frame in stack)


def is_worker(stack: Sequence[Frame]) -> bool:
    """Return whether it is a DataLoader worker. A forked one has the frames of its rank below its own."""
    return any(frame.function.endswith(_WORKER) for frame in stack)


def doing_of(stack: Sequence[Frame]) -> lf.Doing:
    """Return what a rank does, by its frames from the innermost to the innermost of the user's code."""
    found = lf.Doing.UNKNOWN if not stack else lf.Doing.OWN
    for frame in reversed(stack):
        if frame.user:
            break
        name = frame.function.rsplit(".", 1)[-1]
        if name in _INIT:
            return lf.Doing.INIT
        if name in _EXIT and _is_in(frame, ("threading.py", "multiprocessing/", "torch/distributed/", "concurrent/")):
            return lf.Doing.EXIT
        if found is not lf.Doing.OWN:
            continue
        if name in _LOADER and "dataloader" in frame.file:
            found = lf.Doing.DATA
        elif any(words in frame.function for words in _DEVICE) or (
            name == "synchronize" and "torch/cuda" in frame.file
        ):
            found = lf.Doing.DEVICE
        elif any(words in frame.function for words in _COLLECTIVE_NAMES) or _is_in(frame, _COLLECTIVE_FILES):
            found = lf.Doing.COLLECTIVE
    return found


def operation_of(stack: Sequence[Frame]) -> lf.Operation | None:
    """Return the operation that the frames name: the function of torch.distributed that the user called."""
    for frame in stack:
        name = frame.function.rsplit(".", 1)[-1]
        if _C10D in frame.file.replace("\\", "/") and name not in {"wrapper", "_wait"} and not name.startswith("_"):
            return lf.Operation(op=name)
    if any(frame.function.rsplit(".", 1)[-1] == _BACKWARD for frame in stack):
        return lf.Operation(op="backward")
    return None


def _is_in(frame: Frame, parts: Sequence[str]) -> bool:
    path = frame.file.replace("\\", "/")
    return any(part in path for part in parts)


_MOST_OPEN = 4096
_MOST_FRAMES = 100
_MOST_THREADS = 512
_FATAL = re.compile(r"Fatal Python error: (?P<how>[A-Z][\w -]{1,60})")
# Not "Aborted": that is how torch's watchdog and Gloo end a victim.
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
_THREAD = re.compile(r"^(?P<how>Current thread|Thread) 0x[0-9a-fA-F]+.{0,60}\(most recent call first\):\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9}) in (?P<function>.{1,300}?)\s*$')
_NO_FRAME = "<no Python frame>"


@dataclass(slots=True)
class _Dump:
    """The stacks of one process, innermost frames first."""

    line: Line
    fatal: str = ""
    threads: list[list[Frame]] = field(default_factory=list)
    current: list[Frame] = field(default_factory=list)

    def done(self) -> list[lf.Fact]:
        common = origin_of(self.line)
        if self.fatal:
            signal, frames = _SIGNALS.get(self.fatal, ""), tuple(reversed(self.current))
            return [lf.Exited(signal=signal, frames=frames, **common)] if signal else []
        stacks = [tuple(reversed(thread)) for thread in self.threads if thread]
        main = next((stack for stack in stacks if stack[0].function == "<module>"), tuple(reversed(self.current)))
        return [] if not main or is_agent(main) else [_stacked(main, **common)]


def _stacked(stack: tuple[Frame, ...], *, worker: bool = False, **common: Any) -> lf.Stacked:
    doing, operation, worker = doing_of(stack), operation_of(stack), worker or is_worker(stack)
    return lf.Stacked(doing=doing, frames=stack, operation=operation, worker=worker, **common)


@dataclass(slots=True, eq=False)
class FaulthandlerReader(LineReader):
    """Finds where a rank was when a signal ended it, and the stacks that it wrote while it ran."""

    name = "faulthandler"
    triggers = (b"Fatal Python error: ", b"Thread 0x", b"Timeout (")
    begins = ("Fatal Python error: ", "most recent call first")
    _open: dict[Hashable, _Dump] = field(default_factory=dict)

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if "Fatal Python error: " in text and (fatal := _FATAL.search(text)) is not None:
            found = self.end() if len(self._open) >= _MOST_OPEN else self._close(line.stream)
            self._open[line.stream] = _Dump(line, fatal["how"])
            return found
        thread = _THREAD.match(text) if "most recent call first" in text else None
        dump = self._open.get(line.stream)
        if dump is None:
            if thread is None or len(self._open) >= _MOST_OPEN:
                return ()
            dump = self._open[line.stream] = _Dump(line)
        if thread is not None:
            if len(dump.threads) < _MOST_THREADS:
                dump.threads.append([])
                dump.current = dump.threads[-1] if thread["how"] == "Current thread" else dump.current
        elif (frame := _FRAME.match(text)) is None:
            return self._close(line.stream) if text.strip() and _NO_FRAME not in text else ()
        elif dump.threads and len(dump.threads[-1]) < _MOST_FRAMES:
            dump.threads[-1].append(foreign_frame(frame["file"], int(frame["line"]), frame["function"]))
        return ()

    def end(self) -> Iterable[lf.Fact]:
        found = [fact for dump in self._open.values() for fact in dump.done()]
        self._open.clear()
        return found

    def _close(self, stream: Hashable) -> list[lf.Fact]:
        dump = self._open.pop(stream, None)
        return [] if dump is None else dump.done()


MOST_FRAMES = 400  # our choice: deeper stacks are recursion
_MOST_BETWEEN = 500  # our choice: after so many lines without a stack, a file that began with stacks goes on as a log
_PROCESS = re.compile(r"Process (\d+): (.*)")
_RANK_BLOCK = re.compile(r"=== Rank (\d+): (?:https?://(\[[^\]]+\]|[^:/\s]+))?.*===")
# What people print between the stacks: "=== rank 3 ===", "==> rank3.txt <==", "# rank 3".
_LABEL = re.compile(r"[=#>*-][=#>* -]*[^()]{0,60}\brank[ _:=-]?(\d+)[^()]{0,60}$", re.IGNORECASE)
_LOCAL_RANK = re.compile(r"--local[-_]rank[= ](\d+)")
_ANSWERED = re.compile(r"PARTIAL DATA: \d{1,7}/(\d{1,7}) workers responded")
_LACKING = re.compile(r"\s+Rank (\d+): (Timeout|ConnectionError|\w*Error|\w*Exception)")
_THREADS = (
    re.compile(r'Thread (?P<id>\d+|0x[0-9a-fA-F]+) \((?P<state>[a-z+]+)\)(?:: "(?P<name>[^"]*)")?'),  # py-spy
    re.compile(
        r"(?:Current thread|Thread) 0x(?P<hex>[0-9a-fA-F]+)(?: \[(?P<name>[^\]]*)\])? \(most recent call first\):"
    ),
    re.compile(
        r"Traceback for thread (?P<id>\d+) \((?P<name>[^)]*)\) \[(?P<state>[^\]]*)\] \(most recent call last\):"
    ),
)
_LAST_FIRST = 2  # the place of the format, pystack's, whose frames come outermost first
_FRAMES = (
    re.compile(r'\s+(?:\(Python\) )?File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)'),
    re.compile(r"\s{1,7}(?P<function>\S.*?) \((?P<file>[^()]+?)(?::(?P<line>\d+))?\)\s*$"),  # locals stand deeper
    re.compile(r'\s+\(C\) File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<function>.+)'),
)


@dataclass(slots=True)
class _Thread:
    name: str
    id: int | None
    state: str
    outermost_first: bool
    frames: list[Frame] = field(default_factory=list)

    def add(self, frame: Frame) -> None:
        if len(self.frames) < MOST_FRAMES:
            self.frames.append(frame)

    @property
    def stack(self) -> tuple[Frame, ...]:
        """The frames, outermost first."""
        return tuple(self.frames if self.outermost_first else reversed(self.frames))


@dataclass(slots=True)
class _Process:
    who: lf.Who
    line: int
    threads: list[_Thread] = field(default_factory=list)
    parent: int | None = None

    def main_thread(self) -> _Thread | None:
        """Return the main thread: by its name or id, else the one that runs a script, else the last."""
        there = [thread for thread in self.threads if thread.frames]
        for thread in there:
            if thread.name == "MainThread" or (thread.id is not None and thread.id == self.who.pid):
                return thread
        scripts = [thread for thread in there if thread.stack[0].function == "<module>"]
        return next(iter((scripts or there)[-1:]), None)


def _holds_stacks(head: bytes) -> bool:
    """Return whether the file begins with a process and its threads, or with blocks of the debug server."""
    if b"Fatal Python error: " in head:
        return False  # the end of a rank, in its log
    text = head[:8192].decode("utf-8", "replace")
    lines = [split_line(raw, 1, "").text for raw in text.split("\n")[:200]]
    if any(_RANK_BLOCK.match(line) for line in lines):
        return True
    if any(map(_PROCESS.match, lines)) and any(line.startswith("Python v") for line in lines):
        return True
    threads = sum(any(pattern.match(line) for pattern in _THREADS) for line in lines)
    frames = sum(any(pattern.match(line) for pattern in _FRAMES) for line in lines)
    full = [line for line in lines if line.strip()]
    return threads > 0 and frames > 0 and 2 * (threads + frames) > len(full) - 6


def _read_stacks(document: Document) -> Found:
    """Return the main thread of each process, and what else is said about ranks."""
    processes: list[_Process] = []
    facts: list[lf.Fact] = []
    current, label, last = _Process(document.who, 1), document.who, 0
    text = io.TextIOWrapper(io.BytesIO(document.body), "utf-8", "replace", newline="\n")
    for number, raw in enumerate(text, 1):
        if number - last > _MOST_BETWEEN:
            break
        line = split_line(raw, number, document.source, document.who).text.rstrip()
        if match := _RANK_BLOCK.match(line) or _LABEL.match(line):
            host = (match[2] or "") if match.re is _RANK_BLOCK else ""
            rank = int(match[1]) if int(match[1][:9]) < lf.MOST_RANKS else None
            label = replace(document.who, rank=rank, host="" if host in {"localhost", "127.0.0.1"} else host)
            processes += [current] if current.threads else []
            current = _Process(label, number)
        elif match := _PROCESS.match(line):
            local = _LOCAL_RANK.search(match[2])
            who = replace(label, pid=int(match[1]), local_rank=int(local[1]) if local else label.local_rank)
            processes += [current] if current.threads else []
            current = _Process(who, number)
        elif match := _ANSWERED.match(line):
            facts.append(lf.Size(spot=lf.Spot(source=document.source, line=number), ranks=int(match[1])))
        elif match := _LACKING.match(line):
            rank, why = int(match[1]), "its GIL is held" if match[2] == "Timeout" else "it is dead"
            words = f"rank {rank} did not answer torch's debug server ({match[2]}): {why}"
            spot = lf.Spot(source=document.source, line=number)
            facts.append(lf.Hint(who=lf.Who(rank=rank), spot=spot, words=words, kind="no-answer"))
        elif line.startswith("Parent Process ") and line[15:].partition(":")[0].isdigit():
            current.parent = int(line[15:].partition(":")[0])
        elif not _read_line(current, line):
            continue
        last = number
    processes += [current] if current.threads else []
    return Found(facts=[*facts, *_facts_of(processes, document.source)], log_from=last + 1)


# Stacks in text form. Several processes, and several looks at them, may stand in one file.
STACKS = DocumentFormat("stacks", _holds_stacks, _read_stacks)


def _read_json_stacks(document: Document) -> Found:
    try:
        threads = json.loads(document.body)
        return Found(facts=list(stacks_of_json(threads, document.who, document.source)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Found(problem=f"damaged ({type(error).__name__})")


# The output of ``py-spy dump --json``.
JSON_STACKS = DocumentFormat(
    "stacks",
    lambda head: (start := head.lstrip()[:4096])[:1] == b"[" and b'"thread_id"' in start and b'"frames"' in start,
    _read_json_stacks,
)


def stacks_of_json(threads: list[dict[str, Any]], who: lf.Who, source: str) -> list[lf.Stacked]:
    """Return the main threads' stacks in py-spy's JSON. Raises ValueError, KeyError, TypeError or AttributeError."""
    by_pid: dict[int, _Process] = {}
    for trace in threads:
        pid = int(trace["pid"])
        process = by_pid.setdefault(pid, _Process(replace(who, pid=pid), 1))
        state = ("active" if trace.get("active") else "idle") + ("+gil" if trace.get("owns_gil") else "")
        thread = _Thread(str(trace.get("thread_name") or ""), trace.get("os_thread_id"), state, outermost_first=False)
        for frame in trace["frames"]:
            file = str(frame.get("short_filename") or frame["filename"])
            file = str(frame["filename"]) if "/" not in file else file
            thread.add(foreign_frame(file, int(frame.get("line") or 0), str(frame["name"])))
        process.threads.append(thread)
    return _facts_of(list(by_pid.values()), source)


def _read_line(process: _Process, line: str) -> bool:
    """Take a line of a thread or a frame; return whether it is one."""
    for place, pattern in enumerate(_THREADS):
        if match := pattern.match(line):
            named = match.groupdict()
            digits = named.get("id") or ""
            thread = int(digits) if digits.isdigit() else None
            state = named.get("state") or ""
            process.threads.append(_Thread(named.get("name") or "", thread, state, place == _LAST_FIRST))
            return True
    match = next((found for pattern in _FRAMES if (found := pattern.match(line))), None)
    if match is not None and process.threads:
        file, number, function = match["file"], match["line"], match["function"].strip()
        in_c = Frame(file=file, line=0, function=function, user=False)
        process.threads[-1].add(in_c if number is None else foreign_frame(file, int(number), function))
    return match is not None


def _facts_of(processes: Iterable[_Process], source: str) -> list[lf.Stacked]:
    """Return the stacks of ranks' main threads. A process without its own name is identified by its pid."""
    pairs = [(process, process.main_thread()) for process in processes]
    pids = {process.who.pid for process, thread in pairs if thread is None or not is_agent(thread.stack)}
    mains = [(process, thread) for process, thread in pairs if thread is not None and not is_agent(thread.stack)]
    # A launcher starts ranks in order: they are numbered by their pids if no process in the file is named.
    own = [process.who for process, thread in mains if not is_worker(thread.stack)]
    ordered = sorted({who.pid for who in own if who.pid is not None})
    named = any(who.rank is not None or who.local_rank is not None for who in own)
    ranks = {} if named or len(ordered) < 2 else {pid: at for at, pid in enumerate(ordered)}
    return [
        _stacked(
            thread.stack, worker=process.parent is not None and process.parent in pids, state=thread.state,
            who=replace(process.who, rank=ranks.get(process.who.pid or -1, process.who.rank)),
            spot=lf.Spot(source=source, line=process.line),
        )
        for process, thread in mains
    ]  # fmt: skip


_OF_NODE = re.compile(r"/nodes/\d+$")  # the folder of another node, in the run folder of the job
_RECORDS: dict[str, Any] = {"job": AttachedJob, "look": RankLook, "nodes": AskedNodes}


def _read_record(document: Document) -> Found:
    """Return the ranks, their stacks and states, and whether the job moved."""
    try:
        plain = json.loads(document.body)
        record = _RECORDS.get(plain.get("kind"))
        read = decode(record, plain) if record is not None else None
        spot = lf.Spot(source=document.source)
        facts: list[lf.Fact] = []
        if isinstance(read, AttachedJob):
            facts = [*_of_job(read, spot)]
        elif isinstance(read, RankLook):
            facts = [*_of_look(read, spot)]
        elif isinstance(read, AskedNodes):
            facts = [_refused(refusal, lf.Who(), spot) for refusal in read.unseen()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, WrongValue) as error:
        return Found(problem=f"damaged ({type(error).__name__})")
    return Found(facts=facts, attached=read if isinstance(read, AttachedJob | AskedNodes) else None)


# ``attach.json`` and the looks at ranks. The store's keys are not needed for a verdict.
ATTACH = DocumentFormat(
    "attach",
    lambda head: head.lstrip().startswith(b"{") and f'"format": "{FORMAT}"'.encode() in head[:200],
    _read_record,
)


def _of_job(job: AttachedJob, spot: lf.Spot) -> Iterator[lf.Fact]:
    if job.world_size is not None:
        yield lf.Size(spot=spot, ranks=job.world_size)
    for rank in job.ranks:
        yield lf.Seen(who=_who(rank, job.host), spot=spot)
    if job.movement is Movement.MOVING:
        # Not only by its stacks: a rank may be seen at one line twice, in two different steps.
        for rank in job.ranks:
            yield lf.Moving(who=_who(rank, job.host), spot=spot)
    for folder in {_OF_NODE.sub("", rank.wrap_folder) for rank in job.ranks if rank.wrap_folder is not None}:
        yield lf.Hint(spot=spot, words=f"the job runs under `ddpdoctor wrap`; its run folder is {folder}", kind="wrap")
    for refusal in job.refused:
        yield _refused(refusal, lf.Who(host=job.host), spot)


def _of_look(look: RankLook, spot: lf.Spot) -> Iterator[lf.Fact]:
    who = _who(look.rank, look.host)
    yield lf.Seen(who=who, spot=spot)
    if look.process is not None:
        yield lf.ProcessState(who=who, spot=spot, letter=look.process.state)
    if isinstance(look.stacks, list):
        yield from stacks_of_json(look.stacks, who, spot.source)
    for child in look.process.children if look.process is not None else ():
        if isinstance(child.stacks, list):
            # Other children of a rank, such as compile workers, hold up nobody.
            yield from (stack for stack in stacks_of_json(child.stacks, who, spot.source) if stack.worker)
    for refusal in look.refused:
        yield _refused(refusal, who, spot)


def _refused(refusal: Refusal, who: lf.Who, spot: lf.Spot) -> lf.Refused:
    return lf.Refused(who=who, spot=spot, source=refusal.source, reason=refusal.reason, remedy=refusal.remedy)


def _who(rank: SeenRank, host: str) -> lf.Who:
    return lf.Who(rank=rank.rank, local_rank=rank.local_rank, host=host, pid=rank.pid)
