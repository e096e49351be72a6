"""Further ways to the first node, where its own port does not get through: a shared folder, or a word in the store.

Every rank of the job reaches the job's own store, and most connect to each other on ports that nobody knows beforehand.
So the first member opens such a port too, and leaves word in the store of where it is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.exchange.client import open_client
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.node_meeting import SERVED_BY, Folder, OtherPort
from ddpdoctor.exchange.racing import Runner, race
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.token import NO_TOKEN
from ddpdoctor.launch.nodes.node_messages import find
from ddpdoctor.launch.nodes.own_host import MOST_ADDRESSES, own_addresses

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.node_meeting import HostedMeeting, Way
    from ddpdoctor.launch.command.placement import Placement

PREFIX = "ddpdoctor/wrap/"
"""What our key in the job's store begins with."""
SECOND_PORT = "port"
OPEN_LIMIT_S = 3.0
OPEN_EVERY_S = 1.0
"""Ours: a store that a rank serves is there once that rank has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondPort:
    """Where else the first member serves the meeting."""

    hosts: tuple[str, ...]
    """Its addresses, the likeliest first."""
    port: int


def further_ways(placement: Placement, folder: Path) -> tuple[Way, ...]:
    """Return the ways beside the own port: a word in the job's store, where it has one, and a folder all may see."""
    if placement.store is None:
        return (Folder(folder),)
    return (OtherPort(_Word(placement.store, placement.token).open), Folder(folder))


class _Word:
    """Reads the first member's word once, and connects to where it says."""

    def __init__(self, store: tuple[str, int], token: bytes | None) -> None:
        self._store, self._token = store, token
        self._second: SecondPort | None = None

    def open(self, limit_s: float) -> Client:
        """Connect to the first address that answers; raises ``StoreError``."""
        deadline = time.monotonic() + limit_s
        second = self._second or self._read(limit_s)
        opens = {
            host: Runner(partial(self._connect, host, second.port), deadline) for host in second.hosts[:MOST_ADDRESSES]
        }
        best = race(list(opens.values()), deadline)
        if best is None or best.found is None:
            raise StoreError("; ".join(str(runner.error or f"{host}: no answer") for host, runner in opens.items()))
        # The store ends with its launcher, and evidence travels after that.
        self._second = replace(second, hosts=tuple(host for host, runner in opens.items() if runner is best))
        return best.found

    def _connect(self, host: str, port: int, limit_s: float) -> Client:
        return open_client((host,), port, self._token or NO_TOKEN, limit_s, served_by=SERVED_BY)

    def _read(self, limit_s: float) -> SecondPort:
        with contextlib.closing(open_job_store(*self._store, PREFIX, limit_s)) as store:
            second = find(Conversation(store, self._token), SecondPort, SECOND_PORT)
        if second is None:
            raise StoreError("the first node has left no word in the job's store")
        return second


class FurtherWays:
    """Has a meeting served by these ways too, once somebody is missed: until then the job's store is left in peace."""

    def __init__(self, meeting: HostedMeeting, placement: Placement, folder: Path) -> None:
        """Take the meeting, and what the ways are made of."""
        self._meeting, self._placement, self._folder = meeting, placement, folder
        self._ended = threading.Event()

    def begin(self) -> None:
        """Serve them from now on."""
        with contextlib.suppress(StoreError, OSError):
            self._meeting.serve_folder(self._folder)
        if self._placement.store is not None:
            threading.Thread(target=self._leave_word, name="ddpdoctor-word", daemon=True).start()

    def close(self) -> None:
        """Leave no word any more."""
        self._ended.set()

    def _leave_word(self) -> None:
        """Open a port, and leave word of it as soon as the store is there."""
        assert self._placement.store is not None
        with contextlib.suppress(StoreError, OSError):
            hosts = ("127.0.0.1",) if self._placement.one_host else own_addresses()
            second = SecondPort(hosts=hosts, port=self._meeting.listen_also())
            while not self._ended.is_set():
                with (
                    contextlib.suppress(StoreError),
                    contextlib.closing(open_job_store(*self._placement.store, PREFIX, OPEN_LIMIT_S)) as store,
                ):
                    conversation = Conversation(store, self._placement.token)
                    conversation.send(SECOND_PORT, second)
                    # A SET has no answer: that this has one shows that the word is there.
                    if find(conversation, SecondPort, SECOND_PORT) == second:
                        return
                self._ended.wait(OPEN_EVERY_S)
