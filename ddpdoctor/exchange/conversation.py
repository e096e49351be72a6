"""Communication of a job's processes over a store: records, one decision for all, an alarm, a goodbye.

A record is a dataclass. It is packed into a message, signed if the job has a token, split into chunks if it is large,
and checked when it is read. Every wait has a limit. Every call raises ``StoreError`` if the store does not answer.

A message is zlib-compressed JSON behind a header: "DDPD", the version of the format (1 byte), whether it is signed
(1 byte), the length of the payload (4 bytes, big-endian); with a token, an HMAC-SHA256 of all that follows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import signal
import struct
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ddpdoctor.exchange.store import ClockTimes, StoreError, read_times, wait_for, wait_until
from ddpdoctor.model.codec import INTEGERS, WrongValue, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpdoctor.exchange.store import Client, Store

Kind = TypeVar("Kind")

# The version increases when an older reader would misread a message; a new field does not require that.
MAGIC, VERSION = b"DDPD", 1
# Our choice: the facts of a node with 8 GPUs take about 10 KiB; torch's store takes values up to 8 MiB.
MAX_PACKED_BYTES = 4 * 2**20
MAX_PLAIN_BYTES = 32 * 2**20  # our choice: the largest size of an unpacked message
MAX_VALUES = 2**21  # our choice: in 32 MiB of brackets there are lists that take a gigabyte
_HEADER = struct.Struct("!4sBBI")
_SIGNATURE_BYTES = 32
_MOST_DIGITS = 20  # of 64 bits
# Our choice: at 1 Mbit/s a chunk takes 2 s, well within a call's limit. Other requests run between two chunks.
CHUNK_BYTES = 256 * 1024
MAX_BYTES = 64 * 2**20  # Our choice: the most that one sender stores under one key. A server keeps 512 MiB in all.
_DESCRIPTION = struct.Struct("!Q32s")  # what stands at the key of a value in chunks: its size and SHA-256
LOOK_EVERY_S = 0.02
ALARM_LIMIT_S = 5.0  # our choice: the time that a member has to send the reason after it raised the alarm
ROUNDS = 8  # our choice: with this many, at least one round trip meets neither a network queue nor a busy server
# Our choice: over a slow transport (a shared folder) fewer rounds are enough, so that nobody waits long.
ENOUGH_NS = 2_000_000_000
CLOCK_KEY, SHOW_EVERY_S = "clock", 0.1
ENOUGH_VALUES = 5  # the first value may be old, and a busy rank 0 may write some of them late
# Our choice: five values come in half a second, but with thirteen processes per core no two came in 3 s.
OFFSET_LIMIT_S = 20.0
_ALARM = 1_000_000  # an alarm adds this to the counter "news", and a question adds 1, so one read shows both


class BadMessage(Exception):  # noqa: N818 - says what it is
    """Received data is not a message, or must not be read. The text is a phrase that follows "sent"."""


class BadRecord(StoreError):  # noqa: N818 - says what it is
    """A received record cannot be read, or is not signed with this job's token."""

    def __init__(self, sender: str, what: str) -> None:
        super().__init__(f"{sender} sent {what}")
        self.what = what


def pack(plain: Any, token: bytes | None = None) -> bytes:
    """Pack a JSON value into a message; raises ``BadMessage`` if it is larger than a reader accepts."""
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()
    payload = zlib.compress(text, 6)
    if len(text) > MAX_PLAIN_BYTES or len(payload) > MAX_PACKED_BYTES:
        raise BadMessage(f"a message of {len(text)} bytes, which is over the limit")
    message = _HEADER.pack(MAGIC, VERSION, token is not None, len(payload)) + payload
    return message if token is None else message + hmac.digest(token, message, "sha256")


def unpack(message: bytes, token: bytes | None = None) -> Any:
    """Check a message and return its JSON value; raises ``BadMessage``. Nothing is unpickled or run."""
    if len(message) < _HEADER.size or not message.startswith(MAGIC):
        raise BadMessage("something that is not a message of ddpdoctor")
    _, version, signed, length = _HEADER.unpack_from(message)
    if version != VERSION:
        raise BadMessage(f"a message of format {version}; this version of ddpdoctor reads format {VERSION}")
    end = _HEADER.size + length
    if length > MAX_PACKED_BYTES or len(message) != end + _SIGNATURE_BYTES * bool(signed):
        raise BadMessage(f"a message of {len(message)} bytes, which is cut short or over the limit")
    if signed and token is None:
        raise BadMessage("a signed message, but this process has no DDPDOCTOR_TOKEN")
    if token is not None and not signed:
        raise BadMessage("a message that is not signed with this job's token")
    if token is not None and not hmac.compare_digest(hmac.digest(token, message[:end], "sha256"), message[end:]):
        raise BadMessage("a message signed with another token")
    return read_json(decompress(message[_HEADER.size : end], MAX_PLAIN_BYTES))


