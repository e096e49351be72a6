"""Reads the kernel's counters of a TCP connection (struct tcp_info of linux/tcp.h, whose fields never move)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

_UNACKED = struct.Struct("=24xI")
_TOTAL_RETRANS = struct.Struct("=100xI")
_BYTES_ACKED = struct.Struct("=120xQ")
_DATA_SEGS_OUT = struct.Struct("=156xI")
"""Since Linux 4.6."""
_DSACK_DUPS = struct.Struct("=216xI")
"""Since Linux 4.19."""
_ASKED_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpCounts:
    """Counts since the connection was opened. None means that this kernel does not report it."""

    unacknowledged: int | None
    """Segments in flight now."""
    retransmitted: int | None
    delivered_bytes: int | None
    """Bytes acknowledged by the other side's kernel. The first packet of a connection counts as one."""
    sent: int | None
    """Segments with data that were sent."""
    needless: int | None
    """Segments that were sent again although they had arrived, as the other side reports (D-SACK, RFC 2883)."""


def read_tcp_counts(connection: socket.socket) -> TcpCounts:
    """Return the counts of a connection, even if the other side has closed it."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES)
    except (OSError, AttributeError):  # not Linux, or this Python does not know the option
        raw = b""
    return TcpCounts(
        unacknowledged=_number(_UNACKED, raw),
        retransmitted=_number(_TOTAL_RETRANS, raw),
        delivered_bytes=_number(_BYTES_ACKED, raw),
        sent=_number(_DATA_SEGS_OUT, raw),
        needless=_number(_DSACK_DUPS, raw),
    )


def _number(place: struct.Struct, raw: bytes) -> int | None:
    return int(place.unpack_from(raw)[0]) if len(raw) >= place.size else None
