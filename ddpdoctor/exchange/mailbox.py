"""Carries requests to a server as messages through a store that another process serves, or a shared folder.

Anyone with access can write there. So an HMAC-SHA256, keyed with the job's token, covers a message's side, meeting (a
random ID of one server run), line (of one client), number on that line, and text: it cannot be forged, nor replayed
while the server remembers its line. Each number is answered once, so one that is posted again takes no effect twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import re
import stat
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ddpdoctor.exchange import wire
from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.exchange.store import FIRST_PAUSE_S, LONGEST_PAUSE_S, StoreError, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ddpdoctor.exchange.store import KeyValues, Store

MEETING_BYTES = LINE_BYTES = 16
_HEADER = struct.Struct(f"!{LINE_BYTES}sQ32s")
MAX_MESSAGE_BYTES = _HEADER.size + wire.MAX_REQUEST_BYTES
AGAIN_S = 3.0  # our choice: a message without an answer is posted again after this time
# Our choice: the time that an announced meeting has to answer. One that crashed never answers.
PAUSE_S, KNOCK_S = 0.2, 1.0
MAX_LINES = 8192  # Our choice: how many lines the server remembers. A client that connects again begins a new line.
Side = Literal[b"client", b"server"]


class Message(NamedTuple):
    """A request, or the answer with the same number."""

    line: bytes
    number: int
    text: bytes

    def seal(self, side: Side, meeting: bytes, token: bytes) -> bytes:
        """Return the signed bytes."""
        return _HEADER.pack(self.line, self.number, self._sign(side, meeting, token)) + self.text

    def _sign(self, side: Side, meeting: bytes, token: bytes) -> bytes:
        head = b"ddpdoctor message\0" + side + meeting + _HEADER.pack(self.line, self.number, b"")
        return hmac.new(token, head + self.text, hashlib.sha256).digest()

    @classmethod
    def unseal(cls, sealed: bytes, side: Side, meeting: bytes, token: bytes) -> Message:
        """Check the signature and return the message; raises ``BadMessage`` if another side or meeting wrote it."""
        if not _HEADER.size < len(sealed) <= MAX_MESSAGE_BYTES:
            raise BadMessage("a message that is cut short or over the limit")
        line, number, signature = _HEADER.unpack_from(sealed)
        message = cls(line, number, sealed[_HEADER.size :])
        if not hmac.compare_digest(signature, message._sign(side, meeting, token)):
            raise BadMessage("a message of another meeting, or by another token")
        return message


class Forwarder:
    """Answers the messages in a box from its own thread, until ``close``."""

    def __init__(self, box: MessageBox, values: KeyValues, token: bytes) -> None:
        """Take ownership of the box."""
        self.failed = ""
        """Why the box does not work: a phrase, empty while it does. It is tried again."""
        self.meeting = os.urandom(MEETING_BYTES)
        self._box, self._values, self._token = box, values, token
        self._answered: dict[bytes, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ddpdoctor-forward", daemon=True)

    def start(self) -> Forwarder:
        self._thread.start()
        return self

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2)

    def _serve(self) -> None:
        announced, pause_s = False, FIRST_PAUSE_S
        while not self._ended.wait(pause_s):
            try:
                if not announced:
                    self._box.announce(self.meeting)
                    announced = True
                pause_s = FIRST_PAUSE_S if self.serve_once() else min(pause_s * 1.5, LONGEST_PAUSE_S)
                self.failed = ""
            except Exception as error:  # noqa: BLE001 - others write into the box too, and it may work again
                self.failed, pause_s = str(error) or type(error).__name__, AGAIN_S
        with contextlib.suppress(StoreError):
            self._box.withdraw()

    def serve_once(self) -> bool:
        came = False
        for sealed in self._box.messages():
            came = True
            try:
                line, number, request = Message.unseal(sealed, b"client", self.meeting, self._token)
            except BadMessage:
                continue
            if number <= self._answered.get(line, 0):
                continue
            self._answered.pop(line, None)  # the line that was used last comes last
            self._answered[line] = number
            if len(self._answered) > MAX_LINES:
                del self._answered[next(iter(self._answered))]
            try:
                found, _ = wire.answer(self._values, request)
            except wire.BadRequest as bad:
                found = bytes([wire.Status.REFUSED]) + str(bad).encode()
            with contextlib.suppress(StoreError):  # what is wrong with one line must not keep the others waiting
                self._box.reply(line, Message(line, number, found).seal(b"server", self.meeting, self._token))
        return came


class MailboxClient(wire.RemoteClient):
    """A client that sends its requests as messages, one at a time."""

    beat_every_s = 3.0  # our choice: a beat by message costs about ten requests to the store that carries it

    def __init__(self, box: MessageBox, meeting: bytes, token: bytes, served_by: str) -> None:
        """Take ownership of the box."""
        super().__init__(served_by)
        self._box, self._meeting, self._token = box, meeting, token
        self._line, self._number = os.urandom(LINE_BYTES), 0
        self._lock = threading.Lock()

    def close(self) -> None:
        self._box.close()

    def ask(self, request: bytes, limit_s: float = wire.CALL_LIMIT_S) -> bytes:
        with self._lock:
            self._number += 1
            sealed = Message(self._line, self._number, request).seal(b"client", self._meeting, self._token)
            deadline = time.monotonic() + limit_s
            while (left_s := deadline - time.monotonic()) > 0:
                self._box.post(self._line, sealed)
                if (found := wait_for(self._read, min(AGAIN_S, left_s))) is not None:
                    return found
        raise StoreError(f"{self._served_by} did not answer within {limit_s:g} s")

    def _read(self) -> bytes | None:
        sealed = self._box.answer(self._line)
        try:
            found = Message.unseal(sealed or b"", b"server", self._meeting, self._token)
        except BadMessage:
            return None
        return found.text if found.number == self._number else None


def knock(box: MessageBox, token: bytes, limit_s: float, served_by: str) -> MailboxClient:
    """Return a client of the announced meeting once it answers; raises ``StoreError``.

    The announcement may be of a meeting that has ended, so it is read again after each failure.
    """
    deadline = time.monotonic() + limit_s
    seen = "it has no server"
    with contextlib.ExitStack() as opened:
        opened.callback(box.close)
        while (left_s := deadline - time.monotonic()) > 0:
            if (shown := box.meeting()) is None:
                time.sleep(min(PAUSE_S, left_s))
                continue
            client = MailboxClient(box, shown, token, served_by)
            try:
                client.ask(wire.pack_request(wire.RequestType.NOW, "now", b""), min(KNOCK_S, left_s))
            except StoreError:
                seen = "its server does not answer, or has another token (DDPDOCTOR_TOKEN)"
            else:
                opened.pop_all()
                return client
    raise StoreError(seen)


SLOTS = 4096  # Each client has one request in flight. With fewer clients than this, no unread message is overwritten.
# Our choice: the time that a client has between its ticket and its message. After it the server skips the ticket.
LATE_S = 2.0
LARGE_BYTES = 4096  # larger messages are removed from the job's store once they are read
_TICKET = struct.Struct("!q")


class StoreBox:
    """A box in the job's own store, in which we create few keys.

    A client takes the next ticket and writes its message to one of ``SLOTS`` keys; the server reads the tickets in
    order. So it polls one key, however many clients there are.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        """Take ownership of the store."""
        self._store, self._clock = store, clock
        self.next_ticket = 1
        self._waited_since: float | None = None

    def meeting(self) -> bytes | None:
        """Return the ID of the announced meeting, or None. That meeting may already have ended."""
        found = self._store.get("meeting")
        return found if found is not None and len(found) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:  # noqa: ARG002 - the message itself says its line
        """Post a message, which may replace the previous one of this line."""
        ticket = self._store.add("tickets", 1)
        self._store.set(f"slot/{ticket % SLOTS}", _TICKET.pack(ticket) + message)

    def answer(self, line: bytes) -> bytes | None:
        """Return the last answer to a line, or None if there is none."""
        key = f"line/{line.hex()}"
        found = self._store.get(key)
        if found is not None and len(found) > LARGE_BYTES:
            self._store.set(key, b"")
        return found or None

    def close(self) -> None:
        """Remove what this client posted, and disconnect."""
        self._store.close()

    def announce(self, meeting: bytes) -> None:
        """Announce this meeting. Messages for an earlier one are void."""
        self.next_ticket = self._store.add("tickets", 0) + 1
        self._store.set("meeting", meeting)

    def messages(self) -> Iterator[bytes]:
        """Yield the messages that arrived since the last call, without waiting.

        They lie at the next tickets: b"" for a ticket whose client never wrote.
        """
        while True:
            slot = f"slot/{self.next_ticket % SLOTS}"
            found = self._store.get(slot) or b""
            if not found.startswith(_TICKET.pack(self.next_ticket)):
                if (last := self._store.add("tickets", 0)) < self.next_ticket:
                    self._waited_since = None
                    return
                if self.next_ticket <= last - SLOTS:  # overwritten since, or another program counts here
                    self.next_ticket = last - SLOTS + 1
                    continue
                self._waited_since = self._clock() if self._waited_since is None else self._waited_since
                if self._clock() < self._waited_since + LATE_S:
                    return
                found = b""
            elif len(found) > LARGE_BYTES:
                self._store.set(slot, b"")
            self.next_ticket, self._waited_since = self.next_ticket + 1, None
            yield found[_TICKET.size :]

    def reply(self, line: bytes, message: bytes) -> None:
        self._store.set(f"line/{line.hex()}", message)

    def withdraw(self) -> None:
        """Remove the announcement and the messages, and disconnect."""
        self._store.set("meeting", b"")
        self._store.close()


