"""Compares the replicas of a job's nodes with each other, in its own thread.

Every few seconds each node sends its root fingerprints, about 150 bytes a model, and reads the first node's request,
which is as short. If roots differ, the first node asks for the contents, 16 bytes a tensor.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ddpdoctor.exchange.conversation import BadRecord
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.launch.nodes.node_messages import find
from ddpdoctor.model.consistency import NodeStreams, RootsReport, RootsRequest

if TYPE_CHECKING:
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.other_node import OtherNode
    from ddpdoctor.launch.replicas.shared import SharedReplicas

EVERY_S = 3.0
"""Our choice: with headers this adds about 200 bytes a second to the heartbeats, and the data kept meanwhile fits."""
SOON_S = 0.5
"""Our choice: the pause while requested contents are on their way."""
CLOSE_LIMIT_S = 2.0
ROOTS = "replicas/roots"
WORD = "replicas/word"
CONTENTS = "replicas/contents"


class ReplicaExchange:
    """Exchanges fingerprints from ``start`` to ``close``. After an error it tries again; watching does not need it."""

    def __init__(self, shared: SharedReplicas, member: FirstNode | OtherNode) -> None:
        """Take this node's replicas and its connection to the other nodes."""
        self.failure: Exception | None = None
        self._shared, self._member = shared, member
        self._turn = 0
        """The number of the last request for contents that this node has answered."""
        self._sent: RootsReport | None = None
        self._word: RootsRequest | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-replicas", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A call that hangs ends at its own limit; this does not wait for it."""
        self._ended.set()
        self._thread.join(timeout=CLOSE_LIMIT_S)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S if self._word is None or not self._word.wanted else SOON_S):
            try:
                self.exchange()
            except Exception as error:  # noqa: BLE001 - watching the job continues without the others
                self.failure = self.failure or error

    def exchange(self) -> None:
        """Send and receive once."""
        member = self._member
        conversation = member.conversation()
        if conversation is None or member.number is None:
            return
        try:
            if member.is_first:
                self._hear(conversation, member.others())
            else:
                self._report(conversation, member.number)
        except StoreError:
            if not member.is_first:
                member.reconnect()

    def _report(self, conversation: Conversation, number: int) -> None:
        report = self._shared.report()
        if report != self._sent:
            conversation.send(f"{ROOTS}/{number}", report)
            self._sent = report
        word = find(conversation, RootsRequest, WORD)
        if word is None:
            return
        self._shared.heed(word)
        if word.turn > self._turn and word.wanted:
            for name in word.wanted:
                conversation.send(f"{CONTENTS}/{number}/{word.turn}/{name}", self._shared.kept((name,)))
            self._turn = word.turn

    def _hear(self, conversation: Conversation, others: list[int]) -> None:
        for number in others:
            report = find(conversation, RootsReport, f"{ROOTS}/{number}")
            if report is not None:
                self._shared.hear(number, report)
        word = self._shared.word()
        for name in word.wanted:
            for number in others:
                self._receive(conversation, number, f"{CONTENTS}/{number}/{word.turn}/{name}")
        if word != self._word:
            conversation.send(WORD, word)
            self._word = word

    def _receive(self, conversation: Conversation, number: int, key: str) -> None:
        """Take the contents of another node, if they have arrived."""
        with contextlib.suppress(BadRecord):  # a damaged record counts as an empty answer
            sent = conversation.take(NodeStreams, key, f"node {number}")
            if sent is not None:
                self._shared.receive(number, sent)
