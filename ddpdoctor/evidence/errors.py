"""What an error's text says of who caused it, what NCCL's warnings mean, and processes that end without a traceback."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.lines import origin_of
from ddpdoctor.evidence.reader import LineReader, quote
from ddpdoctor.model.evidence import MOST_RANKS, Exited, Failed, Hint, Link, Nature, Trouble, Who
from ddpdoctor.model.facts import signal_name
from ddpdoctor.model.known_errors import Accused, find_known, read_warning

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.known_errors import KnownError, NcclWarning
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an error's type, text and traceback say."""

    nature: Nature
    # Ranks that the error names as lost or late. Ranks of the default group are global ranks.
    peers: tuple[int, ...] = ()
    peer_hosts: tuple[str, ...] = ()
    memory: bool = False
    in_worker: bool = False
    known: KnownError | None = None  # the row of the table of known errors, if that decided


_STOPPED = re.compile(
    r"Process \d+ got signal: (?:1|2|15)\b|got signal: Signals\.SIG(?:HUP|INT|TERM)|\bReceived SIGTERM\b"
)
_STOPPED_TYPES = frozenset(("KeyboardInterrupt", "SignalException", "SIGTERMException"))
_FOLLOWS_TYPES = frozenset((
    "ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "RendezvousClosedError",
    "RendezvousGracefulExitError", "RayTaskError", "ActorDiedError", "RayActorError", "TrainingFailedError",
    "TrainingWorkerError", "GeneratorExit",
))  # fmt: skip
# Ranks that tell of a difference between ranks, and launchers that tell of a rank, are not where it began.
_FOLLOWS = re.compile(
    r"Detected mismatch between collectives on ranks"
    r"|DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param in process"
    r"|op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size"
    r"|[Mm]ore than 1 ?EB memory"
    r"|(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate|deepspeed)\b.*returned non-zero exit status"
)
_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|timed out in blocking wait|NCCL operation timed out"
    r"|Timed out waiting \d+ ?ms for (?:recv|send) operation|failed to pass monitoredBarrier"
    r"|successfully reached monitoredBarrier|timed out in monitoredBarrier"
    r"|[Ww]ait timeout after \d+ ?ms, keys|Timeout waiting for key|Socket Timeout|waiting for clients\. \d+/\d+"
    r"|client socket has timed out|Timed out initializing process group|returned 0, likely a timeout"
    r"|Timed out waiting for (?:rendezvous|clients)"
)
_TIMED_OUT_TYPES = frozenset(("RendezvousTimeoutError",))
_PEER_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Connection closed by remote peer"
    r"|Application timeout caused pair closure|ncclRemoteError|remote process exited or there was a network error"
    r"|NCCL communicator was aborted|Socket closed|failed to recv, got 0 bytes|Connection was likely closed"
    r"|(?:recvValue|sendBytes|recvVector) failed|Found key in store: NCCLABORTEDCOMM"
    r"|Transport endpoint is not connected"
    r"|failed to connect to any network address"
    r"|Connection refused|No route to host|Network is unreachable|Software caused connection abort|Connection timed out"
    r"|Connect to \S+ (?:failed|returned)"
)
# A peer is a rank only where torch speaks of it. A download may lose its peer too.
_DISTRIBUTED = re.compile(
    r"gloo|pair\.cc|[Nn][Cc][Cc][Ll]|c10d|SocketImpl|TCPStore|ProcessGroup|store->|failed to recv, got|\[Rank \d+\]"
)
_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory|CUDA error: out of memory|Cuda failure '?(?:2 )?'?out of memory"
    r"|can't allocate memory"
    r"|Cannot allocate memory|Unable to allocate [\d.]+ [KMGT]iB|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Failed to CUDA (?:calloc|malloc|host alloc)|CUDA_ERROR_OUT_OF_MEMORY|\bout of memory\b"
)
_MEMORY_TYPES = frozenset(("OutOfMemoryError", "MemoryError"))
_WORKER = re.compile(
    r"DataLoader worker \(pid|Caught \w+ in (?:DataLoader worker process|pin memory thread)|Unexpected bus error enc"
)
_PIPES = re.compile(
    r"multiprocessing[/\\](?:connection|resource_sharer|managers|queues|reduction|popen_\w+|spawn)\.py$"
)
_PIPE_TYPES = frozenset(("EOFError", "BrokenPipeError", "ConnectionResetError", "ConnectionRefusedError"))
_PEER_ADDRESS = re.compile(
    r"(?:closed by(?: remote)? peer|Read error|Write error|[Cc]onnect to|remote peer|connect to)\s+"
    r"\(?\[?(?P<host>[A-Za-z0-9][\w.:-]*?)(?:\]|<\d+>|, \d+\)|:\d+\b|\s|$)|remote=\[(?P<remote>[^\]]+)\]"
)
_PEER_RANKS = re.compile(r"(?:from rank:? |waiting for send/recv from rank |Ranks? )(\d{1,7}(?:, \d{1,7})*)")
_LOCAL = ("127.", "::1", "localhost", "::ffff:127.", "0.0.0.0")  # noqa: S104 - compared with, not bound to


