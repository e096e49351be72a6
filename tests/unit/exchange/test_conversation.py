"""What verbs need of each other's processes: records, all of them, one value, an alarm, and a goodbye."""

import threading
from dataclasses import dataclass

import pytest

from ddpdoctor.exchange.conversation import CHUNK_BYTES, BadRecord, Conversation
from ddpdoctor.exchange.meeting import HostedMeeting
from ddpdoctor.exchange.store import KeyValues, StoreError

TOKEN = b"t" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A record."""

    text: str


@pytest.fixture
def talk():
    return Conversation(KeyValues(), TOKEN)


@pytest.fixture
def hosted():
    meeting = HostedMeeting(None, TOKEN)
    meeting.__enter__()
    yield meeting
    meeting.__exit__(None, None, None)


@pytest.mark.parametrize("length", [0, 100, 3 * CHUNK_BYTES])
def test_a_record_of_any_size_arrives(talk, length):
    # Text that zlib makes no smaller than a chunk.
    text = "".join(chr(0x4E00 + (number * 7919 * number) % 20000) for number in range(length))
    talk.send("a", Said(text=text))
    assert talk.get(Said, "a", "rank 1") == Said(text=text)
    assert talk.get(Said, "b", "rank 1") is None


def test_a_record_of_another_token_or_cut_short_is_refused(talk):
    Conversation(talk.store, b"other").send("a", Said(text="x"))
    talk.store.set("b", b"rubbish")
    talk.store.set("c", b"x" * 40)
    for key, words in {
        "a": "rank 1 sent a message signed with another token",
        "b": "not a message",
        "c": "limit",
    }.items():
        with pytest.raises(BadRecord, match=words):
            talk.get(Said, key, "rank 1")


def test_gather_returns_what_comes_in_time(talk):
    talk.send("a/1", Said(text="one"))
    talk.store.set("a/2", b"rubbish")
    bad = []
    heard = talk.gather(
        Said, "a", lambda: range(1, 4), 0.1, on_bad=lambda number, error: bad.append((number, str(error)))
    )

    assert heard == {1: Said(text="one")}
    assert bad == [(2, "rank 2 sent something that is not a message of ddpdoctor")]
    with pytest.raises(BadRecord):
        talk.gather(Said, "a", lambda: [2], 0.1)


def test_gather_goes_on_while_more_come(talk):
    """Whoever comes is counted; the end is known by what is heard."""
    talk.add("came", 1)
    talk.send("a/1", Said(text="one"))

    def members():
        if talk.add("came", 0) == 1:
            talk.send("a/2", Said(text="two"))
            talk.add("came", 1)
            return [1]
        return [1, 2]

    assert set(talk.gather(Said, "a", members, 5, is_over=lambda heard: len(heard) == 2)) == {1, 2}


def test_all_have_what_rank_0_decided(talk):
    assert talk.agree(Said, "a", Said(text="x"), 1) == talk.agree(Said, "a", None, 1) == Said(text="x")
    with pytest.raises(StoreError, match=r"no message came from rank 0 within 0\.1 s"):
        talk.agree(Said, "b", None, 0.1)


def test_the_first_alarm_counts_and_questions_are_none(talk):
    assert talk.ask() == 1
    assert talk.news() == (False, 1)
    assert talk.raise_alarm(Said(text="first")) == talk.raise_alarm(Said(text="second")) == Said(text="first")
    assert talk.news().alarm
    assert talk.alarm(Said) == Said(text="first")


def test_conversations_of_one_name_follow_each_other(talk):
    first = talk.begin("probe")
    first.send("a", Said(text="x"))
    assert talk.begin("probe").has("a")
    first.say_goodbye(Said(text="bye"), lambda: 0, 1)
    assert not talk.begin("probe").has("a")


def test_who_says_goodbye_stays_until_it_was_heard(talk):
    ended = threading.Thread(target=talk.say_goodbye, args=(Said(text="bye"), lambda: 1, 60))
    ended.start()
    assert talk.hear_goodbye(Said, 60) == Said(text="bye")
    ended.join(60)
    assert not ended.is_alive()
    assert talk.part("other/").hear_goodbye(Said, 0) is None


class GoneOnceHeard:
    """A connection to a server that ends as soon as the goodbye was read there."""

    def __init__(self, hosted):
        self._hosted, self._store = hosted, hosted.store()

    def get(self, key):
        found = self._store.get(key)
        if found is not None and key.endswith("goodbye"):
            self._hosted.__exit__(None, None, None)
        return found

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_a_goodbye_that_was_heard_counts_though_the_server_has_ended(hosted):
    Conversation(hosted.store(), TOKEN).say_goodbye(Said(text="bye"), lambda: 0, 0)
    store = GoneOnceHeard(hosted)

    assert Conversation(store, TOKEN).hear_goodbye(Said, 5) == Said(text="bye")
    with pytest.raises(StoreError):
        store.add("heard", 0)


def test_a_server_that_ends_before_the_goodbye_is_lost(hosted):
    talk = Conversation(hosted.store(), TOKEN)
    hosted.__exit__(None, None, None)
    with pytest.raises(StoreError):
        talk.hear_goodbye(Said, 5)


def test_bytes_are_taken_once_and_damage_is_seen(talk):
    data = bytes(range(256)) * 3000
    talk.send_bytes("a", data)
    assert talk.take_bytes("a", 1) == data
    assert talk.take_bytes("a", 0) is None
    assert not talk.has("a/0")

    talk.send_bytes("a", data)
    talk.store.set("a/1", b"x" * CHUNK_BYTES)
    with pytest.raises(BadRecord, match="damaged"):
        talk.take_bytes("a", 1)
