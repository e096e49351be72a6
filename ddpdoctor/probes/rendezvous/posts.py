"""A node's side that listens: a post is a port that is open for one other node, and serves it once.

Where a range of ports is given that has fewer free ones than there are sources, some share a port.

Connections are taken by the kernel whenever they come; one at a time is served. Whoever does not hold the ticket, which
is in the meeting where members of the job alone can read it, is turned away.
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

    from ddpdoctor.probes.rendezvous.payloads import Pace

BACKLOG = 128
"""Ours: a source tries again from other ports, and sources may share one."""
MAX_WAITING = 256
"""Ours: connections that have said nothing yet; more are no sources of ours."""
TICK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PostsOpen:
    """What the sources are told. Sent from one node to the others."""

    ports: dict[str, int]
    """By the number of the source."""
    ticket: str
    """In hexadecimal digits."""
    error: str = ""
    """Why there are none: a phrase."""


@dataclass(slots=True)
class Lost:
    """Time that went into payloads that did not get through: a mesh of 512 nodes cannot wait for every one of them."""

    limit_s: float
    spent_s: float = 0.0

    @property
    def enough(self) -> bool:
        """Whether what follows is to be left out."""
        return self.spent_s >= self.limit_s


class Posts:
    """A context: listens for some sources and serves them from a thread."""

    def __init__(
        self, address: str, sources: Sequence[int], port_range: tuple[int, int] | None, pace: Pace, lost: Lost
    ) -> None:
        """Listen at a numeric address, on a port for each source; what is in the way is told by ``told``."""
        self.served: set[int] = set()
        """Sources that were served, well or badly."""
        self._ticket = os.urandom(TICKET_BYTES)
        self._pace, self._lost = pace, lost
        self._listeners: dict[int, socket.socket] = {}
        """By source."""
        self._waiting: dict[socket.socket, tuple[socket.socket, bytearray]] = {}
        """By connection: where it came in, and what there is of its hello."""
        self._error = "" if address else "its own address cannot be told"
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
        """Return a listener of its own, or where all ports of the range are taken one of those that are open."""
        try:
            return _listen(address, port_range)
        except OSError as error:
            if port_range is None or error.errno != errno.EADDRINUSE or not self._listeners:
                raise
        open_ones = tuple(set(self._listeners.values()))
        return open_ones[len(self._listeners) % len(open_ones)]

    @property
    def told(self) -> PostsOpen:
        """What the sources must know."""
        ports = {str(source): int(one.getsockname()[1]) for source, one in self._listeners.items()}
        return PostsOpen(ports=ports, ticket=self._ticket.hex(), error=self._error)

    def __enter__(self) -> Self:
        """Start to serve."""
        if self._listeners:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close all; who is being served is cut off."""
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
        else:
            self._accept(ready)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it has hung up already, or descriptors have run out
            self._ended.wait(TICK_S)
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop(next(iter(self._waiting)))
        connection.settimeout(0)
        self._waiting[connection] = (listener, bytearray())
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Take what there is of a hello; a source that said it whole is served."""
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
        """Return who says a hello; None for a stranger, or a source at another one's post."""
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
            # The source tells what came of it. This is to know when it is enough.
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
    # In no order: nodes on one host, and those who come after, do not all begin at the same port.
    for port in random.sample(ports, len(ports)):
        try:
            listener.bind((place[0], port, *place[2:]))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return
    raise OSError(errno.EADDRINUSE, f"no port of {ports[0]}-{ports[-1]} is free")
