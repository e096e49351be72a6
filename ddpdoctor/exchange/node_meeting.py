"""One meeting for a job of many hosts, and three ways to it: the first member's own port, a store, a shared folder.

The first member serves it. Where its port does not get through, requests travel as messages: by the job's own store, or
by a folder that all hosts see.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.exchange.client import ServerClient, open_client
from ddpdoctor.exchange.folder_mailbox import FolderInbox, FolderOutbox
from ddpdoctor.exchange.forwarding import Forwarder, MailboxClient
from ddpdoctor.exchange.heartbeats import MAX_NOTICE_BYTES
from ddpdoctor.exchange.protocol import LENGTH, Operation, pack_request
from ddpdoctor.exchange.racing import Runner, race
from ddpdoctor.exchange.reach import tell
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.store_mailbox import StoreInbox, StoreOutbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.forwarding import Inbox, Outbox
    from ddpdoctor.exchange.heartbeats import Heard
    from ddpdoctor.exchange.reach import Failures
    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.reaching import Connecting

SERVED_BY = "the first node"
PAUSE_S = 0.2
KNOCK_S = 1.0
"""Ours: what a meeting that is shown may take to answer; one that ended without a word never does."""


@dataclass(frozen=True, slots=True)
class OwnPort:
    """The port of ddpdoctor's own, at any of some names or addresses of the first member's host."""

    hosts: tuple[str, ...]
    port: int

    name = "own port"


@dataclass(frozen=True, slots=True)
class OverStore:
    """A store of somebody else's. ``open_it`` connects to it within a limit, or raises ``StoreError``."""

    open_it: Callable[[float], Store]

    name = "store"


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that all hosts see."""

    path: Path

    name = "folder"


@dataclass(frozen=True, slots=True)
class OtherPort:
    """Another port of the first member's, of which it has left word somewhere. ``open_it`` reads that, and connects."""

    open_it: Callable[[float], Client]

    name = "word"


Way = OwnPort | OverStore | OtherPort | Folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A way that did not get through."""

    way: str
    """Its name: "own port", "store", "word", "folder"."""
    words: str
    """What was seen: a phrase."""
    attempts: tuple[Connecting, ...] = ()
    """The last one at each address, of the own port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMeeting:
    """The meeting, by the first way that got through."""

    store: Client
    way: str
    """Its name."""
    tried: tuple[Tried, ...]
    """Those that stand before it, and had not got through."""
    open: Callable[[float], Client]
    """Connects once more by the same way within a limit; raises ``StoreError``."""


class NoMeeting(StoreError):  # noqa: N818 - says what it is
    """No way got through."""

    def __init__(self, tried: tuple[Tried, ...]) -> None:
        """Say what each way saw."""
        super().__init__("; ".join(f"by {one.way}: {one.words}" for one in tried) or "no way is known")
        self.tried = tried


class HostedMeeting:
    """A context in which this process serves the meeting."""

    def __init__(self, port: int | None, token: bytes, *, one_host: bool = False) -> None:
        """Take the port to listen on: 0 for any that is free, None for none at all (other ways only)."""
        self.not_listening = ""
        """Why the port cannot be had, inside of the context: a phrase. The other ways are served all the same."""
        self._port, self._token, self._one_host = port, token, one_host
        self._server: Server | None = None
        self._forwarders: list[Forwarder] = []
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Serve."""
        try:
            self._server = Server(self._port, self._token, one_host=self._one_host)
        except StoreError as error:
            self.not_listening = str(error)
            self._server = Server(None, self._token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving, on every way."""
        for forwarder in self._forwarders:
            forwarder.close()
        self._opened.close()
        self._serving.close()

    @property
    def port(self) -> int:
        """Where it listens; 0 where it does not."""
        return self._serving.port

    @property
    def strangers(self) -> int:
        """How many connections were turned away for want of the token."""
        return self._serving.strangers

    def store(self) -> Client:
        """Return a connection of this process to its own meeting."""
        client = ServerClient(self._serving.admit(), SERVED_BY)
        self._opened.callback(client.close)
        return client

    def listen_also(self) -> int:
        """Serve on one more port, any that is free; return it. Raises ``StoreError``."""
        return self._serving.listen_also()

    def serve_over(self, store: Store) -> Forwarder:
        """Take also the requests that others leave in a store, which the meeting owns from now on."""
        return self._forward(StoreInbox(store))

    def serve_folder(self, path: Path) -> Forwarder:
        """Take also the requests that others leave in a shared folder."""
        return self._forward(FolderInbox(path))

    def heard(self) -> dict[str, Heard]:
        """Return who was heard, by the name under which each beats."""
        return self._serving.presences.heard()

    def announce(self, notice: bytes) -> None:
        """Show a few bytes to every member, with the answer to its next beat."""
        if len(notice) > MAX_NOTICE_BYTES:
            raise StoreError(f"a notice of {len(notice)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        self._serving.presences.notice = notice

    def _forward(self, inbox: Inbox) -> Forwarder:
        forwarder = Forwarder(inbox, self.store().ask, self._token)
        self._forwarders.append(forwarder)
        forwarder.start()
        return forwarder

    @property
    def _serving(self) -> Server:
        assert self._server is not None, "outside of its context"
        return self._server


def find_meeting(ways: Sequence[Way], token: bytes, limit_s: float) -> FoundMeeting:
    """Try all ways at the same time, again and again; return the meeting by the best one that gets through.

    ``ways`` stand in the order in which they are wanted. Raises ``NoMeeting`` where none has got through by the limit.
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
    words = tell(seen) or ("no answer in time" if runner.error is None else str(runner.error))
    return Tried(way=way.name, words=words, attempts=attempts)


def open_meeting(way: Way, token: bytes, limit_s: float, *, seen: Failures | None = None) -> Client:
    """Connect to the meeting by one way; raises ``StoreError`` with what was seen. ``seen`` is kept as in ``reach``."""
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
    """Say whether a shared folder shows a meeting, which may have ended without a word."""
    return FolderOutbox(path).meeting() is not None


def _knock(outbox: Outbox, token: bytes, limit_s: float) -> MailboxClient:
    """Return the meeting that answers by message; what is shown may be one that has ended, so it is looked at again."""
    deadline = time.monotonic() + limit_s
    request = pack_request(Operation.NOW, "now", b"")[LENGTH.size :]
    seen = "nobody serves it"
    while (left_s := deadline - time.monotonic()) > 0:
        shown = outbox.meeting()
        if shown is None:
            time.sleep(min(PAUSE_S, left_s))
            continue
        client = MailboxClient(outbox, shown, token, SERVED_BY)
        try:
            client.ask_within(request, min(KNOCK_S, left_s))
        except StoreError:
            seen = "who serves it does not answer, or does not hold the same token (DDPDOCTOR_TOKEN)"
            continue
        return client
    raise StoreError(seen)
