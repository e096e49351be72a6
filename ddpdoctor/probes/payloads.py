"""The protocol of one connection of the mesh, for both ends.

The source sends a hello: ``MAGIC``, the target's ticket (16 bytes) and its own number (4 bytes, big-endian). The target
answers ``GO`` once it has time, or ``ENOUGH``. Then come payloads: parts, each after its length (4 bytes), and a length
of 0. The target answers each with the number of bytes and their CRC-32 (4 bytes each). The source closes.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import zlib
from dataclasses import dataclass, replace
from typing import Any

from ddpdoctor.exchange.reach import contact_of, describe
from ddpdoctor.model.launch import Contact, Transfer

MAGIC = b"DDPDmesh"
TICKET_BYTES = 16
NUMBER = struct.Struct("!I")
HELLO_BYTES = len(MAGIC) + TICKET_BYTES + NUMBER.size
GO, ENOUGH = b"g", b"e"
# One packet on any path: IPv4 guarantees 576 bytes (RFC 791). The IP and TCP headers take up to 60 bytes each.
SMALL_BYTES = 400
LARGE_BYTES = 4 * 2**20  # our choice: about 4 ms at 10 Gbit/s, of which TCP's slow start is a small part
# Our choice, also the least size of a large payload: two full packets of 9,000 bytes, or eleven of 1,500.
PART_BYTES = 16 * 2**10
LOOK_EVERY_S = 0.25
# Our choice: a large payload that took longer than ``FAST_S`` is sent again, until ``AGAIN_S`` have been spent.
FAST_S, AGAIN_S = 0.05, 0.5
# Our choice: it is sent again only if it is this much slower than the node's fastest payload. This is half of the
# factor that the rules call slow.
MUCH_SLOWER = 2.5
LONGEST_STALLS = 3  # our choice: a payload that makes progress may take this many times the stall limit
_PART = os.urandom(PART_BYTES)  # random bytes, so that nothing on the way can compress them
_ANSWER = struct.Struct("!II")
# Our choice: the most unsent bytes in the send buffer, so that a sender that stops is not busy for seconds more.
_UNSENT_BYTES = 128 * 2**10
# What the kernel counts since a connection was opened, and where it puts that.
_TCP_INFO = {
    "unacknowledged": struct.Struct("=24xI"),  # segments in flight now
    "retransmitted": struct.Struct("=100xI"),
    # Bytes acknowledged by the other side's kernel. The first packet of a connection counts as one.
    "delivered_bytes": struct.Struct("=120xQ"),
    "sent": struct.Struct("=156xI"),  # segments with data; since Linux 4.6
    # Segments sent again although they had arrived, as the other side reports (D-SACK, RFC 2883); since Linux 4.19
    "needless": struct.Struct("=216xI"),
}
_OF_TRANSFER = ("retransmitted", "sent", "needless")
_ASKED_BYTES = 256


class Damaged(Exception):  # noqa: N818 - says what it is
    """The received bytes differ from the sent ones. The message is a phrase."""


class TargetBusy(Exception):  # noqa: N818 - says what it is
    """The target did not serve this source in time. The message is a phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadLimits:
    """How long payloads may take."""

    stall_s: float
    send_s: float  # a large payload stops after this time, at any size: a slow link shows in a short payload too


def send_large(connection: socket.socket, pace: PayloadLimits, fastest: float) -> Transfer:
    """Send a large payload, and return it with the segments of all if it is sent again, of which the fastest counts.

    ``fastest`` is this node's best rate so far, in bytes per second.
    """
    # A slow one is sent again to distinguish a slow link from a process waiting for a CPU.
    before, started = read_tcp_counts(connection), time.monotonic()
    best = send_payload(connection, LARGE_BYTES, pace)
    while (
        best.contact is Contact.CONNECTED
        and (best.duration_s or 0.0) > FAST_S
        and (not fastest or rate_of(best) * MUCH_SLOWER < fastest)
        and time.monotonic() - started < min(AGAIN_S, pace.send_s)
    ):
        one_more = send_payload(connection, LARGE_BYTES, pace)
        best = max(best, one_more, key=rate_of) if one_more.contact is Contact.CONNECTED else one_more
    grown = _counts_since(connection, before)
    return replace(best, **{name: grown[name] for name in _OF_TRANSFER})


def rate_of(transfer: Transfer) -> float:
    whole = transfer.contact is Contact.CONNECTED
    return transfer.size_bytes / transfer.duration_s if whole and transfer.duration_s else 0.0


