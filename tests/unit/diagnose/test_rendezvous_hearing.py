"""Who was told how it ended keeps that, though the one that told it is gone by then."""

from __future__ import annotations

import pytest

from ddpdoctor.diagnose.rendezvous.following import hear_sentence
from ddpdoctor.diagnose.rendezvous.messages import Sentence
from ddpdoctor.diagnose.rendezvous.room import Conversation
from ddpdoctor.exchange.room import HostedRoom
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.probes.bandwidth.alarm import AlarmRoom

TOKEN = b"t" * 16
SENTENCE = Sentence(
    findings=(), checks=(), nnodes=2, hosts=("a", "b"),
    started_at="2026-01-01T00:00:00Z", ended_at="2026-01-01T00:00:01Z",
)  # fmt: skip


class GoneOnceHeard:
    """A connection to a room that ends as soon as something was read there."""

    def __init__(self, hosted, key):
        self._hosted, self._store, self._key = hosted, hosted.store(), key

    def look(self, key):
        found = self._store.look(key)
        if found is not None and key.endswith(self._key):
            self._hosted.__exit__(None, None, None)
        return found

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
def hosted():
    room = HostedRoom(None, TOKEN)
    room.__enter__()
    yield room
    room.__exit__(None, None, None)


def test_a_verdict_that_was_heard_counts_though_the_room_has_ended(hosted):
    Conversation(hosted.store(), TOKEN).tell("verdict", SENTENCE)
    room = GoneOnceHeard(hosted, "verdict")

    assert hear_sentence(Conversation(room, TOKEN), 5) == SENTENCE
    with pytest.raises(StoreError):
        room.add("left", 0)


def test_that_a_verdict_was_heard_is_told(hosted):
    conversation = Conversation(hosted.store(), TOKEN)
    conversation.tell("verdict", SENTENCE)
    hear_sentence(conversation, 5)

    assert hosted.store().add("left", 0) == 1


def test_a_room_that_ends_before_the_verdict_is_lost(hosted):
    conversation = Conversation(hosted.store(), TOKEN)
    hosted.__exit__(None, None, None)
    with pytest.raises(StoreError):
        hear_sentence(conversation, 5)


def test_a_status_that_was_heard_counts_though_the_room_has_ended(hosted):
    hosted.store().set("status", b"3")

    assert AlarmRoom(GoneOnceHeard(hosted, "status"), 1).hear_status(5) == 3
