"""Reaches a server that may not be up yet, and says in words what was in the way when it cannot be reached."""

from __future__ import annotations

import errno
import os
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.reaching import Connecting, Contact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BY_ERRNO = {
    errno.ECONNREFUSED: Contact.REFUSED,
    errno.ECONNRESET: Contact.RESET,
    errno.ECONNABORTED: Contact.RESET,
    errno.EPIPE: Contact.RESET,
    errno.EHOSTUNREACH: Contact.UNREACHABLE,
    errno.ENETUNREACH: Contact.UNREACHABLE,
    errno.EACCES: Contact.UNREACHABLE,
    # What connect() returns where this host's own packet filter drops the packet on its way out.
    errno.EPERM: Contact.UNREACHABLE,
    errno.ETIMEDOUT: Contact.NO_ANSWER,
}


def contact_of(error: OSError) -> Contact:
    """Return how a connection failed, after its name was resolved."""
    if isinstance(error, TimeoutError):
        return Contact.NO_ANSWER
    # A connection that ends in the middle of an answer has words of ours and no number.
    return _BY_ERRNO.get(error.errno or 0, Contact.RESET if isinstance(error, ConnectionError) else Contact.FAILED)


Made = TypeVar("Made")

LOOKUP_LIMIT_S = 5.0
"""Ours: what one look-up of a name may take; glibc's default is 5 s a server."""
CONNECT_LIMIT_S = 3.0
"""Ours: one attempt. A packet that a firewall drops is sent again after 1 s and 3 s."""
SAFE_SEGMENT_BYTES = 1200
"""With its headers within 1,280 bytes, which every link of IPv6 carries (RFC 8200, 5)."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to the host, or a firewall rejects it",
    errno.ENETUNREACH: "the network is unreachable from here",
    errno.ECONNRESET: "connection reset",
}

Failures = dict[str, Connecting]
"""The last failure at each place: an address with its port, or a name that does not resolve."""


class Refused(Exception):  # noqa: N818 - what a server did
    """A server answered, and is not the one that was looked for: a phrase."""


def reach(
    hosts: Sequence[str],
    port: int,
    limit_s: float,
    greet: Callable[[socket.socket], Made],
    seen: Failures | None = None,
) -> Made:
    """Connect to the first of some hosts that answers and that ``greet`` takes; return what ``greet`` made of it.

    ``greet`` owns the connection once it returns, which is never None, and raises ``Refused`` or OSError for the wrong
    server. Tried again until the limit: the server may still be starting. Raises ``StoreError`` with the last failure
    at each address; ``seen`` is kept up to date with them meanwhile.
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
        # No last attempt for which no time is left: it would hide what the former has seen.
        if left_s <= pause_s:
            raise StoreError(f"tried for {time.monotonic() - started:.0f} s; {tell(failures)}")
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
        try:
            return _try_address(family, address, min(left_s, CONNECT_LIMIT_S), greet)
        except (OSError, Refused) as error:
            contact = Contact.NO_STORE if isinstance(error, Refused) else contact_of(error)
            fail(_place(host, address), str(address[0]), contact, error)
    return None


def _try_address(
    family: socket.AddressFamily, address: Any, limit_s: float, greet: Callable[[socket.socket], Made]
) -> Made:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(limit_s)
        # Both sides keep to it. What travels here is to arrive where large packets vanish too, and say so.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SAFE_SEGMENT_BYTES)
        connection.connect(address)
        return greet(connection)
    except BaseException:
        connection.close()
        raise


def receive(connection: socket.socket, length: int) -> bytes:
    """Return so many bytes; raises OSError, also where the other side hangs up before."""
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the other side hung up")
        data += part
    return bytes(data)


def look_up(host: str, port: int, limit_s: float) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the addresses of a name, each once; raises OSError, also where no answer comes in time."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # A daemon: a look-up cannot be stopped, and one that hangs must not keep the process.
    threading.Thread(target=ask, name="ddpdoctor-lookup", daemon=True).start()
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError(f"no answer from the name server within {limit_s:.0f} s") from None
    if isinstance(answer, UnicodeError):
        raise OSError(errno.EINVAL, "it is no host name")
    if isinstance(answer, OSError):
        raise answer
    return list(dict.fromkeys((entry[0], entry[4]) for entry in answer))


def describe(error: Exception) -> str:
    """Return a failure as a phrase."""
    if isinstance(error, TimeoutError) and not error.errno:
        return str(error) if "name server" in str(error) else "no answer, as where a firewall drops packets"
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    if isinstance(error, OSError) and error.errno:
        return _WORDS.get(error.errno, os.strerror(error.errno))
    return str(error) or type(error).__name__


def tell(failures: Failures) -> str:
    """Return failures as a phrase."""
    # Read from another thread than the one that tries.
    return "; ".join(f"{place}: {_words(failure)}" for place, failure in list(failures.items()))


def _words(failure: Connecting) -> str:
    unresolved = failure.contact is Contact.UNRESOLVED
    return f"the name does not resolve ({failure.error})" if unresolved else failure.error


def _place(host: str, address: Any) -> str:
    number, port = address[:2]
    shown = f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
    return shown if host == number else f"{shown} ({host})"
