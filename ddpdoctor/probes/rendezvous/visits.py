"""The sending side of a node: connects to its targets, and sends each a small and a large payload."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.exchange.reach import contact_of, describe
from ddpdoctor.model.reaching import Contact, NodePair
from ddpdoctor.probes.rendezvous.connections import connect_all
from ddpdoctor.probes.rendezvous.payloads import (
    ENOUGH,
    GO,
    SMALL_BYTES,
    PayloadLimits,
    TargetBusy,
    greet,
    pack_hello,
    rate_of,
    send_large,
    send_payload,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.reaching import Connecting, Publication, Transfer
    from ddpdoctor.probes.rendezvous.connections import ConnectionAttempt
    from ddpdoctor.probes.rendezvous.posts import LostTime

SOURCE_FAILS = "payloads of the source had stalled often enough"
TARGET_FAILS = "payloads to the target had stalled often enough"
NO_TIME = "the time for the mesh was over"
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: drop unsent data and send a reset. It is a small packet, which passes even if large ones do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node to visit."""

    publication: Publication
    port: int
    ticket: bytes
    obstacle: str
    """Why it cannot be visited, or "" if it can."""


class Visitor:
    """Visits targets in the given order."""

    def __init__(self, own: int, *, connect_s: float, pace: PayloadLimits, lost: LostTime, deadline: float) -> None:
        """``own`` is this node's number. Payloads that have not begun by ``deadline`` are left out."""
        self._own, self._pace, self._lost = own, pace, lost
        self._connect_s, self._deadline = connect_s, deadline
        self._fastest = 0.0
        """Bytes per second of the fastest large payload so far."""

    def visit(self, targets: Sequence[Target]) -> tuple[NodePair, ...]:
        """Visit all targets and return the result of each."""
        open_targets = [target for target in targets if not target.obstacle]
        places = [(target.publication.address, target.port) for target in open_targets]
        attempts = dict(zip(map(id, open_targets), connect_all(places, self._connect_s), strict=True))
        return tuple(self._visit(target, attempts.get(id(target))) for target in targets)

    def _visit(self, target: Target, attempt: ConnectionAttempt | None) -> NodePair:
        pair = self._pair(target, attempt)
        if attempt is None or attempt.connection is None:
            return pair
        pair = self._send(pair, target, attempt.connection)
        if not all(map(_went_well, (pair.connecting, pair.small, pair.large))):
            attempt.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        attempt.connection.close()
        return pair

    def _pair(self, target: Target, attempt: ConnectionAttempt | None) -> NodePair:
        return NodePair(
            source=self._own,
            target=target.publication.number,
            address=target.publication.address,
            port=target.port,
            interface=target.publication.interface,
            connecting=attempt.seen if attempt is not None else None,
            skipped=target.obstacle,
        )

    def _send(self, pair: NodePair, target: Target, connection: socket.socket) -> NodePair:
        left_s = self._deadline - time.monotonic()
        if self._lost.enough or left_s <= 0:
            return replace(pair, skipped=SOURCE_FAILS if self._lost.enough else NO_TIME)
        try:
            word = greet(connection, pack_hello(target.ticket, self._own), self._pace.stall_s, left_s)
        except TargetBusy as busy:
            return replace(pair, skipped=str(busy))
        except OSError as error:
            self._lost.spent_s += self._pace.stall_s * isinstance(error, TimeoutError)
            return _broken(pair, contact_of(error), describe(error))
        return self._send_payloads(pair, connection) if word == GO else _turned_away(pair, word)

    def _send_payloads(self, pair: NodePair, connection: socket.socket) -> NodePair:
        started = time.monotonic()
        small = send_payload(connection, SMALL_BYTES, self._pace)
        large = send_large(connection, self._pace, self._fastest) if _went_well(small) else None
        if large is None or not _went_well(large):
            self._lost.spent_s += time.monotonic() - started
        else:
            self._fastest = max(self._fastest, rate_of(large))
        return replace(pair, small=small, large=large)


def _turned_away(pair: NodePair, word: bytes) -> NodePair:
    if word == ENOUGH:
        return replace(pair, skipped=TARGET_FAILS)
    if word:
        return _broken(pair, Contact.FAILED, "another program answers at this address")
    return _broken(pair, Contact.RESET, "the connection was accepted and then closed")


def _broken(pair: NodePair, contact: Contact, error: str) -> NodePair:
    assert pair.connecting is not None
    return replace(pair, connecting=replace(pair.connecting, contact=contact, error=error))


def _went_well(part: Connecting | Transfer | None) -> bool:
    return part is None or part.contact is Contact.CONNECTED
