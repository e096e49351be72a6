"""Requests that reach the server by a store or a shared folder: a thread of the server's process forwards them.

Whoever reaches such a place may write there. So every message carries HMAC-SHA256 by the job's token over its side, the
meeting (random, of one life of a server), the line (random, of one client), its number on that line, and its text. It
can neither be forged nor used again. It is not encrypted. Without a token, who reaches the place is trusted.

A message that gets no answer is left again under its number. The server answers each number once: a request that counts
is never counted twice.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.exchange.client import CALL_LIMIT_S, Client
from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.protocol import LENGTH, MAX_REQUEST_BYTES, BadRequest, Status, pack_answer, parse_request
from ddpdoctor.exchange.store import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEETING_BYTES = 16
LINE_BYTES = 16
_HEADER = struct.Struct(f"!{LINE_BYTES}sQ32s")
MAX_MESSAGE_BYTES = _HEADER.size + MAX_REQUEST_BYTES


class Side(Enum):
    """Who wrote a message."""

    CLIENT = b"client"
    SERVER = b"server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A request, or the answer of the same number."""

    line: bytes
    number: int
    text: bytes


class Outbox(Protocol):
    """The client's end of a way; every call raises ``StoreError`` where it fails."""

    def meeting(self) -> bytes | None:
        """Return the meeting that is served, as far as can be seen; it may have ended."""

    def post(self, line: bytes, message: bytes) -> None:
        """Leave a message; the former one of this line need not be kept."""

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer that was left for a line."""

    def close(self) -> None:
        """Take away what this line has left, and leave."""


class Inbox(Protocol):
    """The server's end of a way; every call raises ``StoreError`` where it fails."""

    def open(self, meeting: bytes) -> None:
        """Say that this meeting is served; what was left for a former one is of no use."""

    def messages(self) -> Iterator[bytes]:
        """Return what has come since, if anything; nothing is waited for."""

    def reply(self, line: bytes, message: bytes) -> None:
        """Leave an answer for a line."""

    def close(self) -> None:
        """Take away what was left here, and leave."""


def seal(message: Message, side: Side, meeting: bytes, token: bytes) -> bytes:
    """Return a message as it travels."""
    return _HEADER.pack(message.line, message.number, _sign(message, side, meeting, token)) + message.text


def unseal(sealed: bytes, side: Side, meeting: bytes, token: bytes) -> Message:
    """Return the message that one side of a meeting wrote; raises ``BadMessage`` for any other."""
    if not _HEADER.size < len(sealed) <= MAX_MESSAGE_BYTES:
        raise BadMessage("a message that is cut short or over the limit")
    line, number, signature = _HEADER.unpack_from(sealed)
    message = Message(line=line, number=number, text=sealed[_HEADER.size :])
    if not hmac.compare_digest(signature, _sign(message, side, meeting, token)):
        raise BadMessage("a message of another meeting, or by another token")
    return message


def _sign(message: Message, side: Side, meeting: bytes, token: bytes) -> bytes:
    head = b"ddpdoctor letter\0" + side.value + meeting + _HEADER.pack(message.line, message.number, b"")
    return hmac.new(token, head + message.text, hashlib.sha256).digest()


AGAIN_S = 3.0
"""Ours: after this a message is left again."""
MAX_LINES = 8192
SLOW_BEAT_EVERY_S = 3.0
"""Ours: a beat by message takes some ten questions and answers of the store that carries it."""


class Forwarder:
    """Hands messages to a server from a thread, from ``start`` until ``close``."""

    def __init__(self, inbox: Inbox, ask: Callable[[bytes], bytes], token: bytes) -> None:
        """Own the inbox. ``ask`` answers a request, as ``Client`` asks it."""
        self.failed = ""
        """Why the way has ended: a phrase; empty while it is served."""
        self._inbox, self._ask, self._token = inbox, ask, token
        self._meeting = os.urandom(MEETING_BYTES)
        self._answered: dict[bytes, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-forward", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._thread.join(timeout=2)

    def _serve(self) -> None:
        try:
            self._inbox.open(self._meeting)
            pause_s = FIRST_PAUSE_S
            while not self._ended.wait(pause_s):
                pause_s = FIRST_PAUSE_S if self._serve_once() else min(pause_s * 1.5, LONGEST_PAUSE_S)
            self._inbox.close()
        except StoreError as error:
            self.failed = str(error)

    def _serve_once(self) -> bool:
        """Answer what has come; say whether anything had."""
        came = False
        for sealed in self._inbox.messages():
            came = True
            try:
                message = unseal(sealed, Side.CLIENT, self._meeting, self._token)
            except BadMessage:
                continue
            if self._is_next(message):
                self._answer(message)
        return came

    def _is_next(self, message: Message) -> bool:
        """Say whether a message is to be answered: not one that comes again, and none of a line too many."""
        former = self._answered.get(message.line)
        if former is None and len(self._answered) >= MAX_LINES:
            return False
        return former is None or message.number > former

    def _answer(self, message: Message) -> None:
        self._answered[message.line] = message.number
        answer = Message(line=message.line, number=message.number, text=self._ask_server(message.text))
        self._inbox.reply(message.line, seal(answer, Side.SERVER, self._meeting, self._token))

    def _ask_server(self, request: bytes) -> bytes:
        try:
            # The server would hang up on this thread, and so on all who write messages.
            parse_request(request)
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())[LENGTH.size :]
        return self._ask(request)


class MailboxClient(Client):
    """A client that asks by message. Calls take turns."""

    beat_every_s = SLOW_BEAT_EVERY_S

    def __init__(self, outbox: Outbox, meeting: bytes, token: bytes, served_by: str) -> None:
        """Own the outbox."""
        super().__init__(served_by)
        self._outbox, self._meeting, self._token = outbox, meeting, token
        self._line, self._number = os.urandom(LINE_BYTES), 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Leave."""
        self._outbox.close()

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length."""
        return self.ask_within(request, CALL_LIMIT_S)

    def ask_within(self, request: bytes, limit_s: float) -> bytes:
        """Return the answer to a request; raises ``StoreError``."""
        with self._lock:
            self._number += 1
            message = Message(line=self._line, number=self._number, text=request)
            sealed = seal(message, Side.CLIENT, self._meeting, self._token)
            deadline = time.monotonic() + limit_s
            while (left_s := deadline - time.monotonic()) > 0:
                self._outbox.post(self._line, sealed)
                answer = self._wait(min(AGAIN_S, left_s))
                if answer is not None:
                    return answer
        raise StoreError(f"{self._served_by} did not answer within {limit_s:g} s")

    def _wait(self, limit_s: float) -> bytes | None:
        deadline = time.monotonic() + limit_s
        pause_s = FIRST_PAUSE_S
        while (answer := self._read()) is None and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        return answer

    def _read(self) -> bytes | None:
        sealed = self._outbox.answer(self._line)
        try:
            answer = None if sealed is None else unseal(sealed, Side.SERVER, self._meeting, self._token)
        except BadMessage:
            return None
        return answer.text if answer is not None and answer.number == self._number else None
