"""How this node comes into the room: as the one that serves it, or as a guest by any way that gets through."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.framing import BadMessage, pack, unpack
from ddpdoctor.exchange.large import receive_large, send_large
from ddpdoctor.exchange.meeting import NO_TOKEN
from ddpdoctor.exchange.room import Folder, HostedRoom, NoRoom, OverStore, OwnPort, find_room
from ddpdoctor.exchange.standing_in import stand_in
from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.exchange.token import VARIABLE, job_token
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rendezvous import is_loopback
from ddpdoctor.probes.rendezvous.door import is_own
from ddpdoctor.probes.rendezvous.torch_process import TorchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.exchange.asking import Room
    from ddpdoctor.exchange.room import Way
    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.launch import NodeLaunch
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

Kind = TypeVar("Kind")

SEEK_FIRST_S = 4.0
"""Ours: how long node 0 looks for a room at an address that is not its own before it opens one itself: the address may
be of a load balancer that leads to it, or a wrong one."""
STAND_IN_S = 10.0
"""Ours: how long nodes that share a folder wait for the lowest of them to serve the room, where node 0 never came."""


class Conversation:
    """The room as records: each is packed, signed where the job has a token, and checked as it is read."""

    def __init__(self, room: Room, token: bytes | None) -> None:
        """Take the room; ``token`` is the job's, where it has one."""
        self.room = room
        self._token = token

    def leave(self, key: str, record: Any) -> None:
        """Leave a record that the one that judges waits for; raises ``StoreError``."""
        send_large(self.room, key, self._pack(key, record))

    def hear(self, kind: type[Kind], key: str, limit_s: float) -> Kind | None:
        """Return a record that one node alone waits for, and take it away; None where it does not come in time."""
        return self._read(kind, key, receive_large(self.room, key, limit_s))

    def tell(self, key: str, record: Any) -> None:
        """Leave a record that all wait for; raises ``StoreError``."""
        self.room.set(key, self._pack(key, record))

    def told(self, kind: type[Kind], key: str, limit_s: float) -> Kind | None:
        """Return a record that all wait for; None where it does not come in time."""
        return self._read(kind, key, wait_for(self.room, key, limit_s))

    def _pack(self, key: str, record: Any) -> bytes:
        try:
            return pack(encode(record), self._token)
        except BadMessage as error:
            raise StoreError(f"{key} is {error}") from error

    def _read(self, kind: type[Kind], key: str, message: bytes | None) -> Kind | None:
        if message is None:
            return None
        try:
            return decode(kind, unpack(message, self._token))
        except (BadMessage, WrongValue) as error:
            raise StoreError(f"{key}: another node sent {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """This node is in the room."""

    conversation: Conversation
    serves: bool
    """Whether the room is this node's, which then judges."""
    way: str


class Lobby:
    """A context: the room is open to this node, and to others where it serves it, inside of it."""

    def __init__(
        self, launch: NodeLaunch, env: Mapping[str, str], folder: Path | None, torch: TorchProcess | None = None
    ) -> None:
        """Take who this node is and what it can meet by; ``folder`` is one that others may see too.

        Without ``torch`` it is a guest by the own port or the folder alone.
        """
        self._launch, self._torch = launch, torch
        self._folder = folder
        self._given = bool(env.get(VARIABLE))
        self._token = job_token(launch.launch, env)
        self._hosted: HostedRoom | None = None
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

    @property
    def strangers(self) -> int:
        """How many connections were turned away for want of the token."""
        return 0 if self._hosted is None else self._hosted.strangers

    def enter(self, limit_s: float) -> Entry:
        """Serve the room or find it; raises ``StoreError`` (``NoRoom``) where no way gets through in time."""
        if not self._may_serve():
            return self._find_or_stand_in(limit_s)
        if self._seeks_first():
            try:
                return self.find(min(SEEK_FIRST_S, limit_s))
            except StoreError:
                pass  # nobody else serves one
        return self._serve()

    def serve_over(self, store: Store) -> None:
        """Let guests in by the job's own store too, where this node serves the room."""
        if self._hosted is not None:
            self._hosted.serve_over(store)

    def _find_or_stand_in(self, limit_s: float) -> Entry:
        """Find the room; where the first node never serves one, the lowest of those that share a folder does."""
        try:
            return self.find(limit_s)
        except NoRoom:
            if self._folder is None:
                raise
        token = self._token or NO_TOKEN
        room = stand_in(self._folder, token, self._launch.told.node_rank, STAND_IN_S)
        if room is not None:
            self._open.callback(room.close)
            return Entry(conversation=Conversation(room, self._token), serves=False, way=Folder.name)
        hosted = self._hosted = self._open.enter_context(HostedRoom(None, token))
        hosted.serve_folder(self._folder)
        return Entry(conversation=Conversation(hosted.store(), self._token), serves=True, way=Folder.name)

    def _may_serve(self) -> bool:
        """Say whether this is the node where the others look for the room."""
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
        hosted = HostedRoom(launch.launch.port, self._token or NO_TOKEN, one_host=launch.most == 1)
        self._hosted = self._open.enter_context(hosted)
        if hosted.not_listening:
            try:
                # Another node of this job on this very host may have been first.
                return self.find(SEEK_FIRST_S)
            except StoreError:
                pass  # some other program: the other ways are left
        if self._folder is not None:
            hosted.serve_folder(self._folder)
        return Entry(conversation=Conversation(hosted.store(), self._token), serves=True, way="own port")

    def find(self, limit_s: float) -> Entry:
        """Find a room that another node serves; raises ``NoRoom``."""
        found = find_room(self._ways(), self._token or NO_TOKEN, limit_s)
        self._open.callback(found.store.close)
        return Entry(conversation=Conversation(found.store, self._token), serves=False, way=found.way)

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
