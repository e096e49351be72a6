"""Finds what caused errors: by their text, NCCL's warnings, signals, and torch's collectives and store."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.lines import LineReader, origin_of, quote
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.facts import signal_name
from ddpdoctor.model.known_errors import Accused, find_known, read_warning
from ddpdoctor.model.words import dtype_name, group_alike, odd_ranks, op_type_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from ddpdoctor.logs.lines import Line
    from ddpdoctor.model.known_errors import KnownError, NcclWarning
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The meaning of an error's type, text and traceback."""

    nature: lf.Nature
    # Ranks that the error names as lost or late. Ranks of the default group are global ranks.
    peers: tuple[int, ...] = ()
    peer_hosts: tuple[str, ...] = ()
    memory: bool = False
    in_worker: bool = False
    known: KnownError | None = None  # the row of the table of known errors, if that decided

    @property
    def fields(self) -> dict[str, Any]:
        return {"nature": self.nature, "peers": self.peers, "peer_hosts": self.peer_hosts, "memory": self.memory}


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
_OF_TORCH = re.compile(r"torch[/\\]distributed[/\\]")
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
    """Return what an error means. ``kind`` is the class of the exception with or without its module."""
    name = kind.rpartition(".")[2]
    if name in _STOPPED_TYPES or _STOPPED.search(message):
        return Reading(nature=lf.Nature.STOPPED)
    in_worker = bool(_WORKER.search(message))
    in_pipe = name in _PIPE_TYPES and bool(frames) and _PIPES.search(frames[-1].file)
    if name in _FOLLOWS_TYPES or in_pipe or _FOLLOWS.search(message):
        return Reading(nature=lf.Nature.FOLLOWS, in_worker=in_worker)
    if name in _MEMORY_TYPES or _MEMORY.search(message):
        return Reading(nature=lf.Nature.OWN, memory=True, in_worker=in_worker)
    known = None
    if name in _TIMED_OUT_TYPES or _TIMED_OUT.search(message):
        nature = lf.Nature.TIMED_OUT
    elif _PEER_LOST.search(message) and (
        name.startswith("Dist")
        or _DISTRIBUTED.search(message)
        or any(_OF_TORCH.search(frame.file) for frame in frames[-3:])
    ):
        nature = lf.Nature.PEER_LOST
    else:
        known = find_known(": ".join(filter(None, (name, message))))
        nature = _NATURES.get(known.nature, lf.Nature.OWN) if known is not None else lf.Nature.OWN
    if nature not in {lf.Nature.PEER_LOST, lf.Nature.TIMED_OUT}:
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
_NATURES = {**{nature.value: nature for nature in lf.Nature}, "link": lf.Nature.PEER_LOST}


def numbers(text: str) -> tuple[int, ...]:
    """Return the ranks in a list such as "1, 2". Impossible ranks are left out."""
    return tuple(number for number in map(int, re.findall(r"\d{1,12}", text)) if number < lf.MOST_RANKS)


def warned(text: str, place: str | None, common: dict[str, Any]) -> lf.Fact:
    """Return the fact that a warning reports. ``common``: who, spot, time and said of the fact."""
    warning = read_warning(text)
    known = find_known(text) if warning is None else None
    if known is not None and known.nature == "own":
        return lf.Failed(type="NCCL", message=text, nature=lf.Nature.OWN, alone=True, **common)
    if warning is None or warning.accused is Accused.NOBODY:
        words = quote(f"NCCL warns{f' ({place})' if place else ''}: {text}") if warning is None else warning.words
        return lf.Hint(words=words, kind="nccl-warning", **common)
    return _fact(warning, text, common)


def named_cause(text: str, common: dict[str, Any]) -> lf.Fact | None:
    """Return the cause outside the writing process that NCCL's message names, or None."""
    warning = read_warning(text) if text else None
    if warning is None or warning.accused in {Accused.NOBODY, Accused.PROCESS, Accused.PEER}:
        return None
    return _fact(warning, text, common)