def send_payload(connection: socket.socket, size_bytes: int, pace: PayloadLimits) -> Transfer:
    """Send one payload of at most ``size_bytes`` and read the answer. A failure is part of the result."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    before, stream = read_tcp_counts(connection), StallWatch(connection, pace.stall_s)
    contact, error = Contact.CONNECTED, ""
    started, begun_bytes, crc = time.monotonic(), 0, 0
    try:
        connection.setblocking(False)  # noqa: FBT003 - its only argument
        while begun_bytes < size_bytes and (not begun_bytes or time.monotonic() - started < pace.send_s):
            part = memoryview(_PART)[: min(PART_BYTES, size_bytes - begun_bytes)]
            # Counted before sending, so that a stalled payload includes its last part.
            begun_bytes += len(part)
            stream.send(NUMBER.pack(len(part)) + part)
            crc = zlib.crc32(part, crc)
        stream.send(NUMBER.pack(0))
        if _ANSWER.unpack(stream.receive(_ANSWER.size)) != (begun_bytes, crc):
            contact, error = Contact.FAILED, "the data that arrived is not the data that was sent"
    except TimeoutError as stalled:
        contact, error = Contact.NO_ANSWER, str(stalled)
    except OSError as failed:
        contact, error = contact_of(failed), describe(failed)
    grown = _counts_since(connection, before)
    whole = contact is Contact.CONNECTED
    return Transfer(
        size_bytes=begun_bytes, contact=contact, error=error,
        duration_s=time.monotonic() - started if whole or contact is Contact.NO_ANSWER else None,
        delivered_bytes=None if whole else grown["delivered_bytes"], **{name: grown[name] for name in _OF_TRANSFER},
    )  # fmt: skip


def pack_hello(ticket: bytes, number: int) -> bytes:
    return MAGIC + ticket + NUMBER.pack(number)


def greet(connection: socket.socket, hello: bytes, stall_s: float, limit_s: float) -> bytes:
    """Return the target's answer to a hello: ``GO``, ``ENOUGH``, or b"" if it closed the connection.

    Raises ``TimeoutError`` if the target's kernel does not acknowledge the hello, and ``TargetBusy`` if it does but
    no answer comes.
    """
    connection.setblocking(False)  # noqa: FBT003 - its only argument
    connection.send(hello)
    started = acknowledged_at = time.monotonic()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while not poll.poll(LOOK_EVERY_S * 1000):
        now = time.monotonic()
        if not read_tcp_counts(connection)["unacknowledged"]:
            acknowledged_at = now
        if now - acknowledged_at > stall_s:
            raise TimeoutError
        if now - started > limit_s:
            raise TargetBusy(f"the target was busy with other nodes for {limit_s:.0f} s")
    return connection.recv(1)


class StallWatch:
    """Uses a connection as long as the other side's kernel acknowledges more. Raises ``TimeoutError``."""

    def __init__(self, connection: socket.socket, stall_s: float) -> None:
        self._connection, self._stall_s = connection, stall_s
        self._started = self._moved_at = time.monotonic()
        self._delivered = read_tcp_counts(connection)["delivered_bytes"]

    def send(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            self._wait(select.POLLOUT)
            left = left[self._connection.send(left) :]

    def receive(self, size_bytes: int) -> bytes:
        """Return this many bytes. Raises ``ConnectionResetError`` if the connection is closed before."""
        received = b""
        while len(received) < size_bytes:
            self._wait(select.POLLIN)
            part = self._connection.recv(size_bytes - len(received))
            if not part:
                raise ConnectionResetError("the other side closed the connection before it answered")
            received += part
        return received

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._connection, event)
        while not poll.poll(LOOK_EVERY_S * 1000):
            now, delivered = time.monotonic(), read_tcp_counts(self._connection)["delivered_bytes"]
            if delivered != self._delivered:
                self._delivered, self._moved_at = delivered, now
            if now - self._moved_at > self._stall_s:
                raise TimeoutError(f"no progress for {self._stall_s:g} s")
            if now - self._started > LONGEST_STALLS * self._stall_s:
                raise TimeoutError(f"it took more than {LONGEST_STALLS * self._stall_s:g} s")


def serve_payloads(connection: socket.socket, pace: PayloadLimits) -> None:
    """Answer payloads until the source closes. Raises ``OSError``, also if the source stalls, and ``Damaged``."""
    connection.settimeout(LONGEST_STALLS * pace.stall_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ends_at = time.monotonic() + 2 * LONGEST_STALLS * pace.stall_s
    buffer = bytearray(PART_BYTES)
    while time.monotonic() < ends_at:
        size_bytes, crc = 0, 0
        while (length := _take_length(connection, first=size_bytes == 0)) and time.monotonic() < ends_at:
            part = memoryview(buffer)[:length]
            _receive_into(connection, part)
            crc = zlib.crc32(part, crc)
            size_bytes += length
        if length is None:
            return
        connection.sendall(_ANSWER.pack(size_bytes % 2**32, crc))
    raise TimeoutError("the source takes too long")


def _take_length(connection: socket.socket, *, first: bool) -> int | None:
    raw = bytearray(NUMBER.size)
    taken = connection.recv_into(raw)
    if not taken and first:
        return None
    _receive_into(connection, memoryview(raw)[taken:])
    (length,) = NUMBER.unpack(raw)
    if length > PART_BYTES:
        raise Damaged("a part over the limit")
    return int(length)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        taken = connection.recv_into(view)
        if not taken:
            raise ConnectionResetError("the source closed the connection in the middle")
        view = view[taken:]


def read_tcp_counts(connection: socket.socket) -> dict[str, Any]:
    """Return the counts of a connection, even if the other side has closed it; None for what this kernel lacks."""
    try:
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ASKED_BYTES)
    except (OSError, AttributeError):  # not Linux, or this Python does not know the option
        raw = b""
    return {name: place.unpack_from(raw)[0] if len(raw) >= place.size else None for name, place in _TCP_INFO.items()}


def _counts_since(connection: socket.socket, before: dict[str, Any]) -> dict[str, Any]:
    both = {name: (before[name], now) for name, now in read_tcp_counts(connection).items()}
    return {name: None if None in pair else pair[1] - pair[0] for name, pair in both.items()}
