"""Connects the members of a job on many hosts to one server, the "meeting", which the first member runs.

There are several ways to it. If the first member's own port cannot be reached, requests travel as messages through the
job's own store or through a folder that all hosts see.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.exchange.client import ServerClient, open_client
from ddpdoctor.exchange.folder_mailbox import FolderInbox, FolderOutbox
from ddpdoctor.exchange.forwarding import Forwarder, MailboxClient
from ddpdoctor.exchange.heartbeats import MAX_NOTICE_BYTES
from ddpdoctor.exchange.protocol import LENGTH, RequestType, pack_request
from ddpdoctor.exchange.racing import Runner, race
from ddpdoctor.exchange.reach import describe_failures
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.store_mailbox import StoreInbox, StoreOutbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.forwarding import Inbox, Outbox
    from ddpdoctor.exchange.heartbeats import Heard
    from ddpdoctor.exchange.reach import Failures
    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.reaching import Connecting

SERVED_BY = "the first node"
PAUSE_S = 0.2
KNOCK_S = 1.0
"""Our choice: the time that an announced meeting has to answer. One that crashed never answers."""


@dataclass(frozen=True, slots=True)
class OwnPort:
    """ddpdoctor's own port on the first member's host, which is tried at several names or addresses."""

    hosts: tuple[str, ...]
    port: int

    name = "own port"


@dataclass(frozen=True, slots=True)
class OverStore:
    """A store that somebody else serves. ``open_it`` connects to it within a limit, or raises ``StoreError``."""

    open_it: Callable[[float], Store]

    name = "store"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that all hosts see."""

    path: Path

    name = "folder"


@dataclass(frozen=True, slots=True)
class OtherPort:
    """Another port of the first member, which it published somewhere. ``open_it`` reads it from there and connects."""

    open_it: Callable[[float], Client]

    name = "word"


Way = OwnPort | OverStore | OtherPort | Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A way that failed."""

    way: str
    """Its name: "own port", "store", "word", "folder"."""
    words: str
    """Why it failed: a phrase."""
    attempts: tuple[Connecting, ...] = ()
    """For the own port, the last attempt at each address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMeeting:
    """A connection to the meeting over the best way that worked."""

    store: Client
    way: str
    """The name of that way."""
    tried: tuple[Tried, ...]
    """The preferred ways that had not worked by then."""
    open: Callable[[float], Client]
    """Opens another connection over the same way within a limit; raises ``StoreError``."""


class NoMeeting(StoreError):  # noqa: N818 - says what it is
    """No way to the meeting worked."""

    def __init__(self, tried: tuple[Tried, ...]) -> None:
        """Put the reason of each way into the message."""
        super().__init__("; ".join(f"by {one.way}: {one.words}" for one in tried) or "no way is known")
        self.tried = tried