def _fact(warning: NcclWarning, text: str, common: dict[str, Any]) -> lf.Fact:
    if warning.accused is Accused.PROCESS:
        memory = warning.kind == "memory"
        message = "out of memory" if memory else warning.named.get("error", warning.words)
        return lf.Failed(type="CUDA error", message=message, nature=lf.Nature.OWN, memory=memory, **common)
    fix = warning.fix or (known.fix if (known := find_known(text)) is not None else "")
    if warning.accused is Accused.START:
        ranks = tuple(int(warning.named[name]) for name in ("rank", "other") if name in warning.named)
        return lf.Trouble(kind=warning.kind, problem=warning.words, fix=fix, ranks=ranks, **common)
    return link_of(replace(warning, fix=fix), common)


def link_of(warning: NcclWarning, common: dict[str, Any]) -> lf.Link:
    named = warning.named
    local_rank = int(named["local_rank"]) if "local_rank" in named else None
    host = common["who"].host if local_rank is not None else named.get("host", "")
    return lf.Link(
        to=lf.Who(host=host, address=named.get("address", ""), local_rank=local_rank), problem=warning.words,
        fix=warning.fix, victim=warning.accused is Accused.PEER, local=warning.accused is Accused.HOST, **common,
    )  # fmt: skip


_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']{1,200})'")
_WHAT = re.compile(r"what\(\):  ?(?P<message>.+)")
_SHELL = re.compile(
    r"(?:line (?P<line>\d{1,7}):|^\[\d+\][+-]?)\s+(?P<pid>\d{1,9}) (?P<how>Segmentation fault|Bus error|Aborted|Killed"
    r"|Floating point exception|Illegal instruction)\b"
)
_ALONE = re.compile(
    r"(?:^\s*|(?:it/s|s/it)[^\]]{0,80}\]\s*|EXIT STRING: )"  # a progress bar ends without a line end; MPICH
    r"(?:(?P<how>Segmentation fault|Bus error|Aborted|Floating point exception|Illegal instruction)"
    r"(?: \((?:core dumped|signal \d{1,2})\))?|(?P<killed>Killed)(?: \(signal 9\))?)\s*$"
)
# Also UCX's handler.
_OPEN_MPI = re.compile(
    r"^\[(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9})(?: *:\d{1,9}:\d{1,9})?\] (?:Signal: |Caught signal \d{1,2} \()"
    r"(?P<how>Segmentation fault|Bus error|Aborted)(?: \(\d+\)|[:)])"
)
# After those of Open MPI: how a launcher reports the process that ended first, with its rank.
_SIGNALED = (
    _OPEN_MPI,
    re.compile(r"Child process with PID (?P<pid>\d{1,9}) terminated with code (?P<code>-?\d{1,5})\b"),  # Lightning
    re.compile(
        r"process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,9}) on node (?P<host>[\w.-]{1,253})"
        r" (?:exited on signal (?P<signal>\d{1,2})|exiting)"
    ),
    re.compile(r"MPI_A(?:BORT|bort) was invoked on rank (?P<rank>\d{1,7}) in communicator MPI_COMM_WORLD"),
    _SHELL,
    _ALONE,
)
_FIRST = re.compile(
    r"Process name: \[\[\d{1,9},\d{1,9}\],(?P<rank>\d{1,7})\]"
    r"|RANK (?P<number>\d{1,7}) PID (?P<pid>\d{1,9}) RUNNING AT (?P<host>[\w.-]{1,253})"
)
# The two lines in which Open MPI's and Intel's mpirun report that process.
_END = re.compile(
    r"(?:KILLED BY SIGNAL: (?P<signal>\d{1,2})|(?:EXIT (?:CODE|STATUS)|Exit code):\s+(?P<code>\d{1,5}))\b"
)
# As shells, mpirun and Slurm call them.
SIGNALS_BY_WORDS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Aborted": "SIGABRT", "Killed": "SIGKILL",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL", "Out Of Memory": "SIGKILL",
    "Terminated": "SIGTERM", "Interrupt": "SIGINT", "Hangup": "SIGHUP", "Quit": "SIGQUIT",
}  # fmt: skip
_OF_SHELLS = frozenset({6, 7, 9, 11, 15})
_NEAR = 6
_MOST = 4096
_WATCHDOG = ("Watchdog caught", "atchdog thread terminated")  # ProcessGroupNCCL logs these before it ends the process


