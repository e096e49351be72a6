"""Has the nodes of a job hold their replicas against each other, by a thread of its own.

Every few seconds each node leaves its roots, some 150 bytes a model, and looks at the word of the first, which is as
short. Contents, 16 bytes a tensor, are sent where the first has asked for them, since roots differ.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.exchange.framing import BadMessage, pack, unpack
from ddpdoctor.exchange.large import receive_large, send_large
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.launch.nodes.node_messages import find, leave
from ddpdoctor.model.codec import WrongValue, decode, encode
from ddpdoctor.model.replica_records import NodeStreams, RootsReport, RootsRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.exchange.asking import Room
    from ddpdoctor.launch.replicas.shared import SharedReplicas

EVERY_S = 3.0
"""Ours: with all headers this takes some 200 bytes a second, beside the heartbeats, and what is kept meanwhile fits."""
SOON_S = 0.5
"""Ours: contents that were asked for are on their way."""
SEND_LIMIT_S = 2.0
CLOSE_LIMIT_S = 2.0
ROOTS = "replicas/roots"
WORD = "replicas/word"
CONTENTS = "replicas/contents"


class Member(Protocol):
    """This member among the others."""

    @property
    def is_first(self) -> bool:
        """Whether the others are told by this one."""

    @property
    def number(self) -> int | None:
        """Of this member; None while it has none."""

    def room(self) -> Room | None:
        """Return where all meet; None while it was not found."""

    def look_for_room(self) -> None:
        """Open it anew where the connection was lost."""

    def others(self) -> Iterable[int]:
        """Return the members that were heard, on the first."""


class ReplicaExchange:
    """From ``start`` to ``close``. What goes wrong is tried again the next time: a job is watched on without it."""

    def __init__(self, shared: SharedReplicas, member: Member, token: bytes | None) -> None:
        """Take what is exchanged, with whom, and the job's secret."""
        self.failure: Exception | None = None
        self._shared, self._member, self._token = shared, member, token
        self._turn = 0
        """The last time that contents were asked for that this node has answered."""
        self._told: RootsReport | None = None
        self._word: RootsRequest | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-replicas", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop; a call that hangs ends by its own limit, and nobody waits for it."""
        self._ended.set()
        self._thread.join(timeout=CLOSE_LIMIT_S)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S if self._word is None or not self._word.wanted else SOON_S):
            try:
                self.exchange()
            except Exception as error:  # noqa: BLE001 - a job is watched on without the others
                self.failure = self.failure or error

    def exchange(self) -> None:
        """Tell and hear once."""
        room, number = self._member.room(), self._member.number
        if room is None or number is None:
            return
        try:
            if self._member.is_first:
                self._hear(room)
            else:
                self._tell(room, number)
        except StoreError:
            self._member.look_for_room()

    def _tell(self, room: Room, number: int) -> None:
        told = self._shared.report()
        if told != self._told:
            leave(room, f"{ROOTS}/{number}", told, self._token)
            self._told = told
        word = find(room, WORD, RootsRequest, self._token)
        if word is None:
            return
        self._shared.heed(word)
        if word.turn > self._turn and word.wanted:
            for name in word.wanted:
                kept = pack(encode(self._shared.kept((name,))), self._token)
                send_large(room, f"{CONTENTS}/{number}/{word.turn}/{name}", kept)
            self._turn = word.turn

    def _hear(self, room: Room) -> None:
        others = list(self._member.others())
        for number in others:
            told = find(room, f"{ROOTS}/{number}", RootsReport, self._token)
            if told is not None:
                self._shared.hear(number, told)
        word = self._shared.word()
        for name in word.wanted:
            for number in others:
                self._receive(room, number, f"{CONTENTS}/{number}/{word.turn}/{name}")
        if word != self._word:
            leave(room, WORD, word, self._token)
            self._word = word

    def _receive(self, room: Room, number: int, key: str) -> None:
        """Take the contents of another node, where they have come; they are in the room once."""
        if room.look(key) is None:
            return
        packed = b""
        with contextlib.suppress(StoreError):  # damaged: it counts as an answer that says nothing
            packed = receive_large(room, key, SEND_LIMIT_S) or b""
        with contextlib.suppress(WrongValue, BadMessage):
            self._shared.receive(number, decode(NodeStreams, unpack(packed, self._token)))
