"""The listening side of a node: it opens a port for each other node, and serves that node once.

If the given range has fewer free ports than there are sources, some sources share a port.

The kernel accepts connections at any time, and they are served one by one. A connection without the ticket is refused.
Only members of the job can read the ticket.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ddpdoctor.probes.rendezvous.connections import numeric_place
from ddpdoctor.probes.rendezvous.payloads import (
    ENOUGH,
    GO,
    HELLO_BYTES,
    NUMBER,
    TICKET_BYTES,
    Damaged,
    pack_hello,
    serve_payloads,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ddpdoctor.probes.rendezvous.payloads import PayloadLimits

BACKLOG = 128
"""Our choice: a source may retry from other ports, and sources may share a listener."""
MAX_WAITING = 256
"""Our choice: the most connections that have not sent a whole hello. More cannot all be sources of the mesh."""
TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PostsOpen:
    """What the sources need to know. Sent from one node to the others."""

    ports: dict[str, int]
    """The port for each source, by the source's number."""
    ticket: str
    """In hexadecimal digits."""
    error: str = ""
    """Why there are no ports, as a phrase."""


@dataclass(slots=True)
class LostTime:
    """The time lost on payloads that failed. A mesh of 512 nodes cannot wait for all of them."""

    limit_s: float
    spent_s: float = 0.0

    @property
    def enough(self) -> bool:
        """Whether to leave out all later payloads."""
        return self.spent_s >= self.limit_s


class Posts:
    """A context manager that listens for some sources and serves them from a thread."""

    def __init__(
        self,
        address: str,
        sources: Sequence[int],
        port_range: tuple[int, int] | None,
        pace: PayloadLimits,
        lost: LostTime,
    ) -> None:
        """Listen at a numeric address, on a port for each source. Errors are in ``published``."""
        self.served: set[int] = set()
        """Sources that were served, successfully or not."""
        self._ticket = os.urandom(TICKET_BYTES)
        self._pace, self._lost = pace, lost
        self._listeners: dict[int, socket.socket] = {}
        """The listening socket for each source."""
        self._waiting: dict[socket.socket, tuple[socket.socket, bytearray]] = {}
        """For each connection, its listening socket and the part of its hello received so far."""
        self._error = "" if address else "its own address is unknown"
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-mesh", daemon=True)
        try:
            for source in sources if address else ():
                self._listeners[source] = self._open(address, port_range)
        except OSError as error:
            self._error = f"it cannot listen on {address}: {error.strerror or error}"
            self._close_all()

    def _open(self, address: str, port_range: tuple[int, int] | None) -> socket.socket:
        """Return a new listening socket, or one of our open ones if all ports of the range are taken."""
        try:
            return _listen(address, port_range)
        except OSError as error:
            if port_range is None or error.errno != errno.EADDRINUSE or not self._listeners:
                raise
        open_ones = tuple(set(self._listeners.values()))
        return open_ones[len(self._listeners) % len(open_ones)]

    @property
    def published(self) -> PostsOpen:
        """What the sources need to know."""
        ports = {str(source): int(one.getsockname()[1]) for source, one in self._listeners.items()}
        return PostsOpen(ports=ports, ticket=self._ticket.hex(), error=self._error)

    def __enter__(self) -> Self:
        if self._listeners:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all sockets, even while a source is being served."""
        self._ended.set()
        for connection in (*self._waiting, *self._listeners.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _serve(self) -> None:
        try:
            for listener in set(self._listeners.values()):
                self._selector.register(listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                for key, _ in self._selector.select(TICK_S):
                    self._attend(cast("socket.socket", key.fileobj))
        finally:
            self._close_all()

    def _attend(self, ready: socket.socket) -> None:
        if ready in self._waiting:
            self._hear(ready)
        elif ready.fileno() >= 0:  # else it was dropped for another one of the same batch
            self._accept(ready)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the peer has closed it already, or descriptors have run out
            self._ended.wait(TICK_S)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop(next(iter(self._waiting)))
        connection.settimeout(0)
        self._waiting[connection] = (listener, bytearray())
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Read more of a hello. Serve the source once its hello is complete."""
        listener, hello = self._waiting[connection]
        try:
            part = connection.recv(HELLO_BYTES - len(hello))
        except OSError:
            part = b""
        hello += part
        if len(hello) < HELLO_BYTES and part:
            return
        source = self._source_of(bytes(hello), listener)
        if source is not None:
            self._selector.unregister(connection)
            self._serve_one(connection)
            self.served.add(source)
            self._selector.register(connection, selectors.EVENT_READ)
        self._drop(connection)

    def _source_of(self, hello: bytes, listener: socket.socket) -> int | None:
        """Return which source sent a hello, or None for a stranger or a source on another source's port."""
        if len(hello) < HELLO_BYTES:
            return None
        (number,) = NUMBER.unpack(hello[-NUMBER.size :])
        known = hmac.compare_digest(hello, pack_hello(self._ticket, number))
        return number if known and self._listeners.get(number) is listener else None

    def _serve_one(self, connection: socket.socket) -> None:
        started = time.monotonic()
        try:
            if self._lost.enough:
                connection.sendall(ENOUGH)
            else:
                connection.sendall(GO)
                serve_payloads(connection, self._pace)
        except (OSError, Damaged):
            # The source reports the failure. Here only the lost time is counted.
            self._lost.spent_s += time.monotonic() - started

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._waiting[connection]
        connection.close()

    def _close_all(self) -> None:
        for connection in (*self._waiting, *self._listeners.values()):
            connection.close()
        self._waiting.clear()
        self._listeners.clear()
        self._selector.close()


def _listen(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    family, place = numeric_place(address, 0)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        _bind(listener, place, port_range)
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener


def _bind(listener: socket.socket, place: tuple[Any, ...], port_range: tuple[int, int] | None) -> None:
    if port_range is None:
        listener.bind(place)
        return
    ports = range(port_range[0], port_range[1] + 1)
    # In random order, so that nodes on one host, and later runs, do not all begin at the same port.
    for port in random.sample(ports, len(ports)):
        try:
            listener.bind((place[0], port, *place[2:]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    raise OSError(errno.EADDRINUSE, f"no port of {ports[0]}-{ports[-1]} is free")