@dataclass(slots=True, eq=False)
class CrashReader(LineReader):
    """Finds processes that a C++ exception or a signal ended."""

    name = "crash"
    triggers = (
        b"terminate called", b"egmentation fault", b"us error", b"core dumped", b"Killed", b"rror", b"MPI_ABORT was",
        b"Child process with", b"process rank ", b"Process name: [[", b"RUNNING AT ",
    )  # fmt: skip
    begins = (
        "what():", "terminate called", "fault", "us error", "Aborted", "Killed", "exception", "nstruction", "Segfault",
        "Child process with", "process rank ", "MPI_ABORT was", "Process name: [[", "RUNNING AT ", "KILLED BY SIGNAL",
        "EXIT ", "Exit code:",
    )  # fmt: skip
    # The type that was thrown last in each stream, and its line
    _thrown: dict[Hashable, tuple[int, str]] = field(default_factory=dict)
    # The line in which mpirun named the process that ended first, and what it said.
    _first: tuple[int, dict[str, str]] = (-_NEAR, {})

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if not any(words in text for words in self.begins):
            return ()
        if (terminate := _TERMINATE.search(text)) is not None:
            if len(self._thrown) > _MOST:
                self._thrown.clear()
            self._thrown[line.stream] = (line.number, terminate["type"])
        if (what := _WHAT.search(text)) is not None:
            number, thrown = self._thrown.pop(line.stream, (-_NEAR, ""))
            if any(words in what["message"] for words in _WATCHDOG):
                return ()
            thrown = thrown if line.number - number <= _NEAR else ""
            said, short = classify(thrown, what["message"]).fields, thrown.rpartition("::")[2] or "C++ exception"
            said["memory"] |= short == "bad_alloc"
            return [lf.Failed(type=short, message=quote(what["message"]), **said, **origin_of(line))]
        if (first := _FIRST.search(text)) is not None:
            self._first = (line.number, _named(first))
            return ()
        number, named = self._first
        if named and line.number - number <= _NEAR and (end := _END.search(text)) is not None:
            self._first = (-_NEAR, {})
            return [_reported(line, {**named, **_named(end)})]
        return _signal(line)


def _signal(line: Line) -> list[lf.Fact]:
    text = line.text
    if "Unexpected bus error encountered in worker" in text:
        problem = "a DataLoader worker ran out of shared memory"
        fix = (
            "give the container more (`--shm-size`, or an emptyDir of medium Memory at /dev/shm), or use fewer workers"
        )
        return [lf.Trouble(kind="shm", problem=problem, fix=fix, **origin_of(line))]
    if "Segfault encountered" in text:
        return [lf.Exited(signal="SIGSEGV", **origin_of(line))]
    found = next((found for pattern in _SIGNALED if (found := pattern.search(text)) is not None), None)
    named = _named(found) if found is not None else {}
    how = named.get("how") or named.get("killed")
    if how is None:
        return [_reported(line, named)] if found is not None else []
    pid = int(named["pid"]) if "pid" in named else line.who.pid
    who = replace(line.who, host=named.get("host", line.who.host), pid=pid)
    return [lf.Exited(signal=SIGNALS_BY_WORDS[how], **origin_of(line, who))]