FOLDER = ".meeting"  # the subfolder of the shared folder that holds the messages
_MAIL = re.compile(rf"[0-9a-f]{{{2 * LINE_BYTES}}}\.(asked|answered)")

# Our choice: a file that never had an answer, as one of a stranger, is read this often and again when it has changed.
# Those of members are always read, because the times of files are coarse on some file systems.
MOST_READS = 3
MAX_NAMES = 4 * MAX_LINES  # our choice: how many files of the folder are looked at


@dataclass(slots=True)
class _Seen:
    checksum: int = 0
    state: tuple[int, int] | None = None
    reads: int = 0  # how often it was read in this state
    had_answer: bool = False


class FolderBox:
    """A box like ``StoreBox`` in a folder that all hosts see, for networks where no port gets through.

    Every line has two files, one for requests and one for answers. Each is created once and then written in place. On a
    network file system a reader who opens a file sees everything written before (NFS's close-to-open consistency), but
    a renamed or new file may show up half a minute late. A half-written message fails its signature check, so the
    reader tries again.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path / FOLDER
        self._lines: set[bytes] = set()
        self._seen: dict[str, _Seen] = {}

    def meeting(self) -> bytes | None:
        found = read_small(self._folder / "meeting")
        return found if found is not None and len(found) == MEETING_BYTES else None

    def post(self, line: bytes, message: bytes) -> None:
        self._lines.add(line)
        write_in_place(self._folder / f"{line.hex()}.asked", message)

    def answer(self, line: bytes) -> bytes | None:
        return read_small(self._folder / f"{line.hex()}.answered")

    def close(self) -> None:
        for line in self._lines:
            remove(self._folder / f"{line.hex()}.asked")
            remove(self._folder / f"{line.hex()}.answered")
        if self._lines:
            self._remove_empty()

    def announce(self, meeting: bytes) -> None:
        make_folder(self._folder)
        self._clear()
        write_in_place(self._folder / "meeting", meeting)

    def messages(self) -> Iterator[bytes]:
        names = {name for name in list_names(self._folder) if _MAIL.fullmatch(name) and name.endswith(".asked")}
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            seen, state = self._seen.setdefault(name, _Seen()), None
            with contextlib.suppress(OSError):
                found = (self._folder / name).lstat()
                state = found.st_mtime_ns, found.st_size
            seen.reads = seen.reads + 1 if state == seen.state else 1
            seen.state = state
            if seen.reads > MOST_READS and not seen.had_answer:
                continue
            message = read_small(self._folder / name) or b""
            # The checksum covers the whole message: a half-written one already has its final size and beginning.
            if message and (checksum := zlib.crc32(message)) != seen.checksum:
                seen.checksum = checksum
                yield message

    def reply(self, line: bytes, message: bytes) -> None:
        self._seen.setdefault(f"{line.hex()}.asked", _Seen()).had_answer = True
        write_in_place(self._folder / f"{line.hex()}.answered", message)

    def withdraw(self) -> None:
        self._clear()
        remove(self._folder / "meeting")
        self._remove_empty()

    def _clear(self) -> None:
        for name in filter(_MAIL.fullmatch, list_names(self._folder)):
            remove(self._folder / name)

    def _remove_empty(self) -> None:
        """Remove the folder if nothing is in it. Whichever side leaves last removes it."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


