"""Serves this process's ``KeyValues`` over TCP, for processes without a store of their launcher.

It listens on all addresses, as torch's own store does, because it does not know which of them the others can reach; on
the loopback address only if all processes are on one host. It works on plain sockets, because that limits what a
peer can take: 64 bytes before the proof, and a total for all unfinished requests. Without a token any peer can pass for
a member, so the same limits apply to members. An error ends only its own connection.
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
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.exchange import wire
from ddpdoctor.exchange.reach import describe
from ddpdoctor.exchange.store import KeyValues, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

MAX_PEERS = 8192
BACKLOG = 4096  # the kernel limits it to net.core.somaxconn
# Our choice: file descriptors that connections must leave free, because this process also watches a job.
SPARED_FILES = 64
# Our choice: with the kernel's nine probes, 75 s apart, a host that was switched off is noticed after 12 minutes.
KEEPALIVE_IDLE_S = 60
PROOF_LIMIT_S = 10.0  # our choice: the time that a new connection has to prove the token
REQUEST_LIMIT_S = 20.0  # our choice: the time in which a started request must arrive whole, and its answer must be read
# Our choice: after this time without a request, a proven connection gives up its place if another one needs it. A
# member sends beats over a connection of its own, and reconnects for its next request.
IDLE_LIMIT_S = 30.0
# Our choice: what all requests that have not arrived whole may hold together. Beyond it the oldest of them goes.
MAX_UNFINISHED_BYTES = 64 * 2**20
PIECE_BYTES = 64 * 1024
LOOK_EVERY_S = 0.5  # how often deadlines are looked at
REST_S = 0.25  # our choice: the pause after an error of accept, most often because the process has no file left


@dataclass(slots=True, eq=False)
class ConnectedPeer:
    """One connection."""

    connection: socket.socket
    address: str
    deadline_s: float | None  # when it is dropped unless it moves on; None while no request is under way
    active_s: float
    proven: bool = False
    member: str | None = None  # the member that beats over it
    held_bytes: int = 0  # how much of an unfinished request has arrived


class Server:
    """Serves from its creation until ``close``."""

    def __init__(
        self, port: int | None, token: bytes, *, one_host: bool = False, max_peers: int = MAX_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Listen and start the thread; raises ``StoreError`` if the port cannot be used.

        Port 0 means any free port. With None it does not listen until ``listen``.
        """
        self.values = KeyValues()
        self.strangers = 0
        """The number of connections that did not hold the token."""
        self.port = 0
        self.peers: dict[ConnectedPeer, None] = {}
        """All connections, the oldest first."""
        self._held_bytes = 0
        self._token, self._one_host, self._max_peers, self._clock = token, one_host, max_peers, clock
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda *_: None)  # a task's error is no news for the user's terminal
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ddpdoctor-server", daemon=True)
        if port is not None:
            self.port = self.listen(port)
        self._loop.call_soon(lambda: self._begin(self._look_at_deadlines()))
        self._thread.start()

    def listen(self, port: int = 0) -> int:
        """Listen on a port, for both IPv6 and IPv4 if the host has both, and return it. Raises ``StoreError``."""
        address, both = ("127.0.0.1" if self._one_host else ""), not self._one_host and socket.has_dualstack_ipv6()
        for family in (socket.AF_INET6, socket.AF_INET) if both else (socket.AF_INET,):
            try:  # without IPv6, IPv4 is tried next; a port that is taken fails for both
                is_both = family is socket.AF_INET6
                listener = socket.create_server((address, port), family=family, dualstack_ipv6=is_both)
            except OSError as error:
                failed = describe(error)
                continue
            listener.setblocking(False)  # noqa: FBT003 - the only form that socket has
            self._loop.call_soon_threadsafe(self._begin, self._accept(listener))
            return int(listener.getsockname()[1])
        raise StoreError(f"cannot listen on port {port}: {failed}")

    def close(self) -> None:
        self.values.ended = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            self._thread.join(timeout=2)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself would not keep it
        task.add_done_callback(self._tasks.discard)

    async def _end(self) -> None:
        for task in (tasks := set(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.stop()

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    connection, (address, *_) = await self._loop.sock_accept(listener)
                    now_s = self._clock()
                    peer = ConnectedPeer(connection, address, deadline_s=now_s + PROOF_LIMIT_S, active_s=now_s)
                    if self._has_room(peer):
                        self.peers[peer] = None
                        self._begin(self._serve(peer))
                    else:
                        connection.close()
                    await asyncio.sleep(0)  # accept does not wait while more connections come
                except Exception:  # noqa: BLE001 - no connection may end this
                    await asyncio.sleep(REST_S)

    def _has_room(self, new: ConnectedPeer) -> bool:
        """Return whether a new connection is accepted. If all places are taken, another one may be dropped for it."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = sys.maxsize if soft == resource.RLIM_INFINITY else soft
        if len(self.peers) < self._max_peers and new.connection.fileno() < files - SPARED_FILES:
            return True
        victim = next((peer for peer in self.peers if not peer.proven), None)
        if victim is None:
            # Without a token anyone can prove itself: then one address must not keep the others out.
            address, count = max(Counter(peer.address for peer in self.peers).items(), key=lambda item: item[1])
            greedy = count > len(self.peers) / 2 and address != new.address
            late_s = new.active_s - IDLE_LIMIT_S
            idle = (peer for peer in self.peers if peer.member is None and peer.deadline_s is None)
            asked = (peer for peer in self.peers if peer.address == address) if greedy else idle
            victim = min(asked, key=lambda peer: peer.active_s, default=None)
            if victim is None or not (greedy or victim.active_s <= late_s):
                return False
        self._drop(victim)
        return True

    def _drop(self, peer: ConnectedPeer) -> None:
        """Hang up. Its task, which may be about to read from it, closes it."""
        self.peers.pop(peer, None)
        self._held_bytes -= peer.held_bytes
        peer.held_bytes = 0
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)

    async def _look_at_deadlines(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now_s = self._clock()
            for peer in list(self.peers):
                if peer.deadline_s is not None and now_s >= peer.deadline_s:
                    self._drop(peer)

    async def _serve(self, peer: ConnectedPeer) -> None:
        connection = peer.connection
        try:
            connection.setblocking(False)  # noqa: FBT003 - the only form that socket has
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ours = os.urandom(wire.NONCE_BYTES)
            await self._loop.sock_sendall(connection, wire.HELLO + ours)
            theirs, proof = await self._read(peer, wire.NONCE_BYTES), await self._read(peer, wire.PROOF_BYTES)
            if not hmac.compare_digest(proof, wire.prove(self._token, b"client", ours, theirs)):
                self.strangers += 1
                return
            await self._loop.sock_sendall(connection, wire.prove(self._token, b"server", ours, theirs))
            peer.proven = True
            while peer in self.peers:
                peer.deadline_s = None
                first = await self._loop.sock_recv(connection, 1)
                if not first:
                    return
                peer.active_s = self._clock()
                peer.deadline_s = peer.active_s + REQUEST_LIMIT_S  # one for all of it, however it drips in
                (length,) = wire.LENGTH.unpack(first + await self._read(peer, wire.LENGTH.size - 1))
                if length > wire.MAX_REQUEST_BYTES:
                    return
                found, peer.member = wire.answer(self.values, await self._read(peer, length), peer.member)
                await self._loop.sock_sendall(connection, wire.LENGTH.pack(len(found)) + found[:PIECE_BYTES])
                if len(found) > PIECE_BYTES:
                    await self._loop.sock_sendall(connection, memoryview(found)[PIECE_BYTES:])
                await asyncio.sleep(0)  # one that always has the next request ready must not keep the others waiting
        except (OSError, EOFError, wire.BadRequest):
            pass
        except Exception:  # noqa: BLE001, S110 - whatever a peer sends, only its own connection ends
            pass
        finally:
            self.peers.pop(peer, None)
            if peer.member is not None and all(other.member != peer.member for other in self.peers):
                self.values.lose(peer.member)  # else it has reconnected
            connection.close()

    async def _read(self, peer: ConnectedPeer, length: int) -> bytes:
        """Return the next bytes of a peer, of which no more than these are read. Raises OSError or ``EOFError``."""
        data = bytearray()
        try:
            while len(data) < length:
                piece = await self._loop.sock_recv(peer.connection, min(PIECE_BYTES, length - len(data)))
                if not piece or peer not in self.peers:
                    raise EOFError
                data += piece
                peer.held_bytes += len(piece)
                self._held_bytes += len(piece)
                if self._held_bytes > MAX_UNFINISHED_BYTES:
                    holders = (peer for peer in self.peers if peer.held_bytes > PIECE_BYTES)
                    self._drop(min(holders, key=lambda holder: holder.active_s, default=peer))
                await asyncio.sleep(0)
            return bytes(data)
        finally:
            self._held_bytes -= peer.held_bytes
            peer.held_bytes = 0