def _named(found: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _reported(line: Line, named: dict[str, str]) -> lf.Exited:
    """Return the end of the process that a launcher names. mpirun gives the process id 0 where it does not know it."""
    rank, pid = int(named.get("rank", named.get("number", lf.MOST_RANKS))), int(named.get("pid", 0))
    who = replace(line.who, host=named.get("host", line.who.host), pid=pid or line.who.pid)
    who = replace(who, rank=rank) if rank < lf.MOST_RANKS else who
    code = -int(named.get("signal", 0)) or int(named.get("code", 1))
    return exited(code, first=True, **origin_of(line, who))


def exited(code: int, **fields: Any) -> lf.Exited:
    """Return the end of a process with an exit code as Python has it, -9 for signal 9, or as a shell has it, 137."""
    number = -code if code < 0 else code - 128 if code - 128 in _OF_SHELLS else 0
    return lf.Exited(signal=signal_name(number), **fields) if number else lf.Exited(code=code, **fields)


MARK = "mismatch between collectives"
_CALL = re.compile(
    r"Rank (?P<rank>\d{1,9}) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d{1,20}),? ?)?OpType=(?P<op>\w{1,60})"
    r"(?:, TensorShape=(?P<shape>\[[\[\]\d, ]{0,2000}\]|\d*))?"
    r"(?:, TensorDtypes=(?P<dtypes>[\w, ]{0,200}?)(?:, Tensor|\)))?"
)
_MOST_CALLS = 20_000

_KEYS = re.compile(r"[Ww]ait timeout after (?P<ms>\d{1,12}) ?ms, keys: (?P<keys>[^\n]{1,2000})")
_KEY = re.compile(r"Timeout waiting for key: (?P<keys>\S{1,500}) after (?P<ms>\d{1,12}) ?ms")
# Where a rank leaves its address for Gloo's peers.
_ADDRESS = re.compile(r"^/?default_pg/\d+//\w+//\d+/(?P<rank>\d{1,9})$")
_UNIQUE_ID = re.compile(r"^/?default_pg/0(?://cuda//0|/0)$")  # where rank 0 leaves NCCL's id for all
_ASKS_0 = re.compile(
    r"retrieving ncclUniqueId from \[(?P<rank>\d{1,9})\] via c10d key-value store by key '(?P<key>[^']*)'"
)
_CLIENTS = re.compile(
    r"Timed out after (?P<seconds>\d{1,9}) seconds waiting for clients\. (?P<came>\d{1,9})/(?P<all>\d{1,9}) clients"
)
_CLIENT = re.compile(
    r"client socket has timed out after (?P<limit>\d{1,12}) ?(?P<unit>ms|s)? while trying to connect to"
    r" [(\[]?(?P<host>[^,\s)\]]{1,253}?)(?:, |\]?:)(?P<port>\d{1,5})(?:[^\w:.,\]]|\.?(?:\s|$))"
)
_UNKNOWN_NAME = re.compile(
    r"client socket has failed to connect to any network address of \((?P<host>[^,\s)]{1,253}), (?P<port>\d{1,5})\)"
    r"(?P<why>.{0,400})"
)
_IN_USE = re.compile(
    r"server socket has failed to listen on any local network address.{0,400}?"
    r"(?:port: (?P<port>\d{1,5})|:(?P<other>\d{4,5})\b)"
)
_LOST = re.compile(
    r"(?:recvValue|recvVector|recvString|sendBytes|sendValue) failed on SocketImpl\((?P<socket>[^)]{0,400})\)"
)
_REMOTE = re.compile(r"remote=\[?(?P<host>[^\]\s,]{1,253}?)\]?:\d{1,5}\b")
_BARRIER = re.compile(
    r"(?P<how>Waiting in|Timed out initializing process group in) store based barrier.{0,60}? rank: (?P<rank>\d{1,9}),"
    r".{0,80}?\(world_size=(?P<world>\d{1,9}), worker_count=(?P<count>\d{1,9}), timeout=(?P<limit>[\d:]{1,20})"
)
_PASSED = re.compile(r"Rank (?P<rank>\d{1,9}): Completed store-based barrier")
STORE_MARKS = (
    "ait timeout after", "Timeout waiting for key", "retrieving ncclUniqueId", "waiting for clients. ",
    "client socket has timed out", "failed to connect to any network", "server socket has failed to",
    " failed on SocketImpl", "store based barrier",
    "store-based barrier", "waitForInput: poll for socket",
)  # fmt: skip


def _store_facts(line: Line) -> list[lf.Fact]:
    text = line.text
    keys, asks = _KEYS.search(text) or _KEY.search(text), _ASKS_0.search(text)
    if keys is not None or asks is not None:
        return _key_facts(line, keys, asks)
    common = origin_of(line)
    if (clients := _CLIENTS.search(text)) is not None:
        came, world = int(clients["came"]), int(clients["all"])
        found: list[lf.Fact] = [_waiting(float(clients["seconds"]), **common)]
        if 0 < world < lf.MOST_RANKS:
            found.append(lf.Size(ranks=world, **common))
        if came == 1 and world == 2:  # the server counts itself, and serves as rank 0
            absent = {**common, "who": lf.Who(rank=1)}
            found.append(lf.Absent(waiters=(0,), in_init=True, shown=lf.Shown.WORDS, **absent))
        return found
    if (client := _CLIENT.search(text)) is not None:
        limit_s = int(client["limit"]) / (1 if client["unit"] == "s" else 1000)
        problem = f"could not connect to the job's store at {client['host']}:{client['port']} within {limit_s:g} s"
        fix = (
            f"check that rank 0 was started on {client['host']}, that MASTER_ADDR and MASTER_PORT point to it on "
            "all hosts, and that no firewall blocks the port: `ddpdoctor check-rendezvous`"
        )
        return [_waiting(limit_s, **common), lf.Link(to=_host(client["host"]), problem=problem, fix=fix, **common)]
    if (unknown := _UNKNOWN_NAME.search(text)) is not None:  # the store's host has no address, or refuses
        host = unknown["host"]
        why = "its name does not resolve there" if "gai error" in unknown["why"] else "no answer"
        problem = f"cannot connect to the job's store at {host}:{unknown['port']}: {why}"
        fix = f"check MASTER_ADDR on all hosts, and that each can resolve it: `getent hosts {host}`"
        return [lf.Link(to=_host(host), problem=problem, fix=fix, **common)]
    if "failed on SocketImpl" in text:  # the store's server, in rank 0 or an agent, has ended
        if (lost := _LOST.search(text)) is None:
            return []
        remote = _REMOTE.search(lost["socket"])
        problem = "lost the connection to the job's store: the process that serves it, rank 0 or its agent, had ended"
        fix = "first find out what ended rank 0 and its launcher"
        to = replace(_host(remote["host"]) if remote is not None else lf.Who(), rank=0)
        return [lf.Link(to=to, problem=problem, fix=fix, victim=True, **common)]
    if "waitForInput" in text:
        return [_waiting(None, in_init=False, **common)] if "likely a timeout" in text else []
    in_use = _IN_USE.search(text)
    if in_use is None or not ("EADDRINUSE" in text or "ddress already in use" in text):
        return []
    port = in_use["port"] or in_use["other"]
    fix = (
        f"end the process that listens there (`ss -ltnp 'sport = :{port}'`), often a rank of an earlier "
        "run, or give this job another port: `torchrun --master-port`, MASTER_PORT"
    )
    return [lf.Trouble(kind="port", problem=f"port {port} is in use already", fix=fix, **common)]


def _key_facts(line: Line, keys: re.Match[str] | None, asks: re.Match[str] | None) -> list[lf.Fact]:
    """Read which ranks waited for a key, and which rank never set it."""
    common = origin_of(line)
    limit_s = int(keys["ms"]) / 1000 if keys is not None else None
    names = [key.strip() for key in keys["keys"].split(",")][:64] if keys is not None else []
    in_init = asks is not None or any("default_pg/" in name for name in names)
    waiting = _waiting(limit_s, in_init=in_init, **common)
    found: list[lf.Fact] = [waiting] if keys is not None or "imeout" in line.text else []
    waiters = (line.who.rank,) if line.who.rank is not None else ()
    ranks = {int(match["rank"]) for name in names if (match := _ADDRESS.match(name.rstrip("]'\". "))) is not None}
    ranks |= {0 for name in names if _UNIQUE_ID.match(name.rstrip("]'\". "))}
    certain = bool(ranks)
    if not ranks and asks is not None and asks["key"] == "0" and not names:
        ranks = {int(asks["rank"])}  # of a group that is not named: of the first one, most likely
    said = {"waiters": waiters, "in_init": True, "certain": certain, "expected": bool(asks), "shown": lf.Shown.WORDS}
    ranks = {rank for rank in ranks if rank < lf.MOST_RANKS and rank != line.who.rank}
    return [*found, *(lf.Absent(**{**common, **said, "who": lf.Who(rank=rank)}) for rank in sorted(ranks))]


def _waiting(limit_s: float | None, *, timed_out: bool = True, in_init: bool = True, **common: Any) -> lf.Waiting:
    return lf.Waiting(
        operation=lf.Operation(), timed_out=timed_out, limit_s=limit_s, in_init=in_init, in_store=True, **common
    )  # fmt: skip


def _host(name: str) -> lf.Who:
    is_address = bool(re.fullmatch(r"[\d.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", name))
    return lf.Who(address=name) if is_address else lf.Who(host=name)


_NOT_PASSED = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\]: Ranks? (?P<ranks>\d[\d, ]{0,100000}?) failed to pass monitoredBarrier"
    r" in (?P<ms>\d{1,12})"
)
_INNOCENT = re.compile(r"Rank (?P<rank>\d{1,9}) successfully reached monitoredBarrier, but received errors")
_PARAMETERS = re.compile(
    r"Rank (?P<one>\d{1,9}) has (?P<count>\d{1,20}) params, while rank (?P<other>\d{1,9}) has inconsistent"
    r" (?P<others>-?\d{1,20}) params"
)
_SIZES = re.compile(
    r"params\[(?P<number>\d{1,9})\] in this process with sizes \[(?P<sizes>[\d, ]{0,200})\] appears not to match"
    r" sizes of the same param in process (?P<other>\d{1,9})"
)
_LENGTHS = re.compile(r"op\.preamble\.length <= op\.nbytes\.? ?(?P<sent>\d{1,20}) vs (?P<expected>\d{1,20})")
_CONSTRUCTOR = "DistributedDataParallel()"
_MOST_PARAMETERS = 10**8  # Our choice: no model has more tensors. A victim reads memory that was never set.


