"""A small key-value server, for processes that share no store of their launcher.

The first member serves it from a thread. A peer must hold the job's token (see ``token``). It is dropped if it is slow,
sends garbage, or exceeds the limits. Values are kept as bytes and, except for counters, never parsed.

The server listens on all addresses of the host, as torch's own store does, because nobody knows yet which of them the
others can reach. If all processes are on one host, it listens on the loopback address only.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import selectors
import socket
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, cast

from ddpdoctor.exchange.protocol import BadRequest
from ddpdoctor.exchange.reach import describe
from ddpdoctor.exchange.requests import RequestHandler
from ddpdoctor.exchange.server_connection import ConnectionState, WrongToken
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpdoctor.exchange.heartbeats import Heartbeats

_TAKE, _CLOSE = b"t", b"x"
BACKLOG = 4096
"""The kernel limits it to net.core.somaxconn."""
MAX_PEERS = 8192
SPARED_FILES = 64
"""Our choice: file descriptors that connections must leave free, because this process also watches a job."""
KEEPALIVE_IDLE_S = 60
"""Our choice: with the kernel's nine probes, 75 s apart, a dead host is noticed after 12 minutes."""
TICK_S = 0.5
"""How often slow peers are dropped, and how long accepting pauses when file descriptors run out."""


class Server:
    """Serves from its creation until ``close``."""

    def __init__(
        self,
        port: int | None,
        token: bytes,
        *,
        one_host: bool = False,
        max_peers: int = MAX_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listen and start the thread; raises ``StoreError`` if the port cannot be used.

        Port 0 means any free port. With None it does not listen, and serves only this process (``admit``).
        """
        self.strangers = 0
        """The number of connections that did not hold the token."""
        self._token, self._clock, self._max_peers = token, clock, max_peers
        self._handler = RequestHandler()
        self._peers: dict[socket.socket, ConnectionState] = {}
        self._one_host = one_host
        self._listeners = [] if port is None else [_listen(port, one_host=one_host)]
        self.port = _port_of(self._listeners[0]) if self._listeners else 0
        self._selector = selectors.DefaultSelector()
        self._register_listeners()
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What other threads have this one do."""
        self._resume_at: float | None = None
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-server", daemon=True)
        self._thread.start()

    @property
    def heartbeats(self) -> Heartbeats:
        """The members' heartbeats, and the notice to them."""
        return self._handler.heartbeats

    def admit(self) -> socket.socket:
        """Return a connection from this process, which needs no port; raises ``StoreError`` if the server is closed."""
        ours, theirs = socket.socketpair()
        theirs.settimeout(0)
        self._hand_over(partial(self._add, ConnectionState.own(theirs, self._clock()), selectors.EVENT_READ))
        return ours

    def listen_also(self) -> int:
        """Listen on one more free port and return it. Raises ``StoreError``."""
        listener = _listen(0, one_host=self._one_host)
        port = _port_of(listener)
        self._hand_over(partial(self._add_listener, listener))
        return port

    def close(self) -> None:
        """Stop listening and close all connections."""
        with contextlib.suppress(OSError):
            self._wake.send(_CLOSE)
        self._thread.join(timeout=2)

    def _hand_over(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        try:
            self._wake.send(_TAKE)
        except OSError as error:
            raise StoreError("it has stopped serving") from error

    def _serve(self) -> None:
        try:
            while self._serve_once():
                self._drop_late(self._clock())
        finally:
            self._do_tasks()
            for connection in (*self._peers, *self._listeners, self._woken, self._wake):
                connection.close()
            self._selector.close()

    def _serve_once(self) -> bool:
        for key, mask in self._selector.select(TICK_S):
            connection = cast("socket.socket", key.fileobj)
            if connection is self._woken:
                if _CLOSE in self._woken.recv(64):
                    return False
                self._do_tasks()
            elif connection in self._listeners:
                self._accept(connection, self._clock())
            else:
                self._move(self._peers[connection], mask)
        return True

    def _do_tasks(self) -> None:
        while not self._tasks.empty():
            self._tasks.get()()

    def _add(self, peer: ConnectionState, event: int) -> None:
        self._peers[peer.connection] = peer
        self._selector.register(peer.connection, event)

    def _add_listener(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        if self._resume_at is None:
            self._selector.register(listener, selectors.EVENT_READ)

    def _register_listeners(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def _accept(self, listener: socket.socket, now_s: float) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:
            # Out of file descriptors: connections in the backlog are accepted when others have left.
            if self._resume_at is None:
                for one in self._listeners:
                    self._selector.unregister(one)
            self._resume_at = now_s + TICK_S
            return
        full = len(self._peers) >= self._max_peers or connection.fileno() >= _files() - SPARED_FILES
        if full and not self._drop_a_stranger():
            connection.close()
            return
        connection.settimeout(0)
        # A host that was switched off never closes its connection, which would stay here forever.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        self._add(ConnectionState(connection, self._token, now_s), selectors.EVENT_WRITE)

    def _drop_a_stranger(self) -> bool:
        """Drop the oldest connection without proof, so that strangers cannot keep members out."""
        stranger = next((peer for peer in self._peers.values() if not peer.proven), None)
        if stranger is not None:
            self._drop(stranger)
        return stranger is not None

    def _move(self, peer: ConnectionState, mask: int) -> None:
        now_s = self._clock()
        try:
            if mask & selectors.EVENT_WRITE:
                peer.send(now_s)
            elif not peer.receive(self._handler, now_s):
                self._drop(peer)
                return
        except BlockingIOError:
            return
        except (OSError, BadRequest) as error:
            self.strangers += isinstance(error, WrongToken)
            self._drop(peer)
            return
        wanted = selectors.EVENT_WRITE if peer.has_to_send else selectors.EVENT_READ
        self._selector.modify(peer.connection, wanted)

    def _drop_late(self, now_s: float) -> None:
        if self._resume_at is not None and now_s >= self._resume_at:
            self._register_listeners()
            self._resume_at = None
        for peer in [peer for peer in self._peers.values() if peer.deadline is not None and now_s > peer.deadline]:
            self._drop(peer)

    def _drop(self, peer: ConnectionState) -> None:
        self._selector.unregister(peer.connection)
        del self._peers[peer.connection]
        peer.connection.close()
        # A member that has reconnected beats over another connection.
        if peer.member is not None and all(other.member != peer.member for other in self._peers.values()):
            self.heartbeats.lose(peer.member)


def _port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _files() -> int:
    """Return how many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _listen(port: int, *, one_host: bool) -> socket.socket:
    """Return a listening socket, for both IPv6 and IPv4 if the host has both."""
    error: OSError | None = None
    for family, address in _addresses(one_host=one_host):
        try:
            return _listen_on(family, address, port)
        except OSError as failed:
            # Without IPv6, IPv4 is tried next. A port that is taken fails for both.
            error = failed
    assert error is not None
    raise StoreError(f"cannot listen on port {port}: {describe(error)}")


def _addresses(*, one_host: bool) -> Iterator[tuple[socket.AddressFamily, str]]:
    if one_host:
        yield socket.AF_INET, "127.0.0.1"
        return
    if socket.has_dualstack_ipv6():
        yield socket.AF_INET6, "::"
    yield socket.AF_INET, "0.0.0.0"  # noqa: S104 - see the module's docstring


def _listen_on(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Closed connections of an earlier run must not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(BACKLOG)
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener
