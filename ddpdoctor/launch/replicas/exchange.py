"""Has the nodes of a job hold their replicas against each other, by a thread of its own.

Every few seconds each node leaves its roots, some 150 bytes a model, and looks at the word of the first, which is as
short. Contents, 16 bytes a tensor, are sent where the first has asked for them, since roots differ.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.exchange.conversation import BadRecord
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.launch.nodes.node_messages import find
from ddpdoctor.model.replica_records import NodeStreams, RootsReport, RootsRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.launch.replicas.shared import SharedReplicas

EVERY_S = 3.0
"""Ours: with all headers this takes some 200 bytes a second, beside the heartbeats, and what is kept meanwhile fits."""
SOON_S = 0.5
"""Ours: contents that were asked for are on their way."""
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

    def conversation(self) -> Conversation | None:
        """Return what all members say to each other; None while the first was not found."""

    def reconnect(self) -> None:
        """Connect again where the connection was lost."""

    def others(self) -> Iterable[int]:
        """Return the members that were heard, on the first."""


class ReplicaExchange:
    """From ``start`` to ``close``. What goes wrong is tried again the next time: a job is watched on without it."""

    def __init__(self, shared: SharedReplicas, member: Member) -> None:
        """Take what is exchanged, and with whom."""
        self.failure: Exception | None = None
        self._shared, self._member = shared, member
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
        conversation, number = self._member.conversation(), self._member.number
        if conversation is None or number is None:
            return
        try:
            if self._member.is_first:
                self._hear(conversation)
            else:
                self._tell(conversation, number)
        except StoreError:
            self._member.reconnect()

    def _tell(self, conversation: Conversation, number: int) -> None:
        told = self._shared.report()
        if told != self._told:
            conversation.send(f"{ROOTS}/{number}", told)
            self._told = told
        word = find(conversation, RootsRequest, WORD)
        if word is None:
            return
        self._shared.heed(word)
        if word.turn > self._turn and word.wanted:
            for name in word.wanted:
                conversation.send(f"{CONTENTS}/{number}/{word.turn}/{name}", self._shared.kept((name,)))
            self._turn = word.turn

    def _hear(self, conversation: Conversation) -> None:
        others = list(self._member.others())
        for number in others:
            told = find(conversation, RootsReport, f"{ROOTS}/{number}")
            if told is not None:
                self._shared.hear(number, told)
        word = self._shared.word()
        for name in word.wanted:
            for number in others:
                self._receive(conversation, number, f"{CONTENTS}/{number}/{word.turn}/{name}")
        if word != self._word:
            conversation.send(WORD, word)
            self._word = word

    def _receive(self, conversation: Conversation, number: int, key: str) -> None:
        """Take the contents of another node, where they have come."""
        with contextlib.suppress(BadRecord):  # damaged: it counts as an answer that says nothing
            sent = conversation.take(NodeStreams, key, f"node {number}")
            if sent is not None:
                self._shared.receive(number, sent)