def _monitored_barrier(line: Line) -> list[lf.Fact]:
    """Read which ranks a monitored barrier misses. Only rank 0 of the group reports it."""
    operation = lf.Operation(op="monitored_barrier")
    common = origin_of(line)
    if (innocent := _INNOCENT.search(line.text)) is not None:
        who = line.who if line.who.rank is not None else lf.Who(rank=int(innocent["rank"]))
        return [lf.Waiting(operation=operation, timed_out=True, **{**common, "who": who})]
    match = _NOT_PASSED.search(line.text)
    if match is None:
        return []
    limit_s = int(match["ms"]) / 1000
    rank = line.who.rank if line.who.rank is not None else int(match["rank"])
    of_world = rank == int(match["rank"])  # else these are ranks of a smaller group
    common["who"] = line.who if line.who.rank is not None else lf.Who(rank=rank, host=line.who.host, pid=line.who.pid)
    waiting = lf.Waiting(operation=operation, timed_out=True, limit_s=limit_s, **common)
    late = (lf.Who(rank=at) if of_world else lf.Who(group="unknown", group_rank=at) for at in numbers(match["ranks"]))
    absent = [
        lf.Absent(operation=operation, waiters=(rank,), shown=lf.Shown.WORDS, **{**common, "who": who}) for who in late
    ]  # fmt: skip
    return [waiting, *absent]


