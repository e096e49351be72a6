"""How this node meets the others: it serves the meeting, or finds it by any way that gets through."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.election import find_deputy
from ddpdoctor.exchange.node_meeting import Folder, HostedMeeting, NoMeeting, OverStore, OwnPort, find_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.token import NO_TOKEN, VARIABLE, job_token
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rendezvous import is_loopback
from ddpdoctor.probes.rendezvous.store_probe import is_own
from ddpdoctor.probes.rendezvous.torch_process import TorchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.node_meeting import Way
    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

SEEK_FIRST_S = 4.0
"""Ours: how long node 0 looks for the meeting at an address that is not its own before it serves one. The address
may be of a load balancer that leads to it, or a wrong one."""
STAND_IN_S = 10.0
"""Ours: how long nodes that share a folder wait for the lowest of them to serve, where node 0 never came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """This node has met the others."""

    conversation: Conversation
    client: Client
    """Of the node that serves: it says what the clocks show there."""
    serves: bool
    """Whether the meeting is this node's, which then judges."""
    way: str


class NodeMeeting:
    """A context: the meeting is open to this node, and to others where it serves it, inside of it."""

    def __init__(
        self, launch: NodeLaunch, env: Mapping[str, str], folder: Path | None, torch: TorchProcess | None = None
    ) -> None:
        """Take who this node is and what it can meet by; ``folder`` is one that others may see too.

        Without ``torch`` it meets the others by the own port or the folder alone.
        """
        self._launch, self._torch = launch, torch
        self._folder = folder
        self._given = bool(env.get(VARIABLE))
        self._token = job_token(launch.launch, env)
        self._hosted: HostedMeeting | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        """Nothing yet: ``enter`` does it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave, and stop serving."""
        self._open.close()

    @property
    def trust(self) -> str:
        """Whom the nodes trust."""
        if self._given:
            return f"the token of {VARIABLE}"
        if self._launch.launch.launcher is Launcher.SLURM:
            return "a token derived from the Slurm job, which other users of the cluster could derive too"
        port = self._launch.launch.port
        return f"whoever reaches port {port}, since {VARIABLE} is not set: as with the job's own store"

    @cached_property
    def has_own_address(self) -> bool | None:
        """Whether the store is to be at an address of this host; None where that cannot be told."""
        return is_own(self._launch.host, self._launch.port)

    def enter(self, limit_s: float) -> Entry:
        """Serve the meeting or find it; raises ``StoreError`` (``NoMeeting``) where no way gets through in time."""
        if not self._may_serve():
            return self._find_or_stand_in(limit_s)
        if self._seeks_first():
            try:
                return self.find(min(SEEK_FIRST_S, limit_s))
            except StoreError:
                pass  # nobody else serves one
        return self._serve()

    def serve_over(self, store: Store) -> None:
        """Serve others by the job's own store too, where this node serves the meeting."""
        if self._hosted is not None:
            self._hosted.serve_over(store)

    def _find_or_stand_in(self, limit_s: float) -> Entry:
        """Find the meeting; where the first node never serves one, the lowest of those that share a folder does."""
        try:
            return self.find(limit_s)
        except NoMeeting:
            if self._folder is None:
                raise
        token = self._token or NO_TOKEN
        client = find_deputy(self._folder, token, self._launch.told.node_rank, STAND_IN_S)
        if client is not None:
            self._open.callback(client.close)
            return self._entry(client, serves=False, way=Folder.name)
        hosted = self._hosted = self._open.enter_context(HostedMeeting(None, token))
        hosted.serve_folder(self._folder)
        return self._entry(hosted.store(), serves=True, way=Folder.name)

    def _may_serve(self) -> bool:
        """Say whether this is the node where the others look for the meeting."""
        launch = self._launch
        number = launch.told.node_rank
        if number == 0 or launch.most == 1:
            return True
        if is_loopback(launch.host):
            return number is None
        return launch.is_host is True or self.has_own_address is True

    def _seeks_first(self) -> bool:
        launch = self._launch
        elsewhere = not is_loopback(launch.host) and self.has_own_address is False
        return launch.most > 1 and elsewhere and not launch.is_host

    def _serve(self) -> Entry:
        launch = self._launch
        hosted = HostedMeeting(launch.launch.port, self._token or NO_TOKEN, one_host=launch.most == 1)
        self._hosted = self._open.enter_context(hosted)
        if hosted.not_listening:
            try:
                # Another node of this job on this very host may have been first.
                return self.find(SEEK_FIRST_S)
            except StoreError:
                pass  # some other program: the other ways are left
        if self._folder is not None:
            hosted.serve_folder(self._folder)
        return self._entry(hosted.store(), serves=True, way="own port")

    def find(self, limit_s: float) -> Entry:
        """Find a meeting that another node serves; raises ``NoMeeting``."""
        found = find_meeting(self._ways(), self._token or NO_TOKEN, limit_s)
        self._open.callback(found.store.close)
        return self._entry(found.store, serves=False, way=found.way)

    def _entry(self, client: Client, *, serves: bool, way: str) -> Entry:
        conversation = Conversation(
            client, self._token, first="the node that judges", member="arrival",
            turned_away=lambda: 0 if self._hosted is None else self._hosted.strangers,
        )  # fmt: skip
        return Entry(conversation=conversation, client=client, serves=serves, way=way)

    def _ways(self) -> tuple[Way, ...]:
        launch = self._launch.launch
        ways: list[Way] = [OwnPort(launch.hosts, launch.port)]
        if self._torch is not None:
            ways.append(OverStore(partial(self._open_store, self._torch)))
        if self._folder is not None:
            ways.append(Folder(self._folder))
        return tuple(ways)

    def _open_store(self, torch: TorchProcess, limit_s: float) -> Store:
        try:
            torch.join(self._launch.host, self._launch.port, limit_s)
        except TorchError as error:
            raise StoreError(str(error)) from error
        return torch.store()


def in_background(what: Any, *arguments: Any) -> threading.Thread:
    """Start a call beside this thread; a daemon, so that it keeps nobody."""
    thread = threading.Thread(target=what, args=arguments, name="ddpdoctor-beside", daemon=True)
    thread.start()
    return thread