# Where messages lie: the client's end has ``meeting`` to ``close``, the server's ``announce`` to ``withdraw``. Every
# call raises ``StoreError`` if it fails.
MessageBox = StoreBox | FolderBox


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be {what}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Create a folder that only this user can access, unless it exists; raises ``StoreError``."""
    with _explained(path, "made"):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    list_names(path)


def list_names(folder: Path) -> list[str]:
    """Return names of files; raises ``StoreError``, also if the folder is a link: others could point it elsewhere."""
    with _explained(folder, "read"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with os.scandir(opened) as entries:
                return [entry.name for entry in itertools.islice(entries, MAX_NAMES)]
        finally:
            os.close(opened)


def read_small(path: Path) -> bytes | None:
    """Return the content of a file, or None if it is missing, not a regular file, or over the limit."""
    with contextlib.suppress(OSError), os.fdopen(_open(path, os.O_RDONLY), "rb") as file:
        seen = os.fstat(file.fileno())
        if stat.S_ISREG(seen.st_mode) and seen.st_size <= MAX_MESSAGE_BYTES:
            return file.read(MAX_MESSAGE_BYTES + 1)
    return None


def write_in_place(path: Path, data: bytes) -> None:
    """Overwrite a file that others may be reading; raises ``StoreError``."""
    with _explained(path, "written"), os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.write(data)
        file.truncate()


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _open(path: Path, flags: int) -> Any:
    """Open a file without following a link or blocking on a pipe in its place."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
