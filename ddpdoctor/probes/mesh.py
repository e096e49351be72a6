"""Tests every ordered pair of nodes: a connection to a port opened for that pair, with a small and a large payload.

In round d, every node sends to the node d places after it and serves the one d before. None waits for a round to end: a
stalled pair delays only its two ends. Many connections are opened in parallel, because a dropped one takes seconds.
Keys in the store: ``posts/BLOCK/NUMBER`` has the ports of a node, ``pairs/BLOCK/NUMBER`` its results.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import random
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ddpdoctor.exchange.reach import contact_of, describe
from ddpdoctor.model.launch import Connecting, Contact, NodePair
from ddpdoctor.probes import payloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import Publication, Transfer

Kind = TypeVar("Kind")
# Our choice: time limit of the whole mesh, and how much it grows per node. Four healthy nodes take some tenths of a
# second, 512 take half a minute.
BASE_S, NODE_S = 30.0, 0.25
AT_ONCE_S = 1.0  # our choice: nodes that open their ports within this time are visited first
# Our choice: a node that has not opened its ports after this time, plus this much per node, counts as absent.
PATIENCE_S, PATIENCE_NODE_S = 8.0, 0.15
COLLECT_S = 5.0  # our choice: how long after the time limit to wait for the others' results
# Our choice: a node gives up after losing the time of this many stalled payloads. Later pairs are left out and say so.
FAILURES = 4
# Our choice: how long a slow node may send a large payload: at most, at least, and all its payloads together.
LONGEST_SEND_S, LEAST_SEND_S, ALL_SENDS_S = 1.0, 0.05, 30.0
LOOK_EVERY_S = 0.02
# Our choice: rounds whose ports are opened at once. A round needs three descriptors, and a shell usually allows 1,024
# per process.
BLOCK = 64
BACKLOG = 128  # our choice: a source may retry from other ports, and sources may share a listener
# Our choice: the most connections that have not sent a whole hello. More cannot all be sources of the mesh.
MAX_WAITING = 256
TICK_S = 0.2
SOURCE_FAILS = "too many payloads from the source had stalled"
TARGET_FAILS = "too many payloads to the target had stalled"
NO_TIME = "the time for the mesh ran out"
# SO_LINGER: drop unsent data and send a reset. It is a small packet, which passes even if large ones do not.
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
TRY_AGAIN_S = 0.5  # our choice: longer than any round trip between hosts that train together


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLimits:
    """The time limits and ports of the mesh."""

    connect_s: float = 3.0
    # A payload without progress for this long has stalled. TCP retransmits after 0.2, 0.6, 1.4 and 3 s.
    stall_s: float = 4.0
    total_s: float | None = None  # None means a limit based on the number of nodes
    # The range of ports to listen on, both ends included, or None for any free port.
    port_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResults:
    """A node's results for its targets in one block. Sent to the first node."""

    pairs: tuple[NodePair, ...]


def run_mesh(
    conversation: Conversation, own: int, publications: Sequence[Publication], limits: MeshLimits
) -> tuple[NodePair, ...]:
    """Run the part of the node with the number ``own``. Return all pairs on the first node, the own ones on the others.

    All nodes call this at about the same time, with equal publications and a conversation for this alone. Raises
    ``StoreError`` if the store is lost. A record that cannot be read counts as not received.
    """
    mesh = _Mesh(conversation, own, publications, limits)
    blocks = blocks_of(len(publications))
    pairs = [pair for number, rounds in enumerate(blocks) for pair in mesh.run_block(number, rounds)]
    return mesh.collect(pairs, blocks) if mesh.place == 0 else tuple(pairs)


