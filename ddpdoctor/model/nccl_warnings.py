"""What NCCL's warnings mean: whom they accuse, whether they are a consequence, and what to do. No I/O.

Texts are those of NCCL 2.7 to 2.30 (src/misc/socket.cc, src/bootstrap.cc, src/transport/net_ib*, src/init.cc,
src/misc/shmutils.cc). Numbers of source lines change with every release and are not looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Accused(Enum):
    """Whom a warning accuses."""

    PEER = "peer"  # The other end is gone. The process that warns is a victim.
    LINK = "link"  # the network between this host and another one
    HOST = "host"  # what this host offers to the network: an interface, an adapter, the fabric
    PROCESS = "process"  # the process itself: an error of its GPU's earlier work, or memory that ran out
    START = "start"  # how the job is started or installed: interface, version, shared memory, GPUs
    NOBODY = "nobody"  # it is worth a note and no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """How a family of warnings is to be read. ``words`` and ``fix`` may name groups of ``pattern`` in braces."""

    pattern: re.Pattern[str]
    accused: Accused
    words: str
    fix: str = ""  # empty: the table of known errors has it, or there is none
    kind: str = ""  # for ``START``: "shm", "version", "interface", "duplicate-gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclWarning:
    """One warning, understood."""

    accused: Accused
    words: str
    fix: str = ""
    kind: str = ""
    # What the text names: "address", "host", "local_rank", "device", "code".
    named: Mapping[str, str] = field(default_factory=dict)


FIND_FIRST = "look for what ended first on the other end: its error is the cause, and this one follows from it"
SHM_FIX = (
    "give /dev/shm more room (docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir of medium Memory)"
)
_REACH = (
    "open all ports between the hosts, or name an interface that the hosts share with NCCL_SOCKET_IFNAME; "
    "`ddpdoctor check-rendezvous` tests each pair"
)
_OTHER_INTERFACE = (
    "that address leads only to its own host: set NCCL_SOCKET_IFNAME on the host that gave it, to an interface that "
    "the hosts share"
)
_CABLE = "look at the adapter, cable and switch port (ibstat; rdma link; ip -s link show), and try NCCL_IB_DISABLE=1"
_CUDA = "find the first error of this process: run it with CUDA_LAUNCH_BLOCKING=1, and see dmesg for Xid"
_PEER = r"(?P<address>[0-9A-Fa-f.:]*[0-9A-Fa-f])(?:%\w+)?<(?P<port>\d+)>"
_NAMED_PEER = r"(?:(?P<host>[A-Za-z][\w.-]*)|(?P<address>[0-9A-Fa-f.:]*[0-9A-Fa-f])(?:%\w+)?)<(?P<port>\d+)>"
_STATUS = r"(?:status=(?:\w+\()?|with error )"
# Beginnings of addresses that lead only to their own host: loopback, docker0's default, link-local.
ONLY_LOCAL = ("127.", "172.17.", "::1", "169.254.")


def _rows() -> tuple[Meaning, ...]:
    def row(pattern: str, accused: Accused, words: str, fix: str = "", kind: str = "") -> Meaning:
        return Meaning(pattern=re.compile(pattern), accused=accused, words=words, fix=fix, kind=kind)

    peer, link, host = Accused.PEER, Accused.LINK, Accused.HOST
    process, start, nobody = Accused.PROCESS, Accused.START, Accused.NOBODY
    return (
        # the other end is gone
        row(r"Connection closed by localRank (?P<local_rank>\d+)", peer,
            "local rank {local_rank} of this host closed its connection", FIND_FIRST),
        row(rf"(?:[Cc]onnection closed by|closed by) remote peer {_NAMED_PEER}", peer, "{peer} closed the connection",
            FIND_FIRST),
        row(r"[Cc]onnection closed by remote peer(?: (?P<host>[\w.-]+))?", peer, "the other end closed the connection",
            FIND_FIRST),
        row(rf"Call to (?:recv|send|read|write)\w* (?:from|to) {_NAMED_PEER} failed : (?P<error>[^,(]+)", peer,
            "the connection to {peer} is lost: {error}", FIND_FIRST),
        row(r"Call to (?:recv|send|read|write)\w*(?: from| to)? ?.{0,80}failed : "
            r"(?P<error>Broken pipe|Connection reset by peer|Connection timed out)", peer,
            "a connection is lost: {error}", FIND_FIRST),
        row(r"Socket recv failed while polling for opId", peer, "a connection within this host is lost", FIND_FIRST),
        row(r"[Pp]roxy (?:Call|Connect|Service).{0,80}(?:failed|closed)|Could not receive type from localRank", peer,
            "a connection within this host is lost", FIND_FIRST),
        # the process itself
        row(r"Cuda failure (?:2 )?'out of memory'|Failed to CUDA (?:host )?[mc]alloc(?: async)? (?P<bytes>-?\d+) bytes"
            r"|CUDA(?:_ERROR)?_OUT_OF_MEMORY", process, "its GPU has no memory left for NCCL", kind="memory"),
        row(r"Cuda failure (?:\d+ )?'(?P<error>(?:driver shutting down|context is destroyed)[^']*)'", nobody,
            "CUDA was being shut down: {error}"),
        row(r"Cuda failure (?:(?P<code>\d+) )?'(?P<error>[^']+)'", process, "CUDA error: {error}", _CUDA),
        # a link
        row(rf"[Cc]onnect to {_PEER} (?:failed ?:? |returned (?:\d+ ?\()?)(?P<error>No route to host|Network is "
            r"unreachable|Connection refused|(?:Connection )?timed out|Software caused connection abort"
            r"|Host is down|Connection reset by peer)", link, "it cannot connect to {address}: {error}", _REACH),
        row(rf"[Cc]onnect to {_PEER} (?:failed ?:? |returned )(?P<error>[^,]+)", link,
            "it cannot connect to {address}: {error}", _REACH),
        row(r"[Ss]ocket\w*: (?:exceeded (?:timeouts|retries)|connect\w* .{0,80}exceeded (?:timeouts|retries))", link,
            "its connections are not answered", _REACH),
        row(rf"Got completion from peer {_NAMED_PEER} .{{0,40}}?{_STATUS}5\b", peer,
            "work on the connection to {peer} was flushed after an earlier error", FIND_FIRST),
        row(rf"Got completion from peer {_NAMED_PEER} .{{0,40}}?{_STATUS}12\b.*", link,
            "{peer} does not answer over InfiniBand or RoCE (status 12: retries used up){hca}",
            "see whether that host and its process live; then the link: ibstat, ibdiagnet, switch counters, for RoCE "
            "PFC and NCCL_IB_GID_INDEX; NCCL_IB_DISABLE=1 to confirm"),
        row(rf"Got completion from peer {_NAMED_PEER} .{{0,40}}?{_STATUS}(?P<code>4|10)\b.*", host,
            "its adapter may not reach the memory (status {code}: protection error, peer {peer}){hca}",
            "switch PCIe ACS and the IOMMU off or to pass-through, or NCCL_NET_GDR_LEVEL=LOC (no GPUDirect) "
            "to confirm"),
        row(rf"Got completion from peer {_NAMED_PEER} .{{0,40}}?{_STATUS}(?P<code>\d+)\b.*", link,
            "InfiniBand or RoCE to {peer} failed (status {code}){hca}", _CABLE),
        row(rf"Got completion .{{0,60}}?{_STATUS}5\b", peer, "InfiniBand work was flushed after an earlier error",
            FIND_FIRST),
        row(rf"Got completion .{{0,60}}?{_STATUS}(?P<code>\d+)\b", link, "InfiniBand or RoCE failed (status {code})",
            _CABLE),
        # this host
        row(r"NET/IB ?: ?(?P<device>[\w.:-]+?)(?::\d+)? (?:async fatal event(?: on QP)?|Got async (?:error )?event)"
            r"[^:]*: (?P<error>[^\n]+)", host, "its adapter {device} reports: {error}", _CABLE),
        row(r"Got async (?:error )?event ?: (?P<error>GID table change|client reregistration|LID change)", nobody,
            "an adapter reports: {error}"),
        row(r"Got async (?:error )?event ?: (?P<error>[^\n]+)", host, "an adapter reports: {error}", _CABLE),
        row(r"NET/IB ?: Unable to open device (?P<device>[\w.-]+)", host, "it cannot open the adapter {device}",
            "give the container its RDMA devices (docker run --device=/dev/infiniband --ulimit memlock=-1), and unset "
            "NCCL_IGNORE_NET_MISMATCH"),
        row(r"Failed to bind NVLink SHARP|NVLS (?:multicast|init|rank).{0,80}fail"
            r"|Failed to (?:bind|create|import) .{0,20}[Mm]ulticast", host, "NVLink SHARP (NVLS) cannot be set up",
            "sudo systemctl restart nvidia-fabricmanager, and see its log; NCCL_NVLS_ENABLE=0 to confirm"),
        row(r"Call to ibv_modify_qp failed(?: with)?(?: error)?:? ?(?P<error>[^\n]*)", host,
            "a queue pair of its InfiniBand or RoCE adapter cannot be connected: {error}"),
        row(r"Call to (?:ibv_\w+|mlx5dv_\w+) failed(?: with)?(?: error)?:? ?(?P<error>[^\n]*Cannot allocate memory.*)",
            host, "a call to its InfiniBand or RoCE adapter failed: {error}",
            "`ddpdoctor check-env memlock` and dmesg; ulimit -l must be unlimited"),
        row(r"Call to (?:ibv_\w+|mlx5dv_\w+) failed(?: with)?(?: error)?:? ?(?P<error>[^\n]*)", host,
            "a call to its InfiniBand or RoCE adapter failed: {error}",
            "dmesg and `ibstat` of that host; `ddpdoctor check-env memlock`; NCCL_IB_DISABLE=1 to confirm"),
        # start and installation
        row(r"[Nn]o socket interface found|Failed to find (?:an )?interface|No interface found", start,
            "NCCL found no interface that it may use: NCCL_SOCKET_IFNAME names none of this host",
            "set NCCL_SOCKET_IFNAME to an interface of this host (ip -br address), or unset it; `ddpdoctor check-env "
            "ifname-exists`", "interface"),
        row(r"attaching to shared memory segment (?P<path>/dev/shm/\S+).*?: No such file or directory"
            r"|failed to open (?P<segment>/dev/shm/\S+).*No such file or directory", host,
            "a shared memory segment of another process is not there: No such file or directory"),
        row(r"(?:/dev/shm|shared memory|posix_fallocate).*No space left on device|failed to extend /dev/shm"
            r"|Error while (?:creating|attaching to) shared memory segment|Call to posix_fallocate failed"
            r"|Error: failed to extend", start, "shared memory (/dev/shm) has no room for NCCL", SHM_FIX, "shm"),
        row(r"[Mm]ismatched NCCL version detected", start, "ranks use different versions of NCCL", "", "version"),
        row(r"Duplicate GPU detected(?: ?: rank (?P<rank>\d{1,7}) and rank (?P<other>\d{1,7}))?"
            r"|Multiple Ranks are using the same GPU", start, "two ranks use one GPU", "", "duplicate-gpu"),
        row(r"Too many open files", start, "the limit of open files is reached",
            "ulimit -n 65536; `ddpdoctor check-env nofile`", "limit"),
        row(r"(?P<error>ranks? has already checked in|mismatch in rank count from procs)", start,
            "processes joined with the same rank, or with different numbers of ranks", "", "rank-twice"),
        # worth a note
        row(r"Message truncated ?: received (?P<got>\d+) bytes instead of (?P<size>\d+)", nobody,
            "a message of {got} bytes came where {size} were expected: ranks made different calls"),
        row(r"may be hanging, this may be caused by a collective mismatch around rank (?P<rank>\d+)", nobody,
            "NCCL suspects different calls around rank {rank} of a communicator"),
    )  # fmt: skip


MEANINGS = _rows()  # the first that matches counts


def read_warning(text: str) -> NcclWarning | None:
    """Return what a warning of NCCL means, or None if it is not in the table."""
    for meaning in MEANINGS:
        found = meaning.pattern.search(text)
        if found is not None:
            named = {name: value.strip() for name, value in found.groupdict().items() if value}
            if "address" in named:
                named["address"] = plain_address(named["address"])
            hca = re.search(r"\bhca (\S+)", text)
            fills = {"error": "", **named, "peer": named.get("host") or named.get("address", "another host")}
            fills["hca"] = f", adapter {hca[1]}" if hca else ""
            fix = meaning.fix
            if meaning.accused is Accused.LINK and named.get("address", "").startswith(ONLY_LOCAL):
                fix = _OTHER_INTERFACE
            words = meaning.words.format_map(fills).rstrip(": ")
            return NcclWarning(accused=meaning.accused, words=words, fix=fix, kind=meaning.kind, named=named)
    return None


def plain_address(text: str) -> str:
    """Return "10.0.0.2" for "::ffff:10.0.0.2", and other addresses as they are."""
    return text.removeprefix("::ffff:") if "." in text else text
