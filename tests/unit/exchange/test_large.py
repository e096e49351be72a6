"""A large value arrives whole or not at all, and leaves nothing behind."""

from __future__ import annotations

import os
import threading

import pytest

from ddpdoctor.exchange.large import MAX_LARGE_BYTES, PART_BYTES, receive_large, send_large
from ddpdoctor.exchange.room import HostedRoom
from ddpdoctor.exchange.store import StoreError


@pytest.fixture
def hosted():
    with HostedRoom(None, b"token") as room:
        yield room


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 20 * PART_BYTES + 7])
def test_what_was_sent_is_received_and_taken_away(hosted, size):
    data = os.urandom(size)
    sender, receiver = hosted.store(), hosted.store()
    send_large(sender, "pack", data)

    assert receive_large(receiver, "pack", 60) == data
    assert receive_large(receiver, "pack", 0) is None
    assert hosted._serving._desk._values._total_bytes == 0
    # The same key again, for what comes next.
    send_large(sender, "pack", data[::-1])
    assert receive_large(receiver, "pack", 60) == data[::-1]


def test_it_is_waited_for(hosted):
    threading.Timer(0.1, lambda: send_large(hosted.store(), "late", b"x" * PART_BYTES * 2)).start()
    assert receive_large(hosted.store(), "late", 60) == b"x" * PART_BYTES * 2


def test_a_value_over_the_limit_is_not_sent(hosted):
    with pytest.raises(StoreError, match="over the limit"):
        send_large(hosted.store(), "pack", bytes(MAX_LARGE_BYTES + 1))
    assert hosted.store().look("pack/0") is None


def test_a_description_over_the_limit_is_not_believed(hosted):
    room = hosted.store()
    send_large(room, "pack", b"x")
    description = room.look("pack")
    room.set("pack", b"\xff" * 8 + description[8:])
    with pytest.raises(StoreError, match="over the limit"):
        receive_large(room, "pack", 0)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pack/1", b"y" * PART_BYTES, "arrived damaged"),
        ("pack/1", b"x", "arrived damaged"),
        ("pack/1", b"x" * (PART_BYTES + 1), "pack/1 is missing or over the limit"),
        ("pack/1", None, "pack/1 is missing"),
        ("pack", b"no description", "not described as a value in parts"),
    ],
)
def test_what_is_damaged_is_told(hosted, key, value, words):
    room = hosted.store()
    send_large(room, "pack", b"x" * PART_BYTES * 2)
    if value is None:
        room.forget(key)
    else:
        room.set(key, value)
    with pytest.raises(StoreError, match=words):
        receive_large(room, "pack", 0)
