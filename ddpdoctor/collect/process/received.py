"""Reads how many bytes each TCP connection has received, from the kernel's socket diagnostics (sock_diag(7)).

/proc has no such counter: /proc/PID/io leaves out what a process receives through recv(2).
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301
"""NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH"""
_ESTABLISHED, _ASK_FOR_INFO, _INFO = 1 << 1, 1 << 1, 2
"""TCP_ESTABLISHED and INET_DIAG_INFO from include/uapi/linux/inet_diag.h."""
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_SIZE, _PORTS, _ADDRESS, _INODE = 72, 4, 24, 68
_RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in struct tcp_info, which exists since Linux 4.1."""
_LIMIT_S = 0.2
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """An established connection: its socket, its ends, and how much it has received."""

    inode: int
    local_port: int
    remote: str
    """"10.0.0.4:443"."""
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
    found: list[Received] = []
    while True:
        piece = asked.recv(_PIECE)
        at = 0
        while at + _HEADER.size <= len(piece):
            length, kind, *_ = _HEADER.unpack_from(piece, at)
            if kind != _SOCK_DIAG_BY_FAMILY or length < _HEADER.size:  # NLMSG_DONE, or an error
                return found
            found += _parse(piece[at + _HEADER.size : at + length], family)
            at += (length + 3) & ~3


def _parse(message: bytes, family: int) -> list[Received]:
    local_port, remote_port = struct.unpack_from("!HH", message, _PORTS)
    (inode,) = struct.unpack_from("=I", message, _INODE)
    size = 16 if family == socket.AF_INET6 else 4
    address = socket.inet_ntop(family, message[_ADDRESS : _ADDRESS + size])
    info = _info(message)
    if len(info) < _RECEIVED_AT + 8:
        return []
    (received,) = struct.unpack_from("=Q", info, _RECEIVED_AT)
    host = f"[{address}]" if ":" in address else address
    return [Received(inode=inode, local_port=local_port, remote=f"{host}:{remote_port}", size_bytes=received)]


def _info(message: bytes) -> bytes:
    at = _MESSAGE_SIZE
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        if kind == _INFO:
            return message[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return b""
