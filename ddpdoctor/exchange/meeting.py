"""Connects the processes of a job: its ranks over one store (``meet``), its nodes over any way that works.

Nodes connect to a server that the first of them runs. If its own port cannot be reached, requests travel as messages
through the job's own store or through a folder that all hosts see.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpdoctor.exchange import mailbox
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.reach import describe_failures
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.store import MAX_NOTICE_BYTES, KeyValues, StoreError
from ddpdoctor.exchange.wire import NO_TOKEN, job_token, open_client
from ddpdoctor.model.node import Launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.exchange.reach import Failures
    from ddpdoctor.exchange.store import Client, Store
    from ddpdoctor.model.launch import Connecting, Launch

SERVED_BY = "the first node"
OTHER_PORT = "word"  # the name of the way that costs the job's store a question


@contextmanager
def meet(launch: Launch, env: Mapping[str, str], limit_s: float) -> Iterator[Conversation]:
    """Yield the conversation of a job's ranks, over the launcher's store if it serves one, else over one of rank 0's.

    With both of torchrun's rendezvous, static and c10d, the agent of node 0 serves a store at MASTER_ADDR:MASTER_PORT
    for as long as that agent lives. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 must serve it.

    Raises ``StoreError`` with what was tried and seen if rank 0 cannot be reached or cannot listen on its port.
    """
    token = job_token(launch, env)
    if not launch.gathers:
        yield Conversation(KeyValues(), token)
        return
    serves = launch.rank == 0 and not launch.agent_store
    with ExitStack() as opened:
        if launch.launcher is Launcher.TORCHRUN:
            # The C++ log of torch, if it is loaded after this, calls it an error that a peer leaves.
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
            torchs = _serve_torch_store(launch, limit_s) if serves else None
            store = open_job_store(launch.hosts[0], launch.port, f"ddpdoctor/{launch.run}/", limit_s)
            yield Conversation(opened.enter_context(closing(store)), token)
            del torchs  # it serves as long as it is referred to
        elif serves:
            server = opened.enter_context(closing(Server(launch.port, token or NO_TOKEN, one_host=launch.nnodes == 1)))
            yield Conversation(server.values, token, turned_away=lambda: server.strangers)
        else:
            client = open_client(launch.hosts, launch.port, token or NO_TOKEN, limit_s)
            yield Conversation(opened.enter_context(closing(client)), token)


def _serve_torch_store(launch: Launch, limit_s: float) -> Any:
    """Serve the store that init_process_group will use in this process too."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(
            launch.hosts[0], launch.port, is_master=True, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=limit_s),
        )  # fmt: skip
    except RuntimeError as error:
        raise StoreError(f"cannot listen on port {launch.port}: {str(error).partition(chr(10))[0]}") from error


class HostedMeeting(ExitStack):
    """Serves the meeting from this process until it is closed, or the context ends."""

    def __init__(self, port: int | None, token: bytes, *, one_host: bool = False) -> None:
        """Start. ``port`` is the port to listen on: 0 for any free one, None for none (other ways only)."""
        super().__init__()
        self.not_listening = ""
        """Why the port cannot be used: a phrase. The other ways are served anyway."""
        self._token = token
        try:
            self.server = Server(port, token, one_host=one_host)
        except StoreError as error:
            self.not_listening = str(error)
            self.server = Server(None, token)
        self.callback(self.server.close)
        self.port, self.values = self.server.port, self.server.values
        """The port that it listens on, or 0 if none; and this process's own view of its meeting."""

    def serve_over(self, store: Store) -> mailbox.Forwarder:
        """Also answer requests that arrive through a store. The meeting takes ownership of the store."""
        return self._forward(mailbox.StoreBox(store))

    def serve_folder(self, path: Path) -> mailbox.Forwarder:
        return self._forward(mailbox.FolderBox(path))

    def announce(self, notice: bytes) -> None:
        """Send a few bytes to every member in the answer to its next beat."""
        if len(notice) > MAX_NOTICE_BYTES:
            raise StoreError(f"a notice of {len(notice)} bytes is over the limit of {MAX_NOTICE_BYTES}")
        self.values.notice = notice

    def _forward(self, box: mailbox.MessageBox) -> mailbox.Forwarder:
        return self.enter_context(closing(mailbox.Forwarder(box, self.values, self._token).start()))


@dataclass(frozen=True, slots=True)
class MeetingWay:
    """A way to the meeting."""

    name: str
    # Takes the token, a limit in seconds and ``seen`` (see ``reach``), and connects; raises ``StoreError``.
    open: Callable[..., Client]


def by_port(hosts: tuple[str, ...], port: int) -> MeetingWay:
    """Return the way over ddpdoctor's own port on the first member's host, at several names or addresses."""
    return MeetingWay("own port", partial(open_client, hosts, port, served_by=SERVED_BY))


