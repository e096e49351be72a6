"""Further ways to the first member if its own port is blocked: a shared folder, or a second port.

Every rank of the job reaches the job's own store, and most connect to each other on arbitrary ports. So the first
member opens such a port too, and publishes its address in the store.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import SERVED_BY, Folder, OtherPort, race
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.wire import NO_TOKEN, open_client
from ddpdoctor.launch.nodes.node_messages import find
from ddpdoctor.launch.nodes.own_host import MOST_ADDRESSES, own_addresses

if TYPE_CHECKING:
    from pathlib import Path

    from ddpdoctor.exchange.meeting import HostedMeeting, MeetingWay
    from ddpdoctor.exchange.store import Client
    from ddpdoctor.launch.command.placement import Placement

PREFIX = "ddpdoctor/wrap/"
"""The prefix of ddpdoctor's key in the job's store."""
SECOND_PORT = "port"
OPEN_LIMIT_S = 3.0
OPEN_EVERY_S = 1.0
"""Our choice: a store that a rank serves appears only after that rank has imported torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondPort:
    """The address of the first member's second port."""

    hosts: tuple[str, ...]
    """Its addresses, the likeliest first."""
    port: int


def further_ways(placement: Placement, folder: Path) -> tuple[MeetingWay, ...]:
    """Return the ways besides the own port: the second port, if the job has a store to publish it, and the folder."""
    if placement.store is None:
        return (Folder(folder),)
    return (OtherPort(_Word(placement.store, placement.token).open), Folder(folder))


class _Word:
    """Reads the address of the first member's second port once, and connects to it."""

    def __init__(self, store: tuple[str, int], token: bytes | None) -> None:
        self._store, self._token = store, token
        self._second: SecondPort | None = None

    def open(self, limit_s: float) -> Client:
        """Connect to the first address that answers; raises ``StoreError``."""
        deadline = time.monotonic() + limit_s
        second = self._second or self._read(limit_s)
        hosts = second.hosts[:MOST_ADDRESSES]
        raced = race([partial(self._connect, host, second.port) for host in hosts], deadline - time.monotonic())
        if raced.best is None or raced.client is None:
            raise StoreError(
                "; ".join(raced.errors.get(place, f"{host}: no answer") for place, host in enumerate(hosts))
            )
        # Keep the address: the store ends with its launcher, but evidence is sent after that.
        self._second = replace(second, hosts=(hosts[raced.best],))
        return raced.client

    def _connect(self, host: str, port: int, limit_s: float) -> Client:
        return open_client((host,), port, self._token or NO_TOKEN, limit_s, served_by=SERVED_BY)

    def _read(self, limit_s: float) -> SecondPort:
        with contextlib.closing(open_job_store(*self._store, PREFIX, limit_s)) as store:
            second = find(Conversation(store, self._token), SecondPort, SECOND_PORT)
        if second is None:
            raise StoreError("the first node has left no message in the job's store")
        return second


class FurtherWays:
    """Serves a meeting on the further ways. It begins only when a member is missing, to spare the job's store."""

    def __init__(self, meeting: HostedMeeting, placement: Placement, folder: Path) -> None:
        """Take the meeting, the placement with the job's store, and the shared folder."""
        self._meeting, self._placement, self._folder = meeting, placement, folder
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start serving on the further ways."""
        with contextlib.suppress(StoreError, OSError):
            self._meeting.serve_folder(self._folder)
        if self._placement.store is not None:
            threading.Thread(target=self._leave_word, name="ddpdoctor-word", daemon=True).start()

    def close(self) -> None:
        """Stop trying to publish the second port."""
        self._ended.set()

    def _leave_word(self) -> None:
        """Open a second port, and publish its address as soon as the store is up."""
        assert self._placement.store is not None
        with contextlib.suppress(StoreError, OSError):
            hosts = ("127.0.0.1",) if self._placement.one_host else own_addresses()
            second = SecondPort(hosts=hosts, port=self._meeting.server.listen_also())
            while not self._ended.is_set():
                with (
                    contextlib.suppress(StoreError),
                    contextlib.closing(open_job_store(*self._placement.store, PREFIX, OPEN_LIMIT_S)) as store,
                ):
                    conversation = Conversation(store, self._placement.token)
                    conversation.send(SECOND_PORT, second)
                    # A SET has no answer, so read the key back to be sure that it is stored.
                    if find(conversation, SecondPort, SECOND_PORT) == second:
                        return
                self._ended.wait(OPEN_EVERY_S)