def read_json(text: bytes) -> Any:
    """Return a JSON value that others sent; raises ``BadMessage``, and for any number that is not an ordinary one.

    Python's own reader takes NaN, Infinity, 1e999 and whole numbers of any length, which raise errors far from here.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise BadMessage(f"a message of more than {MAX_VALUES} values")
    try:
        return json.loads(text, parse_constant=_parse_number, parse_int=_parse_number, parse_float=_parse_number)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"a damaged message ({type(error).__name__} in its JSON)") from None


def decompress(payload: bytes, most_bytes: int) -> bytes:
    """Undo zlib.compress; raises ``BadMessage`` if the payload is damaged or unpacks to more than ``most_bytes``."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(payload, most_bytes)
    except zlib.error as error:
        raise BadMessage(f"a damaged message ({error})") from None
    if unpacker.unconsumed_tail:
        raise BadMessage(f"a message that unpacks to more than {most_bytes} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise BadMessage("a damaged message (its end is not where it should be)")
    return text


def _parse_number(text: str) -> float:
    if not text.removeprefix("-").isdecimal():
        if math.isfinite(number := float(text)):
            return number
    elif len(text) <= _MOST_DIGITS and int(text) in INTEGERS:
        return int(text)
    raise ValueError(text[:_MOST_DIGITS])


class News(NamedTuple):
    """The state of the counter of alarms and questions."""

    alarm: bool
    questions: int


class Conversation:
    """One member's side of the conversation. Threads may share it."""

    def __init__(
        self, store: Store, token: bytes | None = None, *, prefix: str = "",
        turned_away: Callable[[], int] = lambda: 0, first: str = "rank 0", member: str = "rank",
    ) -> None:  # fmt: skip
        """Take an open store and the job's token. All keys begin with ``prefix``.

        ``turned_away`` counts the connections without the token, if this process serves the store. Errors call the
        deciding member ``first``, and any other one ``member`` with its number.
        """
        self.store, self.turned_away, self.prefix = store, turned_away, prefix
        self._token, self._first, self._member = token, first, member
        self._turn = ""
        """The counter that the goodbye increments, so that the next conversation of this name starts with new keys."""

    def begin(self, name: str) -> Conversation:
        """Return the current conversation of this name. Several may follow each other over one store."""
        turn = self.prefix + name
        part = self.part(f"{name}/{self.store.add(turn, 0)}/")
        part._turn = turn  # noqa: SLF001 - of this class
        return part

    def part(self, prefix: str) -> Conversation:
        """Return a conversation over the same store with its own keys."""
        return Conversation(
            self.store, self._token, prefix=self.prefix + prefix, turned_away=self.turned_away, first=self._first,
            member=self._member,
        )  # fmt: skip

    def add(self, key: str, amount: int) -> int:
        return self.store.add(self.prefix + key, amount)

    def send(self, key: str, record: Any) -> None:
        try:
            data = pack(encode(record), self._token)
        except BadMessage as error:
            raise StoreError(f"{key} is {error}") from error
        if len(data) <= CHUNK_BYTES:
            self.store.set(self.prefix + key, data)
        else:
            self.send_bytes(key, data)

    def send_bytes(self, key: str, data: bytes) -> None:
        """Store up to ``MAX_BYTES`` in chunks. The description comes last, so a reader of it finds every chunk."""
        if len(data) > MAX_BYTES:
            raise StoreError(f"{key} is {len(data)} bytes, which is over the limit of {MAX_BYTES}")
        for name, start in zip(self._chunks(key, len(data)), range(0, len(data), CHUNK_BYTES), strict=True):
            self.store.set(name, data[start : start + CHUNK_BYTES])
        self.store.set(self.prefix + key, _DESCRIPTION.pack(len(data), hashlib.sha256(data).digest()))

    def has(self, key: str) -> bool:
        return self.store.get(self.prefix + key) is not None

    def get(self, kind: type[Kind], key: str, sender: str) -> Kind | None:
        """Return a record, or None if there is none yet; raises ``BadRecord``, which names ``sender``."""
        return self.wait(kind, key, 0.0, sender)

    def receive(self, kind: type[Kind], key: str, limit_s: float, sender: str) -> Kind:
        """Wait for a record and return it; raises ``StoreError`` if it does not arrive in time."""
        record = self.wait(kind, key, limit_s, sender)
        if record is None:
            raise StoreError(f"no message from {sender} within {limit_s:g} s")
        return record

    def wait(self, kind: type[Kind], key: str, limit_s: float, sender: str, *, take: bool = False) -> Kind | None:
        """Wait for a record and return it, or None at the time limit. ``take`` frees the server's memory of it."""
        data = wait_for(lambda: self.store.get(self.prefix + key), limit_s)
        if data is None:
            return None
        try:
            return decode(kind, unpack(self._join(key, data), self._token))
        except (BadMessage, WrongValue) as error:
            raise BadRecord(sender, str(error)) from error
        finally:
            if take:
                self._forget(key, data)

    def take_bytes(self, key: str, limit_s: float) -> bytes | None:
        """Wait for bytes, remove them and return them, or None at the time limit. Raises ``BadRecord``."""
        data = wait_for(lambda: self.store.get(self.prefix + key), limit_s)
        if data is None:
            return None
        try:
            return self._join(key, data, must_be_chunks=True)
        finally:
            self._forget(key, data)

    def _join(self, key: str, data: bytes, *, must_be_chunks: bool = False) -> bytes:
        """Return what stands at a key, or in the chunks that it describes."""
        if not must_be_chunks and (len(data) != _DESCRIPTION.size or data.startswith(MAGIC)):
            return data
        size, digest = read_description(key, data)
        joined = b"".join((self.store.get(name) or b"")[:CHUNK_BYTES] for name in self._chunks(key, size))
        if len(joined) != size or hashlib.sha256(joined).digest() != digest:
            raise BadRecord("another process", f"{key}, which arrived damaged")
        return joined

    def _forget(self, key: str, data: bytes) -> None:
        if len(data) == _DESCRIPTION.size and not data.startswith(MAGIC):
            with suppress(BadRecord):
                for name in self._chunks(key, read_description(key, data)[0]):
                    self.store.forget(name)
        self.store.forget(self.prefix + key)

    def _chunks(self, key: str, size: int) -> list[str]:
        return [f"{self.prefix}{key}/{number}" for number in range(-(-size // CHUNK_BYTES))]

    def gather(
        self, kind: type[Kind], key: str, members: Callable[[], Iterable[int]], limit_s: float, *,
        is_over: Callable[[dict[int, Kind]], bool] | None = None,
        on_bad: Callable[[int, BadRecord], None] | None = None,
    ) -> dict[int, Kind]:  # fmt: skip
        """Return the records under KEY/MEMBER that arrive within the limit, by member.

        ``members`` is called before each poll, because members may join or be given up. ``is_over`` decides from the
        records so far when to stop; the default is when none is missing. ``on_bad`` takes a record that cannot be read,
        which then counts as received; without it the error is raised.
        """
        heard: dict[int, Kind] = {}
        bad: set[int] = set()
        deadline = time.monotonic() + limit_s
        while True:
            waiting = [member for member in members() if member not in heard and member not in bad]
            came = 0
            for member in waiting:
                try:
                    record = self.get(kind, f"{key}/{member}", f"{self._member} {member}")
                except BadRecord as error:
                    if on_bad is None:
                        raise
                    on_bad(member, error)
                    bad.add(member)
                    came += 1
                    continue
                if record is not None:
                    heard[member] = record
                    came += 1
            if is_over(heard) if is_over is not None else came == len(waiting):
                return heard
            if not came and time.monotonic() >= deadline:
                return heard
            time.sleep(0 if came else LOOK_EVERY_S)

    def agree(self, kind: type[Kind], key: str, decided: Kind | None, limit_s: float) -> Kind:
        """Return rank 0's decision on every rank. The other ranks pass None and wait for it."""
        if decided is None:
            return self.receive(kind, key, limit_s, self._first)
        self.send(key, decided)
        return decided

    def news(self, amount: int = 0) -> News:
        """Return whether the alarm was raised and how many questions were asked so far."""
        counter = self.add("news", amount)
        return News(alarm=counter >= _ALARM, questions=counter % _ALARM)

    def ask(self) -> int:
        return self.news(1).questions

    def raise_alarm(self, why: Kind) -> Kind:
        """Tell all members to stop; return the alarm that counts, which is another member's if that one came first."""
        if self.add("news", _ALARM) // _ALARM > 1:
            return self.alarm(type(why))
        self.send("alarm", why)
        return why

    def alarm(self, kind: type[Kind]) -> Kind:
        return self.receive(kind, "alarm", ALARM_LIMIT_S, "the rank that raised the alarm")

    def say_goodbye(self, word: Any, others: Callable[[], int], limit_s: float, *, ends_process: bool = False) -> None:
        """Send the last record, and wait until ``others`` members have confirmed it or the limit has passed.

        The wait is needed because this process may serve the store, which ends with it. With ``ends_process``, SIGTERM
        is ignored from here on: torchrun sends it to the other ranks when one fails, and a rank that is about to exit
        should do so by itself.
        """
        if self._turn:
            self.store.add(self._turn, 1)
        self.send("goodbye", word)
        if ends_process:
            _ignore_sigterm()
        with suppress(StoreError):
            wait_until(lambda: self.add("heard", 0) >= others(), limit_s, LOOK_EVERY_S)

    def hear_goodbye(self, kind: type[Kind], limit_s: float, *, ends_process: bool = False) -> Kind | None:
        """Confirm the last record and return it, or None if it does not arrive in time."""
        word = self.wait(kind, "goodbye", limit_s, self._first)
        if ends_process:
            _ignore_sigterm()
        with suppress(StoreError):  # the sender may have exited by now, and its store with it
            self.add("heard", 1)
        return word


def read_description(key: str, description: bytes) -> tuple[int, bytes]:
    """Return the size and SHA-256 of a value that is stored in chunks; raises ``BadRecord``."""
    if len(description) != _DESCRIPTION.size:
        raise BadRecord("another process", f"{key}, whose chunks are not described correctly")
    size, digest = _DESCRIPTION.unpack(description)
    if size > MAX_BYTES:
        raise BadRecord("another process", f"{key} of {size} bytes, which is over the limit of {MAX_BYTES}")
    return size, digest


def _ignore_sigterm() -> None:
    with suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


# The clocks of two hosts.
#
# ddpdoctor's own server answers with its clocks (``measure_clocks``). This is Cristian's algorithm: it assumes that the
# server read its clocks in the middle of the round trip. The error is at most half of the round trip, so the shortest
# of several round trips counts.
#
# A torch store has no clock. There rank 0 writes its time to one key ten times a second (``shown_clock``), and a reader
# polls that key (``measure_offset``). Each new value is at most one pause and one trip old. So the smallest of several
# differences is the offset, and it is too large by no more than that. An error of a few hundredths of a second is fine.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """This host's clocks minus those of the server's host."""

    wall_s: float
    monotonic_ns: int
    error_ns: int  # half of the shortest round trip: the largest possible error of the offsets


def measure_clocks(client: Client, read: Callable[[], ClockTimes] = read_times) -> ClockOffset:
    """Return the offset measured in the shortest of several round trips; raises ``StoreError``."""
    offsets: list[ClockOffset] = []
    began_ns = read().monotonic_ns
    for _ in range(ROUNDS):
        before, theirs, after = read(), client.now(), read()
        # Somebody may set the wall clock during the call, so the monotonic clock gives the middle.
        half_ns = (after.monotonic_ns - before.monotonic_ns) // 2
        offsets.append(
            ClockOffset(
                wall_s=(before.wall_ns + half_ns - theirs.wall_ns) / 1e9,
                monotonic_ns=before.monotonic_ns + half_ns - theirs.monotonic_ns,
                error_ns=half_ns + 1,
            )
        )
        if after.monotonic_ns - began_ns > ENOUGH_NS:
            break
    return min(offsets, key=lambda offset: offset.error_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _WallClock:
    """Rank 0's wall clock, in seconds since 1970."""

    now_s: float


@contextmanager
def shown_clock(conversation: Conversation) -> Iterator[None]:
    ended = threading.Event()

    def show() -> None:
        with suppress(StoreError):
            while not ended.is_set():
                conversation.send(CLOCK_KEY, _WallClock(now_s=time.time()))
                ended.wait(SHOW_EVERY_S)

    thread = threading.Thread(target=show, name="ddpdoctor-clock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)


def measure_offset(conversation: Conversation) -> float | None:
    """Return how many seconds this clock is ahead of rank 0's, or None if rank 0 does not publish its clock."""
    deadline = time.monotonic() + OFFSET_LIMIT_S
    differences: list[float] = []
    former: _WallClock | None = None
    while len(differences) < ENOUGH_VALUES and time.monotonic() < deadline:
        shown = conversation.get(_WallClock, CLOCK_KEY, "rank 0's clock")
        seen_s = time.time()
        # The age of the first value is unknown.
        if shown is not None and former is not None and shown != former:
            differences.append(seen_s - shown.now_s)
        former = shown or former
        time.sleep(LOOK_EVERY_S)
    return min(differences, default=None)