def classify(kind: str, message: str, frames: Sequence[Frame] = ()) -> Reading:
    """Return what an error says. ``kind`` is the class of the exception with or without its module."""
    name = kind.rpartition(".")[2]
    last_files = [frame.file.replace("\\", "/") for frame in frames[-3:]]
    if name in _STOPPED_TYPES or _STOPPED.search(message):
        return Reading(nature=Nature.STOPPED)
    in_worker = bool(_WORKER.search(message))
    if (
        name in _FOLLOWS_TYPES
        or _FOLLOWS.search(message)
        or (name in _PIPE_TYPES and bool(frames) and bool(_PIPES.search(frames[-1].file)))
    ):
        return Reading(nature=Nature.FOLLOWS, in_worker=in_worker)
    if name in _MEMORY_TYPES or _MEMORY.search(message):
        return Reading(nature=Nature.OWN, memory=True, in_worker=in_worker)
    known = None
    if name in _TIMED_OUT_TYPES or _TIMED_OUT.search(message):
        nature = Nature.TIMED_OUT
    elif _PEER_LOST.search(message) and (
        name.startswith("Dist")
        or _DISTRIBUTED.search(message)
        or any("torch/distributed/" in file for file in last_files)
    ):
        nature = Nature.PEER_LOST
    else:
        known = find_known(": ".join(filter(None, (name, message))))
        nature = _NATURES.get(known.nature, Nature.OWN) if known is not None else Nature.OWN
    if nature not in {Nature.PEER_LOST, Nature.TIMED_OUT}:
        return Reading(nature=nature, in_worker=in_worker, known=known)
    # A "[Rank 2]" at the beginning of a message is the rank that reports the error.
    peers: dict[int, None] = {}
    for match in _PEER_RANKS.finditer(message):
        if message[match.start() - 1 : match.start()] != "[":
            says_reached = "successfully reached" in message[match.end() :][:30]
            peers |= dict.fromkeys(() if says_reached else numbers(match[1]))
    named = (match["host"] or match["remote"] for match in _PEER_ADDRESS.finditer(message))
    hosts = dict.fromkeys(host for host in named if not host.startswith(_LOCAL))
    return Reading(nature=nature, peers=tuple(peers), peer_hosts=tuple(hosts), known=known)


# What the table of known errors says of an error.
_NATURES = {**{nature.value: nature for nature in Nature}, "link": Nature.PEER_LOST}


def numbers(text: str) -> tuple[int, ...]:
    """Return the ranks in a list such as "1, 2". Impossible ranks are left out."""
    return tuple(number for number in map(int, re.findall(r"\d{1,12}", text)) if number < MOST_RANKS)


def warned(text: str, place: str | None, common: dict[str, Any]) -> Fact:
    """Return the fact that a warning reports. ``common``: who, spot, time and said of the fact."""
    warning = read_warning(text)
    known = find_known(text) if warning is None else None
    if known is not None and known.nature == "own":
        return Failed(type="NCCL", message=text, nature=Nature.OWN, alone=True, **common)
    if warning is None or warning.accused is Accused.NOBODY:
        words = quote(f"NCCL warns{f' ({place})' if place else ''}: {text}") if warning is None else warning.words
        return Hint(words=words, kind="nccl-warning", **common)
    return _fact(warning, text, common)