def _parameters(line: Line) -> list[lf.Fact]:
    """Read how many parameters two ranks have. For a rank that ended, the number is 0 or random memory."""
    match = _PARAMETERS.search(line.text)
    if match is None or int(match["one"]) >= lf.MOST_RANKS or int(match["other"]) >= lf.MOST_RANKS:
        return []
    first, other = int(match["one"]), int(match["other"])
    count, others = int(match["count"]), int(match["others"])
    if not 0 < count < _MOST_PARAMETERS:
        return []
    if not 0 < others < _MOST_PARAMETERS:
        message = "another rank had ended when the models were compared"
        writer = line.who if line.who.rank is not None else lf.Who(rank=first, host=line.who.host, pid=line.who.pid)
        common = origin_of(line, writer)
        return [lf.Failed(type="RuntimeError", message=message, nature=lf.Nature.PEER_LOST, peers=(other,), **common)]
    sides = tuple(
        ((rank,), lf.Operation(op=_CONSTRUCTOR, group_words=f"a model with {size} parameters"))
        for rank, size in ((first, count), (other, others))
    )
    return [_differ(line, sides, "number")]


def _shapes(line: Line) -> list[lf.Fact]:
    """Read which parameter has another shape than on rank 0, or that Gloo got more bytes than it expected."""
    ranks = (line.who.rank,) if line.who.rank is not None else ()
    others: tuple[int, ...] = ()
    if (sizes := _SIZES.search(line.text)) is not None:
        others, words = (int(sizes["other"]),), f"a model whose parameter {sizes['number']} has"
        shape = tuple(map(int, re.findall(r"\d{1,18}", sizes["sizes"])))
        own = lf.Operation(op=_CONSTRUCTOR, group_words=f"{words} this shape", shape=shape)
        other = lf.Operation(op=_CONSTRUCTOR, group_words=f"{words} another shape")
    elif (lengths := _LENGTHS.search(line.text)) is not None:
        own = lf.Operation(op=f"a collective of {lengths['expected']} bytes")
        other = lf.Operation(op=f"a collective of {lengths['sent']} bytes")
    else:
        return []
    return [_differ(line, ((ranks, own), (others, other)), "shape")]


