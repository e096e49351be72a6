"""One room for a job of many hosts, and three ways to it: the first member's own port, a store, a shared folder.

The room is a hub in the process of the first member. Where its port does not get through, requests travel as letters by
what does: the job's own store, or a folder that all hosts see.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.exchange.hub import Hub
from ddpdoctor.exchange.hub_store import HubStore, open_hub_store
from ddpdoctor.exchange.hub_wire import LENGTH, Operation, pack_request
from ddpdoctor.exchange.letters_in_folder import FolderInbox, FolderOutbox
from ddpdoctor.exchange.letters_in_store import StoreInbox, StoreOutbox
from ddpdoctor.exchange.presence import MAX_NOTICE_BYTES
from ddpdoctor.exchange.racing import Runner, race
from ddpdoctor.exchange.reach import tell
from ddpdoctor.exchange.relay import LetterRoom, Relay
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.asking import Room
    from ddpdoctor.exchange.letters import Inbox, Outbox
    from ddpdoctor.exchange.presence import Heard
    from ddpdoctor.exchange.reach import Failures
    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.reaching import Connecting

SERVED_BY = "the first node"
PAUSE_S = 0.2
KNOCK_S = 1.0
"""Ours: what a room that is shown may take to answer; one that ended without a word never does."""


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
class ByWord:
    """Another port of the first member's, of which it has left word somewhere. ``open_it`` reads that, and connects."""

    open_it: Callable[[float], Room]

    name = "word"


Way = OwnPort | OverStore | ByWord | Folder


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
class FoundRoom:
    """The room, by the first way that got through."""

    store: Room
    way: str
    """Its name."""
    tried: tuple[Tried, ...]
    """Those that stand before it, and had not got through."""
    open: Callable[[float], Room]
    """Connects once more by the same way within a limit; raises ``StoreError``."""


class NoRoom(StoreError):  # noqa: N818 - says what it is
    """No way got through."""

    def __init__(self, tried: tuple[Tried, ...]) -> None:
        """Say what each way saw."""
        super().__init__("; ".join(f"by {one.way}: {one.words}" for one in tried) or "no way is known")
        self.tried = tried


class HostedRoom:
    """A context in which this process serves the room."""

    def __init__(self, port: int | None, token: bytes, *, one_host: bool = False) -> None:
        """Take the port to listen on: 0 for any that is free, None for none at all (other ways only)."""
        self.not_listening = ""
        """Why the port cannot be had, inside of the context: a phrase. The other ways are served all the same."""
        self._port, self._token, self._one_host = port, token, one_host
        self._hub: Hub | None = None
        self._relays: list[Relay] = []
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        """Serve."""
        try:
            self._hub = Hub(self._port, self._token, one_host=self._one_host)
        except StoreError as error:
            self.not_listening = str(error)
            self._hub = Hub(None, self._token)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving, on every way."""
        for relay in self._relays:
            relay.close()
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

    def store(self) -> Room:
        """Return a connection of this process to its own room."""
        room = HubStore(self._serving.admit(), SERVED_BY)
        self._opened.callback(room.close)
        return room

    def listen_also(self) -> int:
        """Serve on one more port, any that is free; return it. Raises ``StoreError``."""
        return self._serving.listen_also()

    def serve_over(self, store: Store) -> Relay:
        """Take also the requests that others leave in a store, which the room owns from now on."""
        return self._relay(StoreInbox(store))

    def serve_folder(self, path: Path) -> Relay:
        """Take also the requests that others leave in a shared folder."""
        return self._relay(FolderInbox(path))

    def heard(self) -> dict[str, Heard]:
        """Return who was heard, by the name under which each beats."""
        return self._serving.presences.heard()

    def announce(self, notice: bytes) -> None:
        """Show a few bytes to every member, with the answer to its next beat."""
        if len(notice) > MAX_NOTICE_BYTES:
            raise StoreError(f"a notice of {len(notice)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        self._serving.presences.notice = notice

    def _relay(self, inbox: Inbox) -> Relay:
        relay = Relay(inbox, self.store().ask, self._token)
        self._relays.append(relay)
        relay.start()
        return relay

    @property
    def _serving(self) -> Hub:
        assert self._hub is not None, "outside of its context"
        return self._hub


def find_room(ways: Sequence[Way], token: bytes, limit_s: float) -> FoundRoom:
    """Try all ways at the same time, again and again; return the room by the best one that gets through.

    ``ways`` stand in the order in which they are wanted. Raises ``NoRoom`` where none has got through by the limit.
    """
    deadline = time.monotonic() + limit_s
    seen: list[Failures] = [{} for _ in ways]
    runners = [
        Runner(partial(open_room, way, token, seen=failures), deadline)
        for way, failures in zip(ways, seen, strict=True)
    ]
    best = race(runners, deadline)
    tried = tuple(map(_tried, ways, runners, seen))
    if best is None:
        raise NoRoom(tried)
    place = runners.index(best)
    assert best.found is not None
    way = ways[place]
    return FoundRoom(store=best.found, way=way.name, tried=tried[:place], open=partial(open_room, way, token))


def _tried(way: Way, runner: Runner, seen: Failures) -> Tried:
    attempts = tuple(seen.values())
    words = tell(seen) or ("no answer in time" if runner.error is None else str(runner.error))
    return Tried(way=way.name, words=words, attempts=attempts)


def open_room(way: Way, token: bytes, limit_s: float, *, seen: Failures | None = None) -> Room:
    """Connect to the room by one way; raises ``StoreError`` with what was seen. ``seen`` is kept as in ``reach``."""
    if isinstance(way, OwnPort):
        return open_hub_store(way.hosts, way.port, token, limit_s, served_by=SERVED_BY, seen=seen)
    if isinstance(way, ByWord):
        return way.open_it(limit_s)
    deadline = time.monotonic() + limit_s
    outbox: Outbox = StoreOutbox(way.open_it(limit_s)) if isinstance(way, OverStore) else FolderOutbox(way.path)
    try:
        return _knock(outbox, token, max(deadline - time.monotonic(), KNOCK_S))
    except BaseException:
        outbox.close()
        raise


def is_shown(path: Path) -> bool:
    """Say whether a shared folder shows a room, which may have ended without a word."""
    return FolderOutbox(path).room() is not None


def _knock(outbox: Outbox, token: bytes, limit_s: float) -> LetterRoom:
    """Return the room that answers by letter; what is shown may be one that has ended, so it is looked at again."""
    deadline = time.monotonic() + limit_s
    request = pack_request(Operation.NOW, "now", b"")[LENGTH.size :]
    seen = "nobody serves it"
    while (left_s := deadline - time.monotonic()) > 0:
        shown = outbox.room()
        if shown is None:
            time.sleep(min(PAUSE_S, left_s))
            continue
        room = LetterRoom(outbox, shown, token, SERVED_BY)
        try:
            room.ask_within(request, min(KNOCK_S, left_s))
        except StoreError:
            seen = "who serves it does not answer, or does not hold the same token (DDPDOCTOR_TOKEN)"
            continue
        return room
    raise StoreError(seen)