def named_cause(text: str, common: dict[str, Any]) -> Fact | None:
    """Return the cause outside the writing process that NCCL's message names, or None."""
    warning = read_warning(text) if text else None
    if warning is None or warning.accused in {Accused.NOBODY, Accused.PROCESS, Accused.PEER}:
        return None
    return _fact(warning, text, common)


def _fact(warning: NcclWarning, text: str, common: dict[str, Any]) -> Fact:
    if warning.accused is Accused.PROCESS:
        memory = warning.kind == "memory"
        message = "out of memory" if memory else warning.named.get("error", warning.words)
        return Failed(type="CUDA error", message=message, nature=Nature.OWN, memory=memory, **common)
    fix = warning.fix or (known.fix if (known := find_known(text)) is not None else "")
    if warning.accused is Accused.START:
        ranks = tuple(int(warning.named[name]) for name in ("rank", "other") if name in warning.named)
        return Trouble(kind=warning.kind, problem=warning.words, fix=fix, ranks=ranks, **common)
    return link_of(replace(warning, fix=fix), common)


def link_of(warning: NcclWarning, common: dict[str, Any]) -> Link:
    """Return the connection that a warning is about."""
    named = warning.named
    local_rank = int(named["local_rank"]) if "local_rank" in named else None
    host = common["who"].host if local_rank is not None else named.get("host", "")
    return Link(
        to=Who(host=host, address=named.get("address", ""), local_rank=local_rank), problem=warning.words,
        fix=warning.fix, victim=warning.accused is Accused.PEER, local=warning.accused is Accused.HOST, **common,
    )  # fmt: skip


_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']{1,200})'")
_WHAT = re.compile(r"what\(\):  ?(?P<message>.+)")
_SHELL = re.compile(
    r"(?:line (?P<line>\d{1,7}):|^\[\d+\][+-]?)\s+(?P<pid>\d{1,9}) (?P<how>Segmentation fault|Bus error|Aborted|Killed"
    r"|Floating point exception|Illegal instruction)\b"
)
_ALONE = re.compile(
    r"(?:^|(?:it/s|s/it)[^\]]{0,80}\]\s*|EXIT STRING: )"  # a progress bar ends without a line end; MPICH
    r"(?:(?P<how>Segmentation fault|Bus error|Aborted|Floating point exception|Illegal instruction)"
    r"(?: \((?:core dumped|signal \d{1,2})\))?|(?P<killed>Killed)(?: \(signal 9\))?)$"
)
# Also UCX's handler.
_OPEN_MPI = re.compile(
    r"^\[(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9})(?: *:\d{1,9}:\d{1,9})?\] (?:Signal: |Caught signal \d{1,2} \()"
    r"(?P<how>Segmentation fault|Bus error|Aborted)(?: \(\d+\)|[:)])"
)
# How a launcher reports the process that ended first, with its rank.
_REPORTED = (
    re.compile(r"Child process with PID (?P<pid>\d{1,9}) terminated with code (?P<code>-?\d{1,5})\b"),  # Lightning
    re.compile(
        r"process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,9}) on node (?P<host>[\w.-]{1,253})"
        r" (?:exited on signal (?P<signal>\d{1,2})|exiting)"
    ),
    re.compile(r"MPI_A(?:BORT|bort) was invoked on rank (?P<rank>\d{1,7}) in communicator MPI_COMM_WORLD"),
)
_FIRST = re.compile(
    r"Process name: \[\[\d{1,9},\d{1,9}\],(?P<rank>\d{1,7})\]"
    r"|RANK (?P<number>\d{1,7}) PID (?P<pid>\d{1,9}) RUNNING AT (?P<host>[\w.-]{1,253})"
)
# The two lines in which Open MPI's and Intel's mpirun report that process.
_END = re.compile(
    r"(?:KILLED BY SIGNAL: (?P<signal>\d{1,2})|(?:EXIT (?:CODE|STATUS)|Exit code):\s+(?P<code>\d{1,5}))\b"
)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Aborted": "SIGABRT", "Killed": "SIGKILL",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
_GATE = (
    "what():", "terminate called", "fault", "us error", "Aborted", "Killed", "exception", "nstruction", "Segfault",
    "Child process with", "process rank ", "MPI_ABORT was", "Process name: [[", "RUNNING AT ", "KILLED BY SIGNAL",
    "EXIT ", "Exit code:",
)  # fmt: skip
_OF_SHELLS = frozenset({6, 7, 9, 11, 15})
_NEAR = 6
_MOST = 4096
_WATCHDOG = ("Watchdog caught", "atchdog thread terminated")  # ProcessGroupNCCL logs these before it ends the process