class _Mesh:
    def __init__(
        self, conversation: Conversation, own: int, publications: Sequence[Publication], limits: MeshLimits
    ) -> None:
        self._conversation, self._publications, self._limits = conversation, publications, limits
        self._count = count = len(publications)
        self.place = next(place for place, publication in enumerate(publications) if publication.number == own)
        total_s = limits.total_s if limits.total_s is not None else BASE_S + NODE_S * count
        self._deadline = time.monotonic() + total_s
        send_s = min(LONGEST_SEND_S, max(LEAST_SEND_S, ALL_SENDS_S / count))
        self._pace = pace = payloads.PayloadLimits(stall_s=limits.stall_s, send_s=send_s)
        self._lost, lost = (LostTime(limit_s=FAILURES * limits.stall_s) for _ in range(2))  # as target, as source
        self._visitor = Visitor(own, connect_s=limits.connect_s, pace=pace, lost=lost, deadline=self._deadline)

    def run_block(self, block: int, rounds: range) -> tuple[NodePair, ...]:
        own = self._publications[self.place]
        places, sending_places = partners_of(self.place, rounds, self._count)
        targets = [self._publications[place] for place in places]
        sources = [self._publications[place].number for place in sending_places]
        patience = min(time.monotonic() + PATIENCE_S + PATIENCE_NODE_S * self._count, self._deadline)
        with Posts(own.address, sources, self._limits.port_range, self._pace, self._lost) as posts:
            self._conversation.send(f"posts/{block}/{own.number}", posts.published)
            pairs = self._visit(block, targets, patience)
            self._conversation.send(f"pairs/{block}/{own.number}", PairResults(pairs=pairs))
            # Listen until each source was served, has posted its results without coming, or is absent
            left = set(sources if posts.published.ports else [])
            while left and time.monotonic() < self._deadline:
                left = {peer for peer in left - posts.served if not self._conversation.has(f"pairs/{block}/{peer}")}
                if time.monotonic() > patience:
                    left = {peer for peer in left if self._conversation.has(f"posts/{block}/{peer}")}
                if left:
                    time.sleep(LOOK_EVERY_S)
        return pairs

    def _visit(self, block: int, targets: Sequence[Publication], patience: float) -> tuple[NodePair, ...]:
        """Visit the targets that are ready first, then the late ones, so that no node waits for a dead one."""
        seen: list[NodePair] = []
        late = list(targets)
        for deadline in (min(time.monotonic() + AT_ONCE_S, patience), patience):
            heard = self._hear(PostsOpen, f"posts/{block}", [publication.number for publication in late], deadline)
            there = [publication for publication in late if publication.number in heard]
            seen += self._visitor.visit([self._target(publication, heard[publication.number]) for publication in there])
            late = [publication for publication in late if publication.number not in heard]
        return (*seen, *self._visitor.visit([self._target(publication, None) for publication in late]))

    def _target(self, publication: Publication, posts: PostsOpen | None) -> Target:
        if posts is None:
            return Target(publication=publication, port=0, ticket=b"", obstacle="it did not report its ports")
        port, ticket = posts.ports.get(str(self._publications[self.place].number), 0), b""
        with contextlib.suppress(ValueError):
            ticket = bytes.fromhex(posts.ticket)
        obstacle = posts.error or ("" if port else "it opened no port for this node")
        return Target(publication=publication, port=port, ticket=ticket, obstacle=obstacle)

    def collect(self, own: Sequence[NodePair], blocks: Sequence[range]) -> tuple[NodePair, ...]:
        """Return the pairs of all nodes, also those without a result, with the reason."""
        pairs = {(pair.source, pair.target): pair for pair in own}
        numbers = (publication.number for publication in self._publications[1:])
        there = [number for number in numbers if self._conversation.has(f"posts/0/{number}")]
        for block in range(len(blocks)):
            for number, found in self._hear(PairResults, f"pairs/{block}", there, self._deadline + COLLECT_S).items():
                said = found.pairs if found is not None else ()
                pairs |= {(number, pair.target): pair for pair in said if pair.source == number}
        return tuple(
            pairs.get((source.number, target.number))
            or NodePair(
                source=source.number, target=target.number, address=target.address, port=0,
                interface=target.interface, skipped="the source did not report its results",
            )
            for source, target in permutations(self._publications, 2)
        )  # fmt: skip

    def _hear(self, kind: type[Kind], key: str, numbers: Sequence[int], deadline: float) -> dict[int, Kind | None]:
        """Return the nodes' records by number. A record that cannot be read is None, and a late one is missing."""
        bad: dict[int, Kind | None] = {}
        heard = self._conversation.gather(
            kind, key, lambda: numbers, deadline - time.monotonic(), on_bad=lambda number, _: bad.update({number: None})
        )
        return bad | heard


def blocks_of(count: int) -> tuple[range, ...]:
    return tuple(range(first, min(first + BLOCK, count)) for first in range(1, count, BLOCK))


