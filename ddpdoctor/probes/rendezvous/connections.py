"""Connects to many addresses at the same time, and returns the result of each.

The kernel resends a lost first packet after 1 s and 3 s, too slow to distinguish 20 % of loss from a firewall. So a new
one is sent every half second, from a new port.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.reach import contact_of, describe
from ddpdoctor.model.reaching import Connecting, Contact

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TRY_AGAIN_S = 0.5
"""Our choice: longer than any round trip between hosts that train together."""


@dataclass(slots=True, kw_only=True)
class ConnectionAttempt:
    """The connection attempts to one address."""

    address: str
    port: int
    connection: socket.socket | None = None
    """Open if ``seen`` says that it is connected. The caller must close it."""
    seen: Connecting | None = None
    pending: list[socket.socket] = field(default_factory=list)
    tries: int = 0


def connect_all(places: Sequence[tuple[str, int]], limit_s: float) -> tuple[ConnectionAttempt, ...]:
    """Connect to numeric addresses and ports. ``seen`` is set in every returned attempt."""
    attempts = tuple(ConnectionAttempt(address=address, port=port) for address, port in places)
    started = time.monotonic()
    with selectors.DefaultSelector() as selector:
        try:
            _connect_all(attempts, selector, started, limit_s)
        finally:
            for attempt in attempts:
                _drop_pending(attempt, selector)
    return attempts


def _connect_all(
    attempts: Sequence[ConnectionAttempt], selector: selectors.BaseSelector, started: float, limit_s: float
) -> None:
    for number in range(max(1, round(limit_s / TRY_AGAIN_S))):
        for attempt in _open(attempts):
            _try(attempt, selector, started)
        until = min(started + (number + 1) * TRY_AGAIN_S, started + limit_s)
        while any(_open(attempts)) and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                _take(key.data, key.fileobj, selector, started)
    for attempt in _open(attempts):
        _end(attempt, TimeoutError(errno.ETIMEDOUT, f"no answer to {attempt.tries} first packets"), started)


def _open(attempts: Iterable[ConnectionAttempt]) -> list[ConnectionAttempt]:
    return [attempt for attempt in attempts if attempt.seen is None]


def _try(attempt: ConnectionAttempt, selector: selectors.BaseSelector, started: float) -> None:
    """Send one more first packet."""
    attempt.tries += 1
    try:
        family, place = numeric_place(attempt.address, attempt.port)
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        _end(attempt, error, started)
        return
    attempt.pending.append(connection)
    connection.setblocking(False)  # noqa: FBT003 - its only argument
    selector.register(connection, selectors.EVENT_WRITE, attempt)
    code = connection.connect_ex(place)
    if code not in {0, errno.EINPROGRESS}:
        _end(attempt, OSError(code, os.strerror(code)), started)
        _drop_pending(attempt, selector)


def _take(attempt: ConnectionAttempt, connection: Any, selector: selectors.BaseSelector, started: float) -> None:
    """Record the result of one try. The first try that succeeds or fails decides."""
    if attempt.seen is not None:
        return
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        _end(attempt, OSError(code, os.strerror(code)), started)
    else:
        attempt.pending.remove(connection)
        selector.unregister(connection)
        attempt.connection = connection
        _end(attempt, None, started)
    _drop_pending(attempt, selector)


def _end(attempt: ConnectionAttempt, error: OSError | None, started: float) -> None:
    attempt.seen = Connecting(
        host=attempt.address,
        address=attempt.address,
        port=attempt.port,
        contact=Contact.CONNECTED if error is None else contact_of(error),
        error="" if error is None else _words(error),
        duration_s=time.monotonic() - started,
        tries=attempt.tries,
    )


def _words(error: OSError) -> str:
    return error.strerror if isinstance(error, TimeoutError) and error.strerror else describe(error)


def _drop_pending(attempt: ConnectionAttempt, selector: selectors.BaseSelector) -> None:
    while attempt.pending:
        connection = attempt.pending.pop()
        selector.unregister(connection)
        connection.close()


def numeric_place(address: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return the family of a numeric address, and the address for connect and bind. Raises ``OSError`` for a name."""
    if not 0 <= port < 65536:
        raise OSError(errno.EINVAL, f"{port} is no port")
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    (family, _, _, _, place), *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=flags)
    return family, place
