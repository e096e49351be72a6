"""Connects to a server that may not be up yet, and describes why it cannot be reached."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.launch import Connecting, Contact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# How a connection failed, and our words for it; without any, those of the system.
_BY_ERRNO = {
    errno.ECONNREFUSED: (Contact.REFUSED, "connection refused"),
    errno.ECONNRESET: (Contact.RESET, "connection reset"),
    errno.ECONNABORTED: (Contact.RESET, ""),
    errno.EPIPE: (Contact.RESET, ""),
    errno.EHOSTUNREACH: (Contact.UNREACHABLE, "no route to the host, or a firewall rejects it"),
    errno.ENETUNREACH: (Contact.UNREACHABLE, "the network is unreachable from here"),
    errno.EACCES: (Contact.UNREACHABLE, ""),
    # connect() fails with this if this host's own packet filter drops the outgoing packet.
    errno.EPERM: (Contact.UNREACHABLE, ""),
    errno.ETIMEDOUT: (Contact.NO_ANSWER, ""),
}


def contact_of(error: OSError) -> Contact:
    """Return how a connection failed, after its name was resolved."""
    if isinstance(error, TimeoutError):
        return Contact.NO_ANSWER
    # ``receive`` raises a ConnectionError without errno if the connection ends in the middle of an answer.
    other = Contact.RESET if isinstance(error, ConnectionError) else Contact.FAILED
    return _BY_ERRNO.get(error.errno or 0, (other, ""))[0]


Made = TypeVar("Made")

LOOKUP_LIMIT_S = 5.0  # our choice: the limit of one name lookup; glibc's default is 5 s a name server
# Our choice: the limit of one attempt. A packet that a firewall drops is sent again after 1 s and 3 s.
CONNECT_LIMIT_S = 3.0
SAFE_SEGMENT_BYTES = 1200  # with headers this fits into 1,280 bytes, which every IPv6 link carries (RFC 8200, 5)
# Our choice: the most that one call of recv makes room for, whatever length the other side has announced.
MAX_PIECE_BYTES = 256 * 1024
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0

# The last failure at each place: an address with its port, or a name that does not resolve.
Failures = dict[str, Connecting]


class WrongServer(Exception):  # noqa: N818 - what a server did
    """A server answered, but it is the wrong one. The text is a phrase."""


def reach(
    hosts: Sequence[str],
    port: int,
    limit_s: float,
    greet: Callable[[socket.socket], Made],
    seen: Failures | None = None,
) -> Made:
    """Connect to the first host that answers and that ``greet`` accepts; return the result of ``greet``.

    ``greet`` owns the connection once it returns. It never returns None, and raises ``WrongServer`` or OSError for the
    wrong server. Attempts repeat until the limit, because the server may still be starting. Raises ``StoreError`` with
    the last failure at each address; meanwhile ``seen`` is kept up to date with them.
    """
    started = time.monotonic()
    pause_s = FIRST_PAUSE_S
    failures = {} if seen is None else seen
    while True:
        for host in hosts:
            left_s = started + limit_s - time.monotonic()
            made = _try_host(host, port, max(left_s, FIRST_PAUSE_S), greet, failures)
            if made is not None:
                return made
        left_s = started + limit_s - time.monotonic()
        # Do not start an attempt without time for it: its failure would hide the previous, real one.
        if left_s <= pause_s:
            raise StoreError(f"tried for {time.monotonic() - started:.0f} s; {describe_failures(failures)}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


def _try_host(
    host: str, port: int, left_s: float, greet: Callable[[socket.socket], Made], failures: Failures
) -> Made | None:
    began_s = time.monotonic()

    def fail(place: str, address: str | None, contact: Contact, error: Exception) -> None:
        failures[place] = Connecting(
            host=host, address=address, port=port, contact=contact, error=describe(error),
            duration_s=time.monotonic() - began_s,
        )  # fmt: skip

    try:
        addresses = look_up(host, port, min(left_s, LOOKUP_LIMIT_S))
    except OSError as error:
        fail(f"{host}:{port}", None, Contact.UNRESOLVED, error)
        return None
    failures.pop(f"{host}:{port}", None)
    for family, address in addresses:
        address_left_s = max(began_s + left_s - time.monotonic(), FIRST_PAUSE_S)
        try:
            with ExitStack() as opened:
                connection = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
                connection.settimeout(min(address_left_s, CONNECT_LIMIT_S))
                # Both sides keep to this size, so that ddpdoctor can still report a network that loses large packets.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SAFE_SEGMENT_BYTES)
                connection.connect(address)
                made = greet(connection)
                opened.pop_all()
        except (OSError, WrongServer) as error:
            contact = Contact.NO_STORE if isinstance(error, WrongServer) else contact_of(error)
            own, own_port = address[:2]
            place = f"[{own}]:{own_port}" if ":" in own else f"{own}:{own_port}"
            fail(place if host == own else f"{place} ({host})", str(own), contact, error)
        else:
            return made
    return None


def receive(connection: socket.socket, length: int) -> bytes:
    """Receive exactly ``length`` bytes; raises OSError, also if the other side closes the connection first.

    The connection's time limit holds for all of them, so a byte now and then does not help the other side.
    """
    data, limit_s = bytearray(), connection.gettimeout()
    deadline = None if limit_s is None else time.monotonic() + limit_s
    try:
        while len(data) < length:
            if deadline is not None and data:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(min(length - len(data), MAX_PIECE_BYTES))
            if not part:
                raise ConnectionError("the other side closed the connection")
            data += part
        return bytes(data)
    finally:
        connection.settimeout(limit_s)


def look_up(host: str, port: int, limit_s: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the addresses of a name without duplicates; raises OSError, also if no answer comes in time."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # A daemon thread: a lookup cannot be stopped, and one that hangs must not keep the process alive.
    threading.Thread(target=ask, name="ddpdoctor-lookup", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer from the name server within {limit_s:.0f} s") from None
    if isinstance(answer, UnicodeError):
        raise OSError(errno.EINVAL, "it is not a host name")
    if isinstance(answer, OSError):
        raise answer
    return list(dict.fromkeys((entry[0], entry[4]) for entry in answer))


def describe(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not error.errno:
        return str(error) if "name server" in str(error) else "no answer; a firewall may drop the packets"
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return _BY_ERRNO.get(error.errno, (None, ""))[1] or os.strerror(error.errno)
    return str(error) or type(error).__name__


def describe_failures(failures: Failures) -> str:
    # Another thread may be adding failures, so copy them first.
    words = (
        f"{place}: the name does not resolve ({failure.error})" if failure.contact is Contact.UNRESOLVED
        else f"{place}: {failure.error}"
        for place, failure in list(failures.items())
    )  # fmt: skip
    return "; ".join(words)