def _differ(line: Line, sides: tuple[tuple[tuple[int, ...], lf.Operation], ...], aspect: str) -> lf.Differ:
    return lf.Differ(sides=sides, aspect=aspect, **origin_of(line, lf.Who()))


_READERS = {
    "onitoredBarrier": _monitored_barrier,
    "DDP expects same model": _parameters,
    "appears not to match": _shapes,
    "op.preamble.length <= op.nbytes": _shapes,
    **dict.fromkeys(STORE_MARKS, _store_facts),
}


@dataclass(slots=True, eq=False)
class CollectiveErrorReader(LineReader):
    """Finds errors of collectives, of the store and of the rendezvous."""

    name = "errors of collectives"
    triggers = (
        b"rror", b"imeout", b"imed out", b"onitoredBarrier", b"server socket has failed", b"failed on SocketImpl",
        b"store based barrier", b"store-based barrier",
    )  # fmt: skip
    begins = (MARK, *_READERS)
    _holds: bool = False  # whether a fact waits for later lines that may add to it
    # By rank. A barrier that all ranks passed in the end is left out.
    _barriers: dict[int, list[lf.Fact]] = field(default_factory=dict)
    # The calls of ranks that reported a mismatch, and below those of ranks that only others report.
    _own: dict[int, lf.Operation] = field(default_factory=dict)
    _others: dict[int, lf.Operation] = field(default_factory=dict)
    _mismatch: Line | None = None  # the first line of a mismatch

    def read(self, line: Line) -> Iterable[lf.Fact]:
        text = line.text
        if self._holds and line.begins_run:
            return self.end()
        mark = next((mark for mark in self.begins if mark in text), None)
        if mark is None:
            return ()
        self._holds = self._holds or mark == MARK or mark in STORE_MARKS
        if mark == MARK:
            self._add_mismatch(line)
            return ()
        return self._barrier(line) if mark in STORE_MARKS and "barrier" in text else _READERS[mark](line)

    def end(self) -> Iterable[lf.Fact]:
        line, ordered = self._mismatch, group_alike({**self._others, **self._own})
        found: list[lf.Fact] = []
        if line is not None and len(ordered) > 1:
            calls = [operation for operation, _ in ordered]
            aspects: dict[str, set[object]] = {  # the first in which they differ counts
                "operation": {call.op for call in calls},
                "number": {call.seq for call in calls},
                "shape": {(call.shape, call.numel_in, call.numel_out) for call in calls},
                "dtype": {call.dtype for call in calls},
            }
            found.append(lf.Differ(
                spot=line.spot(), time=line.time, said=quote(line.text[line.text.find(MARK) - 9 :]),
                sides=tuple((ranks, operation) for operation, ranks in ordered),
                odd=odd_ranks([ranks for _, ranks in ordered]),
                aspect=next((aspect for aspect, values in aspects.items() if len(values) > 1), ""),
            ))  # fmt: skip
        found += [fact for facts in self._barriers.values() for fact in facts]
        self._own, self._others, self._mismatch, self._barriers, self._holds = {}, {}, None, {}, False
        return found

    def _add_mismatch(self, line: Line) -> None:
        calls = []
        for match in _CALL.finditer(line.text):
            op, dtype = op_type_name(match["op"]), dtype_name((match["dtypes"] or "").strip())
            seq = int(match["seq"] or -1)  # it counts from 0, all other sources from 1
            shapes = re.findall(r"\[([\d, ]*)\]", match["shape"] or "")
            shape = tuple(map(int, re.findall(r"\d{1,18}", shapes[0]))) if len(shapes) == 1 else None
            number = seq + 1 if 0 <= seq < 10**9 else None
            calls.append((int(match["rank"]), lf.Operation(op=op, seq=number, shape=shape, dtype=dtype)))
        if not calls or len(self._own) > _MOST_CALLS or any(rank >= lf.MOST_RANKS for rank, _ in calls):
            return
        self._mismatch = self._mismatch or line
        rank, operation = calls[0]
        self._own.setdefault(rank if line.who.rank is None else line.who.rank, operation)
        if line.who.rank in {None, rank}:  # else these are ranks of a smaller group
            for other, theirs in calls[1:]:
                self._others.setdefault(other, theirs)

    def _barrier(self, line: Line) -> list[lf.Fact]:
        """Read torch's barrier before 2.3: each rank counts itself and looks how many have come."""
        if (passed := _PASSED.search(line.text)) is not None:
            self._barriers.pop(int(passed["rank"]), None)
            return []
        match = _BARRIER.search(line.text)
        if match is None or int(match["world"]) >= lf.MOST_RANKS or int(match["rank"]) >= lf.MOST_RANKS:
            return []
        rank, world, count = int(match["rank"]), int(match["world"]), int(match["count"])
        common = origin_of(line, replace(line.who, rank=rank))
        late = match["how"].startswith("Timed out")
        parts = [int(part) for part in match["limit"].split(":") if part]  # "0:30:00"
        limit_s = float(sum(part * 60**power for power, part in enumerate(reversed(parts)))) if parts else None
        facts: list[lf.Fact] = [lf.Size(ranks=world, **common), _waiting(limit_s, timed_out=late, came=count, **common)]
        if count > world:
            many = f"{count} processes joined a job of {world}"
            problem = f"{many}: two jobs share one port, or ranks were started twice"
            fix = "give each job its own MASTER_PORT, and start each rank once"
            common["who"] = lf.Who(host=line.who.host)
            facts.append(lf.Trouble(kind="port", problem=problem, fix=fix, **common))
        self._barriers.pop(rank, None)
        if late or len(self._barriers) >= lf.MOST_RANKS:
            return facts
        self._barriers[rank] = facts
        return []
