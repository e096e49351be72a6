"""Who is there: members beat, and the server keeps when it last heard each of them.

A beat is some twenty bytes and up to ``MAX_SAID_BYTES`` of the member's own; its answer has up to ``MAX_NOTICE_BYTES``
that the server shows to everybody. With the headers of TCP that is under 1 KiB a second.
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
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.client import Client

MAX_SAID_BYTES = 128
MAX_NOTICE_BYTES = 256
"""Ours: with both and four segments' headers (4 * 66 bytes) a beat a second stays below 700 bytes a second."""
MAX_MEMBERS = 8192
REOPEN_LIMIT_S = 3.0
"""Ours: one attempt to connect again. The next beat tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What the server knows of one member. Times are CLOCK_MONOTONIC of the server's host."""

    heard_ns: int
    said: bytes = b""
    """What came with its last beat."""
    left: bytes | None = None
    """Its word as it left; None while it has not."""
    broken_ns: int | None = None
    """When its connection ended without that word; None where it was heard again since, or it never broke."""


class Heartbeats:
    """Written by the server's thread; any thread may read."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Start with nobody."""
        self.notice = b""
        """What is shown to everybody who beats."""
        self._clock_ns = clock_ns
        self._heard: dict[str, Heard] = {}

    def beat(self, member: str, said: bytes) -> bytes:
        """Keep that a member was heard; return the notice."""
        self._check(member, said)
        self._heard[member] = Heard(heard_ns=self._clock_ns(), said=said)
        return self.notice

    def leave(self, member: str, word: bytes) -> None:
        """Keep the last word of a member."""
        self._check(member, word)
        said = self._heard[member].said if member in self._heard else b""
        self._heard[member] = Heard(heard_ns=self._clock_ns(), said=said, left=word)

    def lose(self, member: str) -> None:
        """Keep that the connection by which a member beats has ended."""
        heard = self._heard.get(member)
        if heard is not None and heard.left is None:
            self._heard[member] = replace(heard, broken_ns=self._clock_ns())

    def heard(self) -> dict[str, Heard]:
        """Return what is known of every member that was ever heard."""
        return dict(self._heard)

    def _check(self, member: str, said: bytes) -> None:
        if len(said) > MAX_SAID_BYTES or (member not in self._heard and len(self._heard) >= MAX_MEMBERS):
            raise BadRequest("the beat is over the limit")


class Heartbeating:
    """A context in which a member beats, on a connection of its own, so that no large value holds a beat up."""

    def __init__(
        self,
        connect: Callable[[float], Client],
        member: str,
        *,
        on_notice: Callable[[bytes], None] = lambda _: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Take how to connect within a limit, and who beats. The thread calls ``on_notice`` with each new notice."""
        self.heard_ns: int | None = None
        """When the server last answered, by CLOCK_MONOTONIC; None: never."""
        self.said = b""
        """What the next beats carry; at most ``MAX_SAID_BYTES``."""
        self._connect, self._member, self._on_notice, self._clock_ns = connect, member, on_notice, clock_ns
        self._client: Client | None = None
        self._notice = b""
        self._ended = threading.Event()
        self._now = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-beat", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop, without a word."""
        self._stop()
        if self._client is not None and not self._thread.is_alive():
            self._client.close()

    def leave(self, word: bytes = b"") -> bool:
        """Stop, and say that this member ends; False where that could not be said."""
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
        # A call that hangs ends by its own limit; nobody waits for it.
        self._thread.join(timeout=1)

    def beat_now(self) -> None:
        """Have the next beat go out at once: what it carries is news."""
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
