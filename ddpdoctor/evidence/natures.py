"""Tells from the text of an error who caused it: the rank itself, a lost peer, a time limit, the launcher."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import MOST_RANKS, Nature
from ddpdoctor.model.known_errors import find_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.known_errors import KnownError
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What an error's type, text and traceback say."""

    nature: Nature
    peers: tuple[int, ...] = ()
    """Ranks that the error names as lost or late. Ranks of the default group are global ranks."""
    peer_hosts: tuple[str, ...] = ()
    memory: bool = False
    in_worker: bool = False
    known: KnownError | None = None
    """The row of the table of known errors, if that decided."""


_STOPPED = re.compile(
    r"Process \d+ got signal: (?:1|2|15)\b|got signal: Signals\.SIG(?:HUP|INT|TERM)|\bReceived SIGTERM\b"
)
_STOPPED_TYPES = frozenset(("KeyboardInterrupt", "SignalException", "SIGTERMException"))
_FOLLOWS_TYPES = frozenset((
    "ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "RendezvousClosedError",
    "RendezvousGracefulExitError", "RayTaskError", "ActorDiedError", "RayActorError", "TrainingFailedError",
    "TrainingWorkerError", "GeneratorExit",
))  # fmt: skip
_FOLLOWS = re.compile(
    r"Detected mismatch between collectives on ranks"
    r"|DDP expects same model across all ranks|appears not to match (?:sizes|strides) of the same param in process"
    r"|op\.preamble\.length <= op\.nbytes|Received data size doesn't match expected size"
    r"|[Mm]ore than 1 ?EB memory"
    r"|(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate|deepspeed)\b.*returned non-zero exit status"
)
"""Ranks that tell of a difference between ranks, and launchers that tell of a rank, are not where it began."""
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
_DISTRIBUTED = re.compile(
    r"gloo|pair\.cc|[Nn][Cc][Cc][Ll]|c10d|SocketImpl|TCPStore|ProcessGroup|store->|failed to recv, got|\[Rank \d+\]"
)
"""A peer is a rank only where torch speaks of it. A download may lose its peer too."""
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
    if name in _STOPPED_TYPES or _STOPPED.search(message):
        return Reading(nature=Nature.STOPPED)
    in_worker = bool(_WORKER.search(message))
    if name in _FOLLOWS_TYPES or _FOLLOWS.search(message) or _is_torn_pipe(name, frames):
        return Reading(nature=Nature.FOLLOWS, in_worker=in_worker)
    if name in _MEMORY_TYPES or _MEMORY.search(message):
        return Reading(nature=Nature.OWN, memory=True, in_worker=in_worker)
    if name in _TIMED_OUT_TYPES or _TIMED_OUT.search(message):
        return Reading(nature=Nature.TIMED_OUT, peers=_peers(message), peer_hosts=peer_hosts(message))
    if _PEER_LOST.search(message) and _is_distributed(name, message, frames):
        return Reading(nature=Nature.PEER_LOST, peers=_peers(message), peer_hosts=peer_hosts(message))
    known = find_known(": ".join(filter(None, (name, message))))
    nature = _NATURES.get(known.nature, Nature.OWN) if known is not None else Nature.OWN
    if nature in {Nature.PEER_LOST, Nature.TIMED_OUT}:
        return Reading(nature=nature, peers=_peers(message), peer_hosts=peer_hosts(message), known=known)
    return Reading(nature=nature, in_worker=in_worker, known=known)


_NATURES = {**{nature.value: nature for nature in Nature}, "link": Nature.PEER_LOST}
"""What the table of known errors says of an error."""


def peer_hosts(message: str) -> tuple[str, ...]:
    """Return the hosts or addresses that a text names as lost, except the host that wrote it."""
    found = (match["host"] or match["remote"] for match in _PEER_ADDRESS.finditer(message))
    return tuple(dict.fromkeys(host for host in found if not host.startswith(_LOCAL)))


def numbers(text: str) -> tuple[int, ...]:
    """Return the ranks in a list such as "1, 2". Impossible ranks are left out."""
    return tuple(number for number in map(int, re.findall(r"\d{1,12}", text)) if number < MOST_RANKS)


def _peers(message: str) -> tuple[int, ...]:
    """Return the ranks that an error names. A "[Rank 2]" at its beginning is the rank that reports the error."""
    return tuple(dict.fromkeys(rank for match in _PEER_RANKS.finditer(message) for rank in _others(match, message)))


def _others(match: re.Match[str], message: str) -> tuple[int, ...]:
    speaks = message[match.start() - 1 : match.start()] == "[" or "successfully reached" in message[match.end() :][:30]
    return () if speaks else numbers(match[1])


def _is_torn_pipe(name: str, frames: Sequence[Frame]) -> bool:
    """Return whether a helper process lost its parent, or a parent its helper, in a pipe of multiprocessing."""
    return name in _PIPE_TYPES and bool(frames) and bool(_PIPES.search(frames[-1].file))


def _is_distributed(name: str, message: str, frames: Sequence[Frame]) -> bool:
    if name.startswith("Dist") or _DISTRIBUTED.search(message):
        return True
    return any("torch/distributed/" in frame.file.replace("\\", "/") for frame in frames[-3:])