class HostedMeeting(ExitStack):
    """Serves the meeting from this process until it is closed, or the context ends."""

    def __init__(self, port: int | None, token: bytes, *, one_host: bool = False) -> None:
        """Start. ``port`` is the port to listen on: 0 for any free one, None for none (other ways only)."""
        super().__init__()
        self.not_listening = ""
        """Why the port cannot be used: a phrase. The other ways are served all the same."""
        self._token = token
        try:
            self._server = Server(port, token, one_host=one_host)
        except StoreError as error:
            self.not_listening = str(error)
            self._server = Server(None, token)
        self.callback(self._server.close)

    @property
    def port(self) -> int:
        """The port that it listens on, or 0 if none."""
        return self._server.port

    @property
    def strangers(self) -> int:
        """How many connections were rejected because they lacked the token."""
        return self._server.strangers

    def store(self) -> Client:
        """Open a connection from this process to its own meeting."""
        return self.enter_context(closing(ServerClient(self._server.admit(), SERVED_BY)))

    def listen_also(self) -> int:
        """Listen on one more free port and return it. Raises ``StoreError``."""
        return self._server.listen_also()

    def serve_over(self, store: Store) -> Forwarder:
        """Also answer requests that arrive through a store. The meeting takes ownership of the store."""
        return self._forward(StoreInbox(store))

    def serve_folder(self, path: Path) -> Forwarder:
        """Also answer requests that arrive through a shared folder."""
        return self._forward(FolderInbox(path))

    def heard(self) -> dict[str, Heard]:
        """Return every member that has beaten, by the name under which it beats."""
        return self._server.heartbeats.heard()

    def announce(self, notice: bytes) -> None:
        """Send a few bytes to every member in the answer to its next beat."""
        if len(notice) > MAX_NOTICE_BYTES:
            raise StoreError(f"a notice of {len(notice)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        self._server.heartbeats.notice = notice

    def _forward(self, inbox: Inbox) -> Forwarder:
        forwarder = self.enter_context(closing(Forwarder(inbox, self.store().ask, self._token)))
        forwarder.start()
        return forwarder


def find_meeting(ways: Sequence[Way], token: bytes, limit_s: float) -> FoundMeeting:
    """Try all ways at the same time, repeatedly; return the meeting over the best one that works.

    ``ways`` are in order of preference. Raises ``NoMeeting`` if none has worked within the limit.
    """
    deadline = time.monotonic() + limit_s
    seen: list[Failures] = [{} for _ in ways]
    runners = [
        Runner(partial(open_meeting, way, token, seen=failures), deadline)
        for way, failures in zip(ways, seen, strict=True)
    ]
    best = race(runners, deadline)
    tried = tuple(map(_tried, ways, runners, seen))
    if best is None:
        raise NoMeeting(tried)
    place = runners.index(best)
    assert best.found is not None
    way = ways[place]
    return FoundMeeting(store=best.found, way=way.name, tried=tried[:place], open=partial(open_meeting, way, token))


def _tried(way: Way, runner: Runner, seen: Failures) -> Tried:
    attempts = tuple(seen.values())
    words = describe_failures(seen) or ("no answer in time" if runner.error is None else str(runner.error))
    return Tried(way=way.name, words=words, attempts=attempts)


def open_meeting(way: Way, token: bytes, limit_s: float, *, seen: Failures | None = None) -> Client:
    """Connect to the meeting over one way; raises ``StoreError`` with the reason. For ``seen``, see ``reach``."""
    if isinstance(way, OwnPort):
        return open_client(way.hosts, way.port, token, limit_s, served_by=SERVED_BY, seen=seen)
    if isinstance(way, OtherPort):
        return way.open_it(limit_s)
    deadline = time.monotonic() + limit_s
    outbox: Outbox = StoreOutbox(way.open_it(limit_s)) if isinstance(way, OverStore) else FolderOutbox(way.path)
    try:
        return _knock(outbox, token, max(deadline - time.monotonic(), KNOCK_S))
    except BaseException:
        outbox.close()
        raise


def is_shown(path: Path) -> bool:
    """Return whether a shared folder announces a meeting. That meeting may have crashed since."""
    return FolderOutbox(path).meeting() is not None


def _knock(outbox: Outbox, token: bytes, limit_s: float) -> MailboxClient:
    """Return a client of the announced meeting once it answers.

    The announcement may be of a meeting that has ended, so it is read again after each failure.
    """
    deadline = time.monotonic() + limit_s
    request = pack_request(RequestType.NOW, "now", b"")[LENGTH.size :]
    seen = "it has no server"
    while (left_s := deadline - time.monotonic()) > 0:
        shown = outbox.meeting()
        if shown is None:
            time.sleep(min(PAUSE_S, left_s))
            continue
        client = MailboxClient(outbox, shown, token, SERVED_BY)
        try:
            client.ask_within(request, min(KNOCK_S, left_s))
        except StoreError:
            seen = "its server does not answer, or has another token (DDPDOCTOR_TOKEN)"
            continue
        return client
    raise StoreError(seen)