def by_other_port(open_it: Callable[[float], Client]) -> MeetingWay:
    """Return the way over a port that the first member published somewhere; ``open_it`` reads it there and connects."""
    return MeetingWay(OTHER_PORT, lambda _token, limit_s, **_: open_it(limit_s))


def by_store(open_it: Callable[[float], Store]) -> MeetingWay:
    """Return the way over a store that another process serves, which ``open_it`` connects to within a limit."""
    knock, box = mailbox.knock, mailbox.StoreBox
    return MeetingWay("store", lambda token, limit_s, **_: knock(box(open_it(limit_s)), token, limit_s, SERVED_BY))


def by_folder(path: Path) -> MeetingWay:
    box = mailbox.FolderBox
    return MeetingWay("folder", lambda token, limit_s, **_: mailbox.knock(box(path), token, limit_s, SERVED_BY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A way that failed."""

    way: str
    words: str  # why it failed: a phrase
    attempts: tuple[Connecting, ...] = ()  # for the own port, the last attempt at each address


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMeeting:
    """A connection to the meeting over the best way that worked."""

    store: Client
    way: str
    tried: tuple[Tried, ...]  # the preferred ways that had not worked by then
    open: Callable[[float], Client]  # opens another connection over the same way within a limit; raises ``StoreError``


class NoMeeting(StoreError):  # noqa: N818 - says what it is
    """No way to the meeting worked."""

    def __init__(self, tried: tuple[Tried, ...]) -> None:
        super().__init__("; ".join(f"by {attempt.way}: {attempt.words}" for attempt in tried) or "no known way")
        self.tried = tried


def find_meeting(ways: Sequence[MeetingWay], token: bytes, limit_s: float) -> FoundMeeting:
    """Try all ways at the same time, repeatedly; return the meeting over the best one that works.

    ``ways`` are in order of preference. Raises ``NoMeeting`` if none has worked within the limit.
    """
    seen: list[Failures] = [{} for _ in ways]
    openers = [partial(way.open, token, seen=failures) for way, failures in zip(ways, seen, strict=True)]
    raced = race(openers, limit_s)
    tried = tuple(
        Tried(
            way=way.name, attempts=tuple(failures.values()),
            words=describe_failures(failures) or raced.errors.get(place, "no answer in time"),
        )
        for place, (way, failures) in enumerate(zip(ways, seen, strict=True))
    )  # fmt: skip
    if raced.best is None or raced.client is None:
        raise NoMeeting(tried)
    way = ways[raced.best]
    return FoundMeeting(
        store=raced.client, way=way.name, tried=tried[: raced.best], open=partial(way.open, token)
    )  # fmt: skip


TRY_S = 3.0  # Our choice: the limit of one attempt. After it, a runner checks whether it was stopped.
BETTER_WITHIN_S = 1.0  # our choice: once one way works, how long a preferred one may still take
# Our choice: an attempt ends by itself at the deadline, on a busy host later. Its error says more than none.
LATE_S = 1.0
PAUSE_S = 0.2


class Raced(NamedTuple):
    """How a race ended: the place of the best that works, its client, and the last error at each place."""

    best: int | None
    client: Client | None
    errors: dict[int, str]


def race(openers: Sequence[Callable[[float], Client]], limit_s: float) -> Raced:
    """Open all at the same time, repeatedly, each in a thread; return the most preferred that works, and the errors.

    Once one works, the preferred ones get ``BETTER_WITHIN_S`` more. What opens after the race is closed again.
    """
    deadline = until = time.monotonic() + limit_s
    until += LATE_S
    over, change = threading.Event(), threading.Condition()
    found: dict[int, Client] = {}
    errors: dict[int, str] = {}
    ended: set[int] = set()

    def run(place: int) -> None:
        while not over.is_set() and (left_s := deadline - time.monotonic()) > 0:
            try:
                client = openers[place](min(TRY_S, left_s))
            except StoreError as error:
                errors[place] = str(error)
                over.wait(PAUSE_S)
                continue
            with change:
                if over.is_set():
                    client.close()
                else:
                    found[place] = client
            break
        with change:
            ended.add(place)
            change.notify_all()

    for place in range(len(openers)):
        threading.Thread(target=run, args=(place,), name="ddpdoctor-find", daemon=True).start()
    best: int | None = None
    with change:
        try:
            while not ended.issuperset(range(min(found, default=len(openers)))) and time.monotonic() < until:
                if found:
                    until = min(until, time.monotonic() + BETTER_WITHIN_S)
                change.wait(max(0.0, until - time.monotonic()))
            best = min(found, default=None)
        finally:
            over.set()
            for place, client in found.items():
                if place != best:
                    client.close()
    return Raced(best, None if best is None else found[best], errors)


# Who serves in a shared folder if the first node never comes
RAISE_EVERY_S = 0.5
# Our choice: six increments. A member waits this long to see the others, and one that is silent this long is gone.
SETTLE_S = 3.0
_HERE = re.compile(r"here-([0-9]{8}|x)-[0-9a-f]{16}")


def find_deputy(path: Path, token: bytes, number: int | None, limit_s: float) -> Client | None:
    """Return the meeting that a lower member serves in a shared folder, or None if this member must serve it.

    ``number`` is the member's place in the job; members without one come after all that have one. Raises ``StoreError``
    if a lower member is present but serves nothing within the limit.
    """
    deadline = time.monotonic() + limit_s
    with closing(ServerCandidate(path, number)) as candidate:
        while time.monotonic() < deadline:
            candidate.update()
            if mailbox.FolderBox(path).meeting() is not None:
                with contextlib.suppress(StoreError):
                    return by_folder(path).open(token, SETTLE_S)
            if candidate.is_lowest:
                return None
            time.sleep(RAISE_EVERY_S)
    raise StoreError("a node with a lower number has joined but serves no store")


class ServerCandidate:
    """This member's part in the election: its own file in the folder, with a counter that it increments.

    If a file stops changing, its member is gone. No clocks are compared: each member relies on the changes that it saw
    itself.
    """

    def __init__(self, path: Path, number: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = path / mailbox.FOLDER, clock
        self._name = f"here-{'x' if number is None else f'{number:08d}'}-{os.urandom(8).hex()}"
        self._raised, self._began_s = 0, clock()
        self._others: dict[str, tuple[bytes, float | None]] = {}
        """By file name, its content, and when this process last saw it change."""
        mailbox.make_folder(self._folder)

    def update(self) -> None:
        """Increment this member's counter, and note which other files have changed."""
        self._raised += 1
        mailbox.write_in_place(self._folder / self._name, b"%d" % self._raised)
        for name in filter(_HERE.fullmatch, mailbox.list_names(self._folder)):
            content = (mailbox.read_small(self._folder / name) or b"")[:64]
            known = self._others.get(name)
            if known is None or known[0] != content:
                self._others[name] = content, known and self._clock()

    @property
    def is_lowest(self) -> bool:
        """Whether enough time has passed to see the others, and none of those present is lower."""
        now_s = self._clock()
        here = {name for name, (_, changed_s) in self._others.items() if changed_s and now_s - changed_s < SETTLE_S}
        return now_s - self._began_s >= SETTLE_S and min(here | {self._name}) == self._name

    def close(self) -> None:
        mailbox.remove(self._folder / self._name)


REOPEN_LIMIT_S = 3.0  # Our choice: the limit of one attempt to reconnect. The next beat tries again.


class Heartbeating:
    """Sends a member's beats until it is closed, on its own connection so that no large value delays them."""

    def __init__(
        self, connect: Callable[[float], Client], member: str, *, on_notice: Callable[[bytes], None] = lambda _: None
    ) -> None:
        """``connect`` takes a limit in seconds. The thread calls ``on_notice`` with each new notice."""
        self.heard_ns: int | None = None
        """When the server last answered, by CLOCK_MONOTONIC, or None if it never has."""
        self.said = b""
        """The bytes that the next beats carry."""
        self._connect, self._member, self._on_notice = connect, member, on_notice
        self._client: Client | None = None
        self._notice = b""
        self._ended, self._now = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat_now(self) -> None:
        """Send the next beat immediately, because ``said`` has changed."""
        self._now.set()

    def leave(self, word: bytes = b"") -> bool:
        """Stop beating and report that this member ends; return False if the report failed."""
        client = self._stop()
        try:
            if client is not None:
                client.leave(self._member, word)
        except StoreError:
            return False
        return client is not None

    def close(self) -> None:
        """Stop beating, without leaving."""
        if (client := self._stop()) is not None:
            client.close()

    def _stop(self) -> Client | None:
        """Stop; return the connection unless a call hangs on it, which ends at its own limit."""
        self._ended.set()
        self._now.set()
        self._thread.join(timeout=1)
        return None if self._thread.is_alive() else self._client

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._client = self._client or self._connect(REOPEN_LIMIT_S)
                notice = self._client.beat(self._member, self.said)
            except StoreError:
                if self._client is not None:
                    self._client.close()
                self._client = None
            else:
                self.heard_ns = time.monotonic_ns()
                if notice != self._notice:
                    self._notice = notice
                    self._on_notice(notice)
            self._now.wait(1.0 if self._client is None else self._client.beat_every_s)
            self._now.clear()