def partners_of(place: int, rounds: range, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the places to which the one at ``place`` sends, and those that send to it, in the order of the rounds."""
    return tuple((place + step) % count for step in rounds), tuple((place - step) % count for step in rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostsOpen:
    """What the sources need to know. Sent from one node to the others."""

    ports: dict[str, int]  # the port for each source, by the source's number
    ticket: str  # in hexadecimal digits
    error: str = ""  # why there are no ports, as a phrase


@dataclass(slots=True)
class LostTime:
    """The time lost on payloads that failed. A mesh of 512 nodes cannot wait for all of them."""

    limit_s: float
    spent_s: float = 0.0

    @property
    def enough(self) -> bool:
        return self.spent_s >= self.limit_s


class Posts:
    """A context manager that listens for some sources and serves them from a thread."""

    def __init__(
        self,
        address: str,
        sources: Sequence[int],
        port_range: tuple[int, int] | None,
        pace: payloads.PayloadLimits,
        lost: LostTime,
    ) -> None:
        """Listen at a numeric address, on a port for each source. Errors are in ``published``."""
        self.served: set[int] = set()  # successfully or not
        self._ticket = os.urandom(payloads.TICKET_BYTES)
        self._pace, self._lost = pace, lost
        self._listeners: dict[int, socket.socket] = {}  # by source
        # For each connection, its listening socket and the part of its hello received so far
        self._waiting: dict[socket.socket, tuple[socket.socket, bytearray]] = {}
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
        family, place = numeric_place(address, 0)
        low, high = port_range or (0, 0)
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # In random order, so that nodes on one host, and later runs, do not all begin at the same port.
            for port in random.sample(range(low, high + 1), high + 1 - low):
                try:
                    listener.bind((place[0], port, *place[2:]))
                except OSError as error:
                    if port_range is None or error.errno != errno.EADDRINUSE:
                        raise
                else:
                    break
            else:
                if not self._listeners:
                    raise OSError(errno.EADDRINUSE, f"no port of {low}-{high} is free")
                open_ones = tuple(set(self._listeners.values()))
                return open_ones[len(self._listeners) % len(open_ones)]
            listener.listen(BACKLOG)
            listener.settimeout(0)
            opened.pop_all()
        return listener

    @property
    def published(self) -> PostsOpen:
        ports = {str(source): int(listener.getsockname()[1]) for source, listener in self._listeners.items()}
        return PostsOpen(ports=ports, ticket=self._ticket.hex(), error=self._error)

    def __enter__(self) -> Self:
        if self._listeners:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                    ready = cast("socket.socket", key.fileobj)
                    if ready in self._waiting:
                        self._hear(ready)
                    elif ready.fileno() >= 0:  # else it was dropped for another one of the same batch
                        self._accept(ready)
        finally:
            self._close_all()

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
        listener, hello = self._waiting[connection]
        try:
            part = connection.recv(payloads.HELLO_BYTES - len(hello))
        except OSError:
            part = b""
        hello += part
        if len(hello) < payloads.HELLO_BYTES and part:
            return
        if len(hello) == payloads.HELLO_BYTES:
            (source,) = payloads.NUMBER.unpack(hello[-payloads.NUMBER.size :])
            known = hmac.compare_digest(bytes(hello), payloads.pack_hello(self._ticket, source))
            # Not a stranger, nor a source on another source's port
            if known and self._listeners.get(source) is listener:
                self._selector.unregister(connection)
                started = time.monotonic()
                try:
                    connection.sendall(payloads.ENOUGH if self._lost.enough else payloads.GO)
                    if not self._lost.enough:
                        payloads.serve_payloads(connection, self._pace)
                except (OSError, payloads.Damaged):
                    # The source reports the failure. Here only the lost time is counted.
                    self._lost.spent_s += time.monotonic() - started
                self.served.add(source)
                self._selector.register(connection, selectors.EVENT_READ)
        self._drop(connection)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node to visit."""

    publication: Publication
    port: int
    ticket: bytes
    obstacle: str  # why it cannot be visited, or "" if it can


class Visitor:
    """Visits targets in the given order."""

    def __init__(
        self, own: int, *, connect_s: float, pace: payloads.PayloadLimits, lost: LostTime, deadline: float
    ) -> None:
        """Payloads that have not begun by ``deadline`` are left out."""
        self._own, self._pace, self._lost = own, pace, lost
        self._connect_s, self._deadline = connect_s, deadline
        self._fastest = 0.0  # bytes per second of the fastest large payload so far

    def visit(self, targets: Sequence[Target]) -> tuple[NodePair, ...]:
        places = {id(target): (target.publication.address, target.port) for target in targets if not target.obstacle}
        attempts = dict(zip(places, connect_all(tuple(places.values()), self._connect_s), strict=True))
        return tuple(self._visit(target, attempts.get(id(target))) for target in targets)

    def _visit(self, target: Target, attempt: ConnectionAttempt | None) -> NodePair:
        pair = NodePair(
            source=self._own, target=target.publication.number, address=target.publication.address, port=target.port,
            interface=target.publication.interface, connecting=attempt.seen if attempt is not None else None,
            skipped=target.obstacle,
        )  # fmt: skip
        if attempt is None or attempt.connection is None:
            return pair
        pair = self._send(pair, target, attempt.connection)
        if not all(map(_went_well, (pair.connecting, pair.small, pair.large))):
            attempt.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        attempt.connection.close()
        return pair

    def _send(self, pair: NodePair, target: Target, connection: socket.socket) -> NodePair:
        left_s = self._deadline - time.monotonic()
        if self._lost.enough or left_s <= 0:
            return replace(pair, skipped=SOURCE_FAILS if self._lost.enough else NO_TIME)
        try:
            word = payloads.greet(connection, payloads.pack_hello(target.ticket, self._own), self._pace.stall_s, left_s)
        except payloads.TargetBusy as busy:
            return replace(pair, skipped=str(busy))
        except OSError as error:
            self._lost.spent_s += self._pace.stall_s * isinstance(error, TimeoutError)
            return _broken(pair, contact_of(error), describe(error))
        if word == payloads.ENOUGH:
            return replace(pair, skipped=TARGET_FAILS)
        if word and word != payloads.GO:
            return _broken(pair, Contact.FAILED, "another program answers at this address")
        if not word:
            return _broken(pair, Contact.RESET, "the connection was accepted and then closed")
        started = time.monotonic()
        small = payloads.send_payload(connection, payloads.SMALL_BYTES, self._pace)
        large = payloads.send_large(connection, self._pace, self._fastest) if _went_well(small) else None
        if large is None or not _went_well(large):
            self._lost.spent_s += time.monotonic() - started
        else:
            self._fastest = max(self._fastest, payloads.rate_of(large))
        return replace(pair, small=small, large=large)


def _broken(pair: NodePair, contact: Contact, error: str) -> NodePair:
    assert pair.connecting is not None
    return replace(pair, connecting=replace(pair.connecting, contact=contact, error=error))


def _went_well(part: Connecting | Transfer | None) -> bool:
    return part is None or part.contact is Contact.CONNECTED


@dataclass(slots=True, kw_only=True)
class ConnectionAttempt:
    """The connection attempts to one address."""

    address: str
    port: int
    connection: socket.socket | None = None  # Open if ``seen`` says that it is connected. The caller must close it.
    seen: Connecting | None = None
    pending: list[socket.socket] = field(default_factory=list)
    tries: int = 0


def connect_all(places: Sequence[tuple[str, int]], limit_s: float) -> tuple[ConnectionAttempt, ...]:
    """Connect to numeric addresses and ports. ``seen`` is set in every returned attempt."""
    attempts = tuple(ConnectionAttempt(address=address, port=port) for address, port in places)
    started = time.monotonic()

    def waiting() -> list[ConnectionAttempt]:
        return [attempt for attempt in attempts if attempt.seen is None]

    def end(attempt: ConnectionAttempt, error: OSError | None) -> None:
        timed_out = error.strerror if isinstance(error, TimeoutError) else None
        attempt.seen = Connecting(
            host=attempt.address, address=attempt.address, port=attempt.port,
            contact=Contact.CONNECTED if error is None else contact_of(error),
            error="" if error is None else timed_out or describe(error),
            duration_s=time.monotonic() - started, tries=attempt.tries,
        )  # fmt: skip
        while attempt.pending:
            connection = attempt.pending.pop()
            selector.unregister(connection)
            connection.close()

    def send_first_packet(attempt: ConnectionAttempt) -> None:
        attempt.tries += 1
        try:
            family, place = numeric_place(attempt.address, attempt.port)
            connection = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            end(attempt, error)
            return
        attempt.pending.append(connection)
        connection.setblocking(False)  # noqa: FBT003 - its only argument
        selector.register(connection, selectors.EVENT_WRITE, attempt)
        code = connection.connect_ex(place)
        if code not in {0, errno.EINPROGRESS}:
            end(attempt, OSError(code, os.strerror(code)))

    def take(attempt: ConnectionAttempt, connection: Any) -> None:
        """Record the result of one try. The first try that succeeds or fails decides."""
        if attempt.seen is not None:
            return
        code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code:
            attempt.pending.remove(connection)
            selector.unregister(connection)
            attempt.connection = connection
        end(attempt, OSError(code, os.strerror(code)) if code else None)

    with selectors.DefaultSelector() as selector:
        for number in range(max(1, round(limit_s / TRY_AGAIN_S))):
            for attempt in waiting():
                send_first_packet(attempt)
            until = min(started + (number + 1) * TRY_AGAIN_S, started + limit_s)
            while waiting() and (left_s := until - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    take(key.data, key.fileobj)
        for attempt in waiting():
            end(attempt, TimeoutError(errno.ETIMEDOUT, f"no answer to {attempt.tries} first packets"))
    return attempts


def numeric_place(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family of a numeric address, and the address for connect and bind. Raises ``OSError`` for a name."""
    if not 0 <= port < 65536:
        raise OSError(errno.EINVAL, f"{port} is not a valid port")
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    (family, _, _, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)
    return family, place
