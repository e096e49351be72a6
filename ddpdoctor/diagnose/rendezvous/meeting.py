"""How this node meets the others: it serves the meeting, or connects to it in any way that works."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import Folder, HostedMeeting, NoMeeting, OverStore, OwnPort, find_deputy, find_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.wire import NO_TOKEN, VARIABLE, job_token
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rendezvous import is_loopback
from ddpdoctor.probes.rendezvous.store_probe import is_own

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.meeting import MeetingWay
    from ddpdoctor.exchange.store import Client, Store
    from ddpdoctor.model.launch import NodeLaunch

PREFIX = "ddpdoctor/rendezvous/"
"""Keeps our keys apart from those of the launcher that owns the store."""
SEEK_FIRST_S = 4.0
"""Our choice: how long node 0 looks for a meeting at an address that is not its own before it serves one itself. The
address may be wrong, or belong to a load balancer in front of node 0."""
STAND_IN_S = 10.0
"""Our choice: if node 0 never joins, how long nodes that share a folder wait for the lowest of them to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMeeting:
    """This node has met the others."""

    conversation: Conversation
    client: Client
    """A connection to the serving node. It also gives the time on that node's clocks."""
    serves: bool
    """Whether this node serves the meeting. Then it also judges."""
    way: str


class NodeMeeting:
    """A context manager that keeps the meeting open for this node, and for others if this node serves it."""

    def __init__(
        self, launch: NodeLaunch, env: Mapping[str, str], folder: Path | None, *, over_store: bool = False
    ) -> None:
        """Take this node's launch and the ways to meet. ``folder`` may be shared with other nodes.

        Without ``over_store``, nodes can meet only through ddpdoctor's own port or the folder.
        """
        self._launch, self._over_store = launch, over_store
        self._folder = folder
        self._given = bool(env.get(VARIABLE))
        self._token = job_token(launch.launch, env)
        self._hosted: HostedMeeting | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Return self. ``enter`` opens the meeting."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the meeting and stop serving it."""
        self._open.close()

    @property
    def trust(self) -> str:
        """What the nodes' trust is based on."""
        if self._given:
            return f"the token of {VARIABLE}"
        if self._launch.launch.launcher is Launcher.SLURM:
            return "a token derived from the Slurm job, which other users of the cluster could derive too"
        port = self._launch.launch.port
        return f"whoever reaches port {port}, since {VARIABLE} is not set: as with the job's own store"

    @cached_property
    def has_own_address(self) -> bool | None:
        """Whether the store's address belongs to this host, or None if unknown."""
        return is_own(self._launch.host, self._launch.port)

    def enter(self, limit_s: float) -> JoinedMeeting:
        """Serve the meeting or find it. Raises ``StoreError`` (``NoMeeting``) if no way works in time."""
        if not self._may_serve():
            return self._find_or_stand_in(limit_s)
        if self._seeks_first():
            try:
                return self.find(min(SEEK_FIRST_S, limit_s))
            except StoreError:
                pass  # nobody else serves one
        return self._serve()

    def serve_over(self, store: Store) -> None:
        """If this node serves the meeting, also serve it over the job's own store."""
        if self._hosted is not None:
            self._hosted.serve_over(store)

    def _find_or_stand_in(self, limit_s: float) -> JoinedMeeting:
        """Find the meeting. If nobody serves one, the lowest node among those that share a folder serves it."""
        try:
            return self.find(limit_s)
        except NoMeeting:
            if self._folder is None:
                raise
        token = self._token or NO_TOKEN
        client = find_deputy(self._folder, token, self._launch.settings.node_rank, STAND_IN_S)
        if client is not None:
            self._open.callback(client.close)
            return self._entry(client, serves=False, way=Folder.name)
        hosted = self._hosted = self._open.enter_context(HostedMeeting(None, token))
        hosted.serve_folder(self._folder)
        return self._entry(hosted.store(), serves=True, way=Folder.name)

    def _may_serve(self) -> bool:
        """Return whether the others look for the meeting on this node."""
        launch = self._launch
        number = launch.settings.node_rank
        if number == 0 or launch.most == 1:
            return True
        if is_loopback(launch.host):
            return number is None
        return launch.is_host is True or self.has_own_address is True

    def _seeks_first(self) -> bool:
        launch = self._launch
        elsewhere = not is_loopback(launch.host) and self.has_own_address is False
        return launch.most > 1 and elsewhere and not launch.is_host

    def _serve(self) -> JoinedMeeting:
        launch = self._launch
        hosted = HostedMeeting(launch.launch.port, self._token or NO_TOKEN, one_host=launch.most == 1)
        self._hosted = self._open.enter_context(hosted)
        if hosted.not_listening:
            try:
                # Another node of this job on the same host may already serve the meeting.
                return self.find(SEEK_FIRST_S)
            except StoreError:
                pass  # another program uses the port; the other ways remain
        if self._folder is not None:
            hosted.serve_folder(self._folder)
        return self._entry(hosted.store(), serves=True, way="own port")

    def find(self, limit_s: float) -> JoinedMeeting:
        """Find a meeting that another node serves. Raises ``NoMeeting``."""
        found = find_meeting(self._ways(), self._token or NO_TOKEN, limit_s)
        self._open.callback(found.store.close)
        return self._entry(found.store, serves=False, way=found.way)

    def _entry(self, client: Client, *, serves: bool, way: str) -> JoinedMeeting:
        conversation = Conversation(
            client, self._token, first="the node that judges", member="arrival",
            turned_away=lambda: 0 if self._hosted is None else self._hosted.server.strangers,
        )  # fmt: skip
        return JoinedMeeting(conversation=conversation, client=client, serves=serves, way=way)

    def _ways(self) -> tuple[MeetingWay, ...]:
        launch = self._launch.launch
        ways: list[MeetingWay] = [OwnPort(launch.hosts, launch.port)]
        if self._over_store:
            ways.append(OverStore(partial(open_job_store, self._launch.host, self._launch.port, PREFIX)))
        if self._folder is not None:
            ways.append(Folder(self._folder))
        return tuple(ways)


def in_background(what: Any, *arguments: Any) -> threading.Thread:
    """Run a function in a daemon thread, so that it does not delay the process's exit."""
    thread = threading.Thread(target=what, args=arguments, name="ddpdoctor-beside", daemon=True)
    thread.start()
    return thread
