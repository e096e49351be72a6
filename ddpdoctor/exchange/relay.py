"""A hub behind letters: a thread of the server hands letters to the hub, a client asks by letter.

A letter that gets no answer is left again under its number. The server answers each number once: a request that counts
is never counted twice.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from ddpdoctor.exchange.asking import CALL_LIMIT_S, Room
from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.hub_wire import LENGTH, BadRequest, Status, pack_answer, parse_request
from ddpdoctor.exchange.letters import LINE_BYTES, ROOM_BYTES, Letter, Side, seal, unseal
from ddpdoctor.exchange.store import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpdoctor.exchange.letters import Inbox, Outbox

AGAIN_S = 3.0
"""Ours: after this a letter is left again."""
MAX_LINES = 8192
SLOW_BEAT_EVERY_S = 3.0
"""Ours: a beat by letter takes some ten questions and answers of the store that carries it."""


class Relay:
    """Hands letters to a hub from a thread, from ``start`` until ``close``."""

    def __init__(self, inbox: Inbox, ask: Callable[[bytes], bytes], token: bytes) -> None:
        """Own the inbox. ``ask`` answers a request, as ``Room`` asks it."""
        self.failed = ""
        """Why the way has ended: a phrase; empty while it is served."""
        self._inbox, self._ask, self._token = inbox, ask, token
        self._room = os.urandom(ROOM_BYTES)
        self._answered: dict[bytes, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-relay", daemon=True)

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._ended.set()
        self._thread.join(timeout=2)

    def _serve(self) -> None:
        try:
            self._inbox.open(self._room)
            pause_s = FIRST_PAUSE_S
            while not self._ended.wait(pause_s):
                pause_s = FIRST_PAUSE_S if self._serve_once() else min(pause_s * 1.5, LONGEST_PAUSE_S)
            self._inbox.close()
        except StoreError as error:
            self.failed = str(error)

    def _serve_once(self) -> bool:
        """Answer what has come; say whether anything had."""
        came = False
        for message in self._inbox.letters():
            came = True
            try:
                letter = unseal(message, Side.CLIENT, self._room, self._token)
            except BadMessage:
                continue
            if self._is_next(letter):
                self._answer(letter)
        return came

    def _is_next(self, letter: Letter) -> bool:
        """Say whether a letter is to be answered: not one that comes again, and none of a line too many."""
        former = self._answered.get(letter.line)
        if former is None and len(self._answered) >= MAX_LINES:
            return False
        return former is None or letter.number > former

    def _answer(self, letter: Letter) -> None:
        self._answered[letter.line] = letter.number
        answer = Letter(line=letter.line, number=letter.number, text=self._ask_hub(letter.text))
        self._inbox.reply(letter.line, seal(answer, Side.SERVER, self._room, self._token))

    def _ask_hub(self, request: bytes) -> bytes:
        try:
            # The hub would hang up on us, and so on everybody who writes letters.
            parse_request(request)
        except BadRequest as bad:
            return pack_answer(Status.REFUSED, str(bad).encode())[LENGTH.size :]
        return self._ask(request)


class LetterRoom(Room):
    """A client that asks by letter. Calls take turns."""

    beat_every_s = SLOW_BEAT_EVERY_S

    def __init__(self, outbox: Outbox, room: bytes, token: bytes, served_by: str) -> None:
        """Own the outbox."""
        super().__init__(served_by)
        self._outbox, self._room, self._token = outbox, room, token
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
            letter = Letter(line=self._line, number=self._number, text=request)
            message = seal(letter, Side.CLIENT, self._room, self._token)
            deadline = time.monotonic() + limit_s
            while (left_s := deadline - time.monotonic()) > 0:
                self._outbox.post(self._line, message)
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
        message = self._outbox.answer(self._line)
        try:
            answer = None if message is None else unseal(message, Side.SERVER, self._room, self._token)
        except BadMessage:
            return None
        return answer.text if answer is not None and answer.number == self._number else None
