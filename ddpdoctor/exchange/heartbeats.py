"""Heartbeats: members beat, and the server records when it last received a beat from each.

A beat is about twenty bytes plus up to ``MAX_SAID_BYTES`` of the member's own. The answer has up to
``MAX_NOTICE_BYTES``, which the server shows to every member. With TCP headers that is under 1 KiB a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.exchange.protocol import BadRequest
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.exchange.client import Client

MAX_SAID_BYTES = 128
MAX_NOTICE_BYTES = 256
"""Our choice: with both and the headers of four segments (4 * 66 bytes), one beat a second takes under 700 bytes/s."""
MAX_MEMBERS = 8192
REOPEN_LIMIT_S = 3.0
"""Our choice: the limit of one attempt to reconnect. The next beat tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the server knows about one member. Times are CLOCK_MONOTONIC on the server's host."""

    heard_ns: int
    said: bytes = b""
    """The bytes of its last beat."""
    left: bytes | None = None
    """Its last message if it has left, else None."""
    broken_ns: int | None = None
    """When its connection ended before it left; None if that never happened, or if it has beaten again since."""


class Heartbeats:
    """The last beat of each member. Only the server's thread writes it; any thread may read."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Start without members."""
        self.notice = b""
        """The answer to every beat."""
        self._clock_ns = clock_ns
        self._heard: dict[str, Heard] = {}

    def beat(self, member: str, said: bytes) -> bytes:
        """Record a member's beat; return the notice."""
        self._check(member, said)
        self._heard[member] = Heard(heard_ns=self._clock_ns(), said=said)
        return self.notice

    def leave(self, member: str, word: bytes) -> None:
        """Record a member's last message."""
        self._check(member, word)
        said = self._heard[member].said if member in self._heard else b""
        self._heard[member] = Heard(heard_ns=self._clock_ns(), said=said, left=word)

    def lose(self, member: str) -> None:
        """Record that the connection over which a member beats has ended."""
        heard = self._heard.get(member)
        if heard is not None and heard.left is None:
            self._heard[member] = replace(heard, broken_ns=self._clock_ns())

    def heard(self) -> dict[str, Heard]:
        """Return every member that ever beat, with its state."""
        return dict(self._heard)

    def _check(self, member: str, said: bytes) -> None:
        if len(said) > MAX_SAID_BYTES or (member not in self._heard and len(self._heard) >= MAX_MEMBERS):
            raise BadRequest("the heartbeat is over the limit")


class Heartbeating:
    """Sends a member's beats until it is closed, on its own connection so that no large value delays them."""

    def __init__(
        self,
        connect: Callable[[float], Client],
        member: str,
        *,
        on_notice: Callable[[bytes], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``connect`` takes a limit in seconds. The thread calls ``on_notice`` with each new notice."""
        self.heard_ns: int | None = None
        """When the server last answered, by CLOCK_MONOTONIC, or None if it never has."""
        self.said = b""
        """The bytes that the next beats carry, at most ``MAX_SAID_BYTES``."""
        self._connect, self._member, self._on_notice, self._clock_ns = connect, member, on_notice, clock_ns
        self._client: Client | None = None
        self._notice = b""
        self._ended = threading.Event()
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-beat", daemon=True)

    def start(self) -> None:
        """Start."""
        self._thread.start()

    def close(self) -> None:
        """Stop beating, without leaving."""
        self._stop()
        if self._client is not None and not self._thread.is_alive():
            self._client.close()

    def leave(self, word: bytes = b"") -> bool:
        """Stop beating and report that this member ends; return False if the report failed."""
        self._stop()
        if self._client is None or self._thread.is_alive():
            return False
        try:
            self._client.leave(self._member, word)
        except StoreError:
            return False
        return True

    def _stop(self) -> None:
        self._ended.set()
        self._now.set()
        # A call that hangs ends at its own limit; do not wait for it.
        self._thread.join(timeout=1)

    def beat_now(self) -> None:
        """Send the next beat at once, because ``said`` has changed."""
        self._now.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(StoreError):
                self._beat()
            self._now.wait(1.0 if self._client is None else self._client.beat_every_s)
            self._now.clear()

    def _beat(self) -> None:
        if self._client is None:
            self._client = self._connect(REOPEN_LIMIT_S)
        try:
            notice = self._client.beat(self._member, self.said)
        except StoreError:
            self._client.close()
            self._client = None
            raise
        self.heard_ns = self._clock_ns()
        if notice != self._notice:
            self._notice = notice
            self._on_notice(notice)
