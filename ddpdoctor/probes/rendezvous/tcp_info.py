"""What the kernel counts of one TCP connection (struct tcp_info of linux/tcp.h; a field once there never moves)."""

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
    """Since the connection was begun; None where this kernel does not say."""

    unacknowledged: int | None
    """Segments under way now."""
    retransmitted: int | None
    delivered_bytes: int | None
    """Acknowledged by the other side's kernel; the first packet of a connection counts for one."""
    sent: int | None
    """Segments with data."""
    needless: int | None
    """Segments that were sent again though they had arrived, by the other side's word (D-SACK, RFC 2883)."""


def read_tcp_counts(connection: socket.socket) -> TcpCounts:
    """Return the counts of a connection, closed by the other side or not."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES)
    except (OSError, AttributeError):  # a kernel of another make, and a Python that does not know the option
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
