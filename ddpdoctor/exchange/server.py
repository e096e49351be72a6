"""Serves this process's ``Values`` over TCP, for processes that share no store of their launcher.

A peer must hold the job's token. It is dropped if it is slow, sends garbage, or exceeds the limits. Values are kept as
bytes and, except for counters, never parsed. The server listens on all addresses of the host, as torch's own store
does, because nobody knows yet which of them the others can reach. If all processes are on one host, it listens on the
loopback address only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import resource
import socket
import sys
import threading
from typing import TYPE_CHECKING

from ddpdoctor.exchange.reach import describe
from ddpdoctor.exchange.store import StoreError, Values
from ddpdoctor.exchange.wire import (
    HELLO,
    LENGTH,
    MAX_REQUEST_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    BadRequest,
    answer,
    prove,
    with_length,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PEERS = 8192
BACKLOG = 4096
"""The kernel limits it to net.core.somaxconn."""
SPARED_FILES = 64
"""Our choice: file descriptors that connections must leave free, because this process also watches a job."""
KEEPALIVE_IDLE_S = 60
"""Our choice: with the kernel's nine probes, 75 s apart, a host that was switched off is noticed after 12 minutes."""
PROOF_LIMIT_S = 10.0
"""Our choice: the time that a new connection has to prove the token."""
REQUEST_LIMIT_S = 20.0
"""Our choice: the time in which a started request must arrive whole, and its answer must be read."""


class Server:
    """Serves from its creation until ``close``."""

    def __init__(
        self, port: int | None, token: bytes, *, one_host: bool = False, max_peers: int = MAX_PEERS,
        proof_limit_s: float = PROOF_LIMIT_S, request_limit_s: float = REQUEST_LIMIT_S,
    ) -> None:  # fmt: skip
        """Listen and start the thread; raises ``StoreError`` if the port cannot be used.

        Port 0 means any free port. With None it does not listen until ``listen_also``.
        """
        self.values = Values()
        self.strangers = 0
        """The number of connections that did not hold the token."""
        self.port = 0
        self.peers: dict[asyncio.StreamWriter, str | None] = {}
        """The proven connections, and the member that beats over each."""
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        self._token, self._one_host, self._max_peers = token, one_host, max_peers
        self._proof_limit_s, self._request_limit_s = proof_limit_s, request_limit_s
        self._loop = asyncio.new_event_loop()
        # While the process has no file left for a connection, asyncio rests for a second, and says so for each.
        self._loop.set_exception_handler(lambda *_: None)
        self._thread = threading.Thread(target=self._loop.run_forever, name="ddpdoctor-server", daemon=True)
        if port is not None:
            self.port = self._serve_on(_listen(port, one_host=one_host))
        self._thread.start()

    def listen_also(self) -> int:
        """Listen on one more free port and return it. Raises ``StoreError``."""
        return self._serve_on(_listen(0, one_host=self._one_host))

    def close(self) -> None:
        """Stop listening and close all connections."""
        self.values.ended = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(timeout=2)

    def _serve_on(self, listener: socket.socket) -> int:
        asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, sock=listener, backlog=BACKLOG), self._loop
        )  # fmt: skip
        return int(listener.getsockname()[1])

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        try:
            if not self._has_room(writer):
                return
            self._unproven[writer] = None
            with self._limit(writer, self._proof_limit_s):
                await self._hear_proof(reader, writer)
            del self._unproven[writer]
            self.peers[writer] = None
            while first := await reader.read(1):
                with self._limit(writer, self._request_limit_s):  # one limit for all of it, however it drips in
                    (length,) = LENGTH.unpack(first + await reader.readexactly(LENGTH.size - 1))
                    if length > MAX_REQUEST_BYTES:
                        return
                    found, member = answer(self.values, await reader.readexactly(length))
                    self.peers[writer] = member or self.peers[writer]
                    writer.write(with_length(found))
                    await writer.drain()
        except (OSError, EOFError, BadRequest):
            pass
        finally:
            self._unproven.pop(writer, None)
            member = self.peers.pop(writer, None)
            if member is not None and member not in self.peers.values():  # else it has reconnected
                self.values.lose(member)
            writer.transport.abort()

    def _has_room(self, writer: asyncio.StreamWriter) -> bool:
        """Return whether a new connection is taken. Strangers cannot keep members out: the oldest of them goes."""
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        if len(self.peers) + len(self._unproven) < self._max_peers and connection.fileno() < files - SPARED_FILES:
            return True
        stranger = next(iter(self._unproven), None)
        if stranger is not None:
            del self._unproven[stranger]
            stranger.transport.abort()
        return stranger is not None

    async def _hear_proof(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours = os.urandom(NONCE_BYTES)
        writer.write(HELLO + ours)
        theirs = await reader.readexactly(NONCE_BYTES)
        if not hmac.compare_digest(
            await reader.readexactly(PROOF_BYTES), prove(self._token, b"client", ours, theirs)
        ):  # fmt: skip
            self.strangers += 1
            raise BadRequest("it does not have this job's token")
        writer.write(prove(self._token, b"server", ours, theirs))

    @contextlib.contextmanager
    def _limit(self, writer: asyncio.StreamWriter, seconds: float) -> Iterator[None]:
        """Drop a connection that is still in this context after some seconds."""
        timer = self._loop.call_later(seconds, writer.transport.abort)
        try:
            yield
        finally:
            timer.cancel()


def _listen(port: int, *, one_host: bool) -> socket.socket:
    """Return a listening socket, for both IPv6 and IPv4 if the host has both; raises ``StoreError``."""
    address, both = ("127.0.0.1" if one_host else ""), not one_host and socket.has_dualstack_ipv6()
    for family in (socket.AF_INET6, socket.AF_INET) if both else (socket.AF_INET,):
        try:  # without IPv6, IPv4 is tried next; a port that is taken fails for both
            return socket.create_server((address, port), family=family, dualstack_ipv6=family is socket.AF_INET6)
        except OSError as error:
            failed = describe(error)
    raise StoreError(f"cannot listen on port {port}: {failed}")
