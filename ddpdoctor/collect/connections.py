"""Reads TCP connections: which addresses a process uses, which do not get their data through, what each has received.

Sent data stay in the send queue until the peer acknowledges them, and the kernel counts its retries, which
distinguishes a dead link from a slow reader. /proc/PID/io leaves out recv(2); the kernel's socket diagnostics
(sock_diag(7)) have it.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.collect.proc import list_pids, read_link, read_text
from ddpdoctor.model.facts import Connection, Connections

PROC = Path("/proc")
ESTABLISHED, ASKING, TIME_WAIT, LISTENING = "01", "02", "06", "0A"  # the states in include/net/tcp_states.h that we use
MOST_STALLED = 16
MOST_LISTENING = 256
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
_ESTABLISHED, _ASK_FOR_INFO, _INFO = 1 << 1, 1 << 1, 2  # include/uapi/linux/inet_diag.h
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_SIZE, _PORTS, _ADDRESS, _INODE = 72, 4, 24, 68
_RECEIVED_AT = 128  # offset of tcpi_bytes_received in struct tcp_info, which exists since Linux 4.1
_LIMIT_S = 0.2
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """A TCP connection, or a listening socket."""

    inode: int
    uid: int
    state: str
    local: str
    remote: str
    unsent_bytes: int
    retries: int

    @property
    def port(self) -> int:
        return int(self.local.rpartition(":")[2])


def read_rows(pid: int | str, proc: Path = PROC) -> tuple[Socket, ...]:
    """Return the TCP sockets in the network namespace of a process; "" is this one.

    A line is "sl local remote state tx:rx timer:when retries uid timeout inode"; queues and retries are hexadecimal.
    """
    found = []
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, read_text(proc / str(pid) / "net" / table).splitlines()[1:]):
            local, remote = (parse_end(fields[1]), parse_end(fields[2])) if len(fields) > 9 else (None, None)
            if local is not None and remote is not None:
                row = Socket(
                    inode=int(fields[9]), uid=int(fields[7]), state=fields[3], local=local, remote=remote,
                    unsent_bytes=int(fields[4].partition(":")[0], 16), retries=int(fields[6], 16),
                )  # fmt: skip
                found.append(row)
    return tuple(found)


def read_connections(pid: int, rows: tuple[Socket, ...], proc: Path = PROC) -> Connections | None:
    """Return the connections of one process, or None if we may not read its open files."""
    inodes = read_sockets(pid, proc)
    if inodes is None:
        return None
    mine = [row for row in rows if row.inode in inodes]
    own = [row for row in mine if row.state == ESTABLISHED]
    stalled = [
        Connection(local=row.local, remote=row.remote, unsent_bytes=row.unsent_bytes, retries=row.retries)
        for row in own
        if row.unsent_bytes and row.retries
    ][:MOST_STALLED]
    unanswered = tuple(row.remote for row in mine if row.state == ASKING)[:MOST_STALLED]
    listening = tuple(row.local for row in rows if row.state == LISTENING)[:MOST_LISTENING]
    hosts, ends = Counter(row.local.rpartition(":")[0] for row in own).most_common(), tuple(row.local for row in own)
    return Connections(
        by_address=tuple(hosts), ends=ends, stalled=tuple(stalled), unanswered=unanswered, listening=listening
    )


def find_listener(remote: str, rows: tuple[Socket, ...]) -> int | None:
    """Return the pid that listens at a connection's remote end, or None if that is elsewhere or not visible."""
    if all(row.local != remote for row in rows):
        return None
    port = int(remote.rpartition(":")[2])
    inodes = {row.inode for row in rows if row.state == LISTENING and row.port == port}
    pids = list_pids(PROC) if inodes else ()
    return next((pid for pid in pids if inodes & (read_sockets(pid) or frozenset())), None)


def read_sockets(pid: int, proc: Path = PROC) -> frozenset[int] | None:
    """Return the inodes of a process's sockets, or None if we may not read its open files."""
    folder = proc / str(pid) / "fd"
    try:
        links = [read_link(folder / name) for name in os.listdir(folder)]  # noqa: PTH208 - only names are needed
    except OSError:
        return None
    return frozenset(int(match[1]) for match in map(_SOCKET.match, links) if match)


def parse_end(text: str) -> str | None:
    """Return "10.0.0.4:29500" for "0400000A:733C" (words in the machine's byte order), or None for no address."""
    host, _, port = text.partition(":")
    try:
        raw = bytes.fromhex(host)
        if sys.byteorder == "little":
            raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
        ip = ipaddress.ip_address(raw)
        number = int(port, 16)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address):
        return f"{ip.ipv4_mapped}:{number}" if ip.ipv4_mapped else f"[{ip}]:{number}"
    return f"{ip}:{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An established connection: its socket, its ends, and how much it has received."""

    inode: int
    local_port: int
    remote: str  # "10.0.0.4:443"
    size_bytes: int


def read_received() -> tuple[Received, ...]:
    """Return the connections of this network namespace, or () if the kernel does not say."""
    found: list[Received] = []
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asked:
            asked.settimeout(_LIMIT_S)
            for family in (socket.AF_INET, socket.AF_INET6):
                found += _dump(asked, family)
    except (OSError, struct.error):
        return ()
    return tuple(found)


def _dump(asked: socket.socket, family: int) -> list[Received]:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, _ASK_FOR_INFO, _ESTABLISHED)
    size = _HEADER.size + len(request)
    asked.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0) + request)
    connections: list[Received] = []
    while True:
        piece = asked.recv(_PIECE)
        at = 0
        while at + _HEADER.size <= len(piece):
            length, kind, *_ = _HEADER.unpack_from(piece, at)
            if kind != _SOCK_DIAG_BY_FAMILY or length < _HEADER.size:  # NLMSG_DONE, or an error
                return connections
            connections += _parse(piece[at + _HEADER.size : at + length], family)
            at += (length + 3) & ~3


def _parse(message: bytes, family: int) -> list[Received]:
    local_port, remote_port = struct.unpack_from("!HH", message, _PORTS)
    (inode,) = struct.unpack_from("=I", message, _INODE)
    size = 16 if family == socket.AF_INET6 else 4
    address = socket.inet_ntop(family, message[_ADDRESS : _ADDRESS + size])
    info, at = b"", _MESSAGE_SIZE
    while not info and at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        info = message[at + _ATTRIBUTE.size : at + length] if kind == _INFO else b""
        at += (length + 3) & ~3
    if len(info) < _RECEIVED_AT + 8:
        return []
    (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    host = f"[{address}]" if ":" in address else address
    return [Received(inode=inode, local_port=local_port, remote=f"{host}:{remote_port}", size_bytes=received)]
