"""Carries requests to the server through a store or a shared folder; a thread in the server's process forwards them.

Anyone who can access the store or folder can write to it. So every message carries an HMAC-SHA256, keyed with the job's
token, over its side (client or server), the meeting (a random ID of one server run), the line (a random ID of one
client), its number on that line, and its text. It cannot be forged, nor replayed while the server remembers its line.
It is not encrypted. Without a token, everyone with access is trusted.

A message that gets no answer is posted again under the same number. The server answers each number once, so a request
never takes effect twice.
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
from ddpdoctor.exchange.store import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEETING_BYTES = 16
LINE_BYTES = 16
_HEADER = struct.Struct(f"!{LINE_BYTES}sQ32s")
MAX_MESSAGE_BYTES = _HEADER.size + MAX_REQUEST_BYTES


class Sender(Enum):
    """Who wrote a message."""

    CLIENT = b"client"
    SERVER = b"server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A request, or the answer with the same number."""

    line: bytes
    number: int
    text: bytes


class Outbox(Protocol):
    """The client's end of a transport; every call raises ``StoreError`` if it fails."""

    def meeting(self) -> bytes | None:
        """Return the ID of the announced meeting, or None. That meeting may already have ended."""

    def post(self, line: bytes, message: bytes) -> None:
        """Post a message, which may replace the previous one of this line."""

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer to a line, or None if there is none."""

    def close(self) -> None:
        """Remove what this client posted, and disconnect."""


class Inbox(Protocol):
    """The server's end of a transport; every call raises ``StoreError`` if it fails."""

    def open(self, meeting: bytes) -> None:
        """Announce this meeting. Messages for an earlier one are void."""

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that arrived since the last call, without waiting."""

    def reply(self, line: bytes, message: bytes) -> None:
        """Post the answer to a line."""

    def close(self) -> None:
        """Remove the announcement and the messages, and disconnect."""


def seal(message: Message, side: Sender, meeting: bytes, token: bytes) -> bytes:
    """Return the signed bytes of a message."""
    return _HEADER.pack(message.line, message.number, _sign(message, side, meeting, token)) + message.text


def unseal(sealed: bytes, side: Sender, meeting: bytes, token: bytes) -> Message:
    """Check the signature and return the message; raises ``BadMessage`` if another side or meeting wrote it."""
    if not _HEADER.size < len(sealed) <= MAX_MESSAGE_BYTES:
        raise BadMessage("a message that is cut short or over the limit")
    line, number, signature = _HEADER.unpack_from(sealed)
    message = Message(line=line, number=number, text=sealed[_HEADER.size :])
    if not hmac.compare_digest(signature, _sign(message, side, meeting, token)):
        raise BadMessage("a message of another meeting, or by another token")
    return message


def _sign(message: Message, side: Sender, meeting: bytes, token: bytes) -> bytes:
    head = b"ddpdoctor message\0" + side.value + meeting + _HEADER.pack(message.line, message.number, b"")
    return hmac.new(token, head + message.text, hashlib.sha256).digest()


AGAIN_S = 3.0
"""Our choice: a message without an answer is posted again after this time."""
MAX_LINES = 8192
"""Our choice: how many lines the server remembers. A client that connects again begins a new line."""
SLOW_BEAT_EVERY_S = 3.0
"""Our choice: a beat by message costs about ten requests to the store that carries it."""


class Forwarder:
    """Passes messages to a server from its own thread, from ``start`` until ``close``."""

    def __init__(self, inbox: Inbox, ask: Callable[[bytes], bytes], token: bytes) -> None:
        """Take ownership of the inbox. ``ask`` answers a request, as ``Client.ask`` does."""
        self.failed = ""
        """Why forwarding stopped: a phrase, empty while it works."""
        self._inbox, self._ask, self._token = inbox, ask, token
        self._meeting = os.urandom(MEETING_BYTES)
        self._answered: dict[bytes, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-forward", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
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
        """Answer the messages that arrived; return whether there were any."""
        came = False
        for sealed in self._inbox.messages():
            came = True
            try:
                message = unseal(sealed, Sender.CLIENT, self._meeting, self._token)
            except BadMessage:
                continue
            if message.number > self._answered.get(message.line, 0):
                self._answer(message)
        return came

    def _answer(self, message: Message) -> None:
        self._answered.pop(message.line, None)  # the line that was used last comes last
        self._answered[message.line] = message.number
        if len(self._answered) > MAX_LINES:
            del self._answered[next(iter(self._answered))]
        answer = Message(line=message.line, number=message.number, text=self._ask_server(message.text))
        self._inbox.reply(message.line, seal(answer, Sender.SERVER, self._meeting, self._token))

    def _ask_server(self, request: bytes) -> bytes:
        try:
            # On a bad request the server would close this thread's connection, which all mailbox clients share.
            parse_request(request)
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())[LENGTH.size :]
        return self._ask(request)


class MailboxClient(Client):
    """A client that sends its requests as messages, one at a time."""

    beat_every_s = SLOW_BEAT_EVERY_S

    def __init__(self, outbox: Outbox, meeting: bytes, token: bytes, served_by: str) -> None:
        """Take ownership of the outbox."""
        super().__init__(served_by)
        self._outbox, self._meeting, self._token = outbox, meeting, token
        self._line, self._number = os.urandom(LINE_BYTES), 0
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the outbox."""
        self._outbox.close()

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, both without their length prefix."""
        return self.ask_within(request, CALL_LIMIT_S)

    def ask_within(self, request: bytes, limit_s: float) -> bytes:
        """Return the answer to a request; raises ``StoreError``."""
        with self._lock:
            self._number += 1
            message = Message(line=self._line, number=self._number, text=request)
            sealed = seal(message, Sender.CLIENT, self._meeting, self._token)
            deadline = time.monotonic() + limit_s
            while (left_s := deadline - time.monotonic()) > 0:
                self._outbox.post(self._line, sealed)
                answer = wait_for(self._read, min(AGAIN_S, left_s))
                if answer is not None:
                    return answer
        raise StoreError(f"{self._served_by} did not answer within {limit_s:g} s")

    def _read(self) -> bytes | None:
        sealed = self._outbox.answer(self._line)
        try:
            answer = None if sealed is None else unseal(sealed, Sender.SERVER, self._meeting, self._token)
        except BadMessage:
            return None
        return answer.text if answer is not None and answer.number == self._number else None