class CrashReader(LineReader):
    """Finds processes that a C++ exception or a signal ended."""

    name = "crash"
    triggers = (
        b"terminate called", b"egmentation fault", b"us error", b"core dumped", b"Killed", b"rror", b"MPI_ABORT was",
        b"Child process with", b"process rank ", b"Process name: [[", b"RUNNING AT ",
    )  # fmt: skip

    def __init__(self) -> None:
        self._thrown: dict[Hashable, tuple[int, str]] = {}
        """The type that was thrown last in each stream, and its line."""
        self._first: tuple[int, dict[str, str]] = (-_NEAR, {})
        """The line in which mpirun named the process that ended first, and what it said."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if not any(words in text for words in _GATE):
            return ()
        if (terminate := _TERMINATE.search(text)) is not None:
            if len(self._thrown) > _MOST:
                self._thrown.clear()
            self._thrown[line.stream] = (line.number, terminate["type"])
        if (what := _WHAT.search(text)) is not None:
            number, thrown = self._thrown.pop(line.stream, (-_NEAR, ""))
            return _thrown(line, thrown if line.number - number <= _NEAR else "", what["message"])
        if (first := _FIRST.search(text)) is not None:
            self._first = (line.number, _named(first))
            return ()
        number, named = self._first
        if named and line.number - number <= _NEAR and (end := _END.search(text)) is not None:
            self._first = (-_NEAR, {})
            return [_reported(line, {**named, **_named(end)})]
        return _signal(line)


def _thrown(line: Line, kind: str, message: str) -> list[Fact]:
    """Return the C++ exception of this type that ended a process."""
    if any(words in message for words in _WATCHDOG):
        return []
    reading = classify(kind, message)
    short = kind.rpartition("::")[2] or "C++ exception"
    return [
        Failed(
            type=short, message=quote(message), nature=reading.nature, peers=reading.peers,
            peer_hosts=reading.peer_hosts, memory=reading.memory or short == "bad_alloc", **origin_of(line),
        )
    ]  # fmt: skip


def _signal(line: Line) -> list[Fact]:
    text = line.text
    common = origin_of(line)
    if "Unexpected bus error encountered in worker" in text:
        problem = "a DataLoader worker ran out of shared memory"
        fix = (
            "give the container more (`--shm-size`, or an emptyDir of medium Memory at /dev/shm), or use fewer workers"
        )
        return [Trouble(kind="shm", problem=problem, fix=fix, **common)]
    if "Segfault encountered" in text:
        return [Exited(signal="SIGSEGV", **common)]
    if (mpi := _OPEN_MPI.search(text)) is not None:
        common["who"] = replace(line.who, host=mpi["host"], pid=int(mpi["pid"]))
        return [Exited(signal=_SIGNALS[mpi["how"]], **common)]
    if (reported := next((found for one in _REPORTED if (found := one.search(text)) is not None), None)) is not None:
        return [_reported(line, _named(reported))]
    if (shell := _SHELL.search(text)) is not None:
        common["who"] = replace(line.who, pid=int(shell["pid"]))
        return [Exited(signal=_SIGNALS[shell["how"]], **common)]
    if (alone := _ALONE.search(text.strip())) is not None:
        return [Exited(signal=_SIGNALS[alone["how"] or alone["killed"]], **common)]
    return []


def _named(found: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _reported(line: Line, named: dict[str, str]) -> Exited:
    """Return the end of the process that a launcher names. mpirun gives the process id 0 where it does not know it."""
    rank, pid = int(named.get("rank", named.get("number", MOST_RANKS))), int(named.get("pid", 0))
    who = replace(line.who, host=named.get("host", line.who.host), pid=pid or line.who.pid)
    who = replace(who, rank=rank) if rank < MOST_RANKS else who
    code = int(named.get("code", 1))
    signal = int(named.get("signal", 0)) or (-code if code < 0 else code - 128 if code - 128 in _OF_SHELLS else 0)
    common = origin_of(line, who)
    return (
        Exited(signal=signal_name(signal), first=True, **common) if signal else Exited(code=code, first=True, **common)
    )
