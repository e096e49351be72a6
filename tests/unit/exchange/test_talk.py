"""Frames, beats, clocks and conversations over a server."""

import contextlib
import itertools
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zlib
from dataclasses import dataclass

import pytest

from ddpdoctor.exchange.conversation import (
    CHUNK_BYTES,
    MAX_PACKED_BYTES,
    MAX_PLAIN_BYTES,
    ROUNDS,
    BadMessage,
    BadRecord,
    Conversation,
    measure_clocks,
    pack,
    unpack,
)
from ddpdoctor.exchange.meeting import Heartbeating, HostedMeeting, by_folder, by_port
from ddpdoctor.exchange.store import (
    BEAT_EVERY_S,
    MAX_MEMBERS,
    MAX_NOTICE_BYTES,
    MAX_SAID_BYTES,
    ClockTimes,
    Heard,
    KeyValues,
    StoreError,
)
from ddpdoctor.exchange.wire import LENGTH, RequestType, pack_request
from tests.golden import words
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until

# Clock offsets are those of the shortest round trip, and right within the error that they tell.


MS = 1_000_000


class FarServer:
    """A server whose clocks differ by fixed amounts, at the end of a way that takes given times there and back."""

    def __init__(self, trips, ahead_ns, wall_ahead_ns):
        self.now_ns = 5_000_000_000
        self._trips = iter(trips)
        self._ahead_ns, self._wall_ahead_ns = ahead_ns, wall_ahead_ns

    def read(self):
        """Return what the clocks of this side show."""
        return ClockTimes(self.now_ns + 10**18, self.now_ns)

    def now(self):
        there, back = next(self._trips)
        self.now_ns += there
        reported = ClockTimes(self.now_ns + 10**18 - self._wall_ahead_ns, self.now_ns - self._ahead_ns)
        self.now_ns += back
        return reported


TRIPS = (
    [(MS, MS)], [(30 * MS, 2 * MS), (2 * MS, 3 * MS), (MS, 90 * MS)],
    # All of the time on the way there: the worst case of the bound.
    [(10 * MS, 0)], [(0, 10 * MS)],
)  # fmt: skip


@pytest.mark.parametrize("ahead_ns", [-7_000_000_000, 0, 123_456_789])
@pytest.mark.parametrize("trips", TRIPS)
def test_the_offset_is_right_within_its_error(trips, ahead_ns):
    server = FarServer(itertools.cycle(trips), ahead_ns, -20_000_000_000)
    offset = measure_clocks(server, server.read)

    shortest = min(there + back for there, back in trips)
    assert offset.error_ns == shortest // 2 + 1
    assert abs(offset.monotonic_ns - ahead_ns) <= offset.error_ns
    assert abs(offset.wall_s + 20.0) <= offset.error_ns / 1e9 + 1e-6


def test_a_slow_way_is_asked_less_often():
    asked = []
    server = FarServer((asked.append(1) or (700 * MS, 700 * MS) for _ in range(ROUNDS)), 0, 0)
    assert abs(measure_clocks(server, server.read).monotonic_ns) <= 700 * MS
    assert len(asked) == 2


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
def test_a_real_clock_that_is_behind_is_seen_to_be():
    with HostedMeeting(0, b"token", one_host=True) as hosted:
        own = measure_clocks(by_port(("127.0.0.1",), hosted.port).open(b"token", 60))
        behind = subprocess.run(
            ["faketime", "-f", "-20s", sys.executable, "-c", BEHIND, str(hosted.port)],
            stdout=subprocess.PIPE, text=True, check=True, timeout=200, env={**os.environ, "DONT_FAKE_MONOTONIC": "1"},
        )  # fmt: skip
    wall_s, monotonic_ns, error_ns = map(float, behind.stdout.split())
    assert abs(own.monotonic_ns) <= own.error_ns
    assert abs(wall_s + 20) <= error_ns / 1e9 + 1e-3
    assert abs(monotonic_ns) <= error_ns


BEHIND = """
import sys
from ddpdoctor.exchange.conversation import measure_clocks
from ddpdoctor.exchange.meeting import by_port
offset = measure_clocks(by_port(("127.0.0.1",), int(sys.argv[1])).open(b"token", 60))
print(offset.wall_s, offset.monotonic_ns, offset.error_ns)
"""


# What verbs need of each other's processes: records, all of them, one value, an alarm, and a goodbye.


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
    with HostedMeeting(0, TOKEN, one_host=True) as meeting:
        yield meeting


@pytest.mark.parametrize("length", [0, 100, 2 * CHUNK_BYTES])
def test_a_record_of_any_size_arrives(talk, length):
    text = random.Random(1).randbytes(length).hex()  # zlib makes it half as long
    talk.send("a", Said(text=text))
    assert talk.get(Said, "a", "rank 1") == Said(text=text)
    assert talk.get(Said, "b", "rank 1") is None


def test_gather_returns_what_comes_in_time_and_what_is_no_record_is_refused(talk):
    talk.send("a/1", Said(text="one"))
    Conversation(talk.store, b"other").send("a/2", Said(text="x"))
    talk.store.set("a/3", b"rubbish")
    talk.store.set("a/4", b"x" * 40)
    bad = {}
    heard = talk.gather(
        Said, "a", lambda: range(1, 6), 0.1, on_bad=lambda number, error: bad.update({number: str(error)})
    )
    assert heard == {1: Said(text="one")}
    assert (bad[2], bad[3]) == (
        "rank 2 sent a message signed with another token", "rank 3 sent something that is not a message of ddpdoctor",
    )  # fmt: skip
    assert "limit" in bad[4]
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


def test_all_have_what_rank_0_decided_the_first_alarm_counts_and_questions_are_none(talk):
    assert talk.agree(Said, "a", Said(text="x"), 1) == talk.agree(Said, "a", None, 1) == Said(text="x")
    with pytest.raises(StoreError, match=r"no message from rank 0 within 0\.1 s"):
        talk.agree(Said, "b", None, 0.1)
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


def test_a_goodbye_that_was_heard_counts_though_the_server_has_ended(hosted, monkeypatch):
    """It ends as soon as the goodbye was read there."""
    store = hosted.values
    Conversation(store, TOKEN).say_goodbye(Said(text="bye"), lambda: 0, 0)

    def get(key, get=store.get):
        found = get(key)
        if found is not None and key.endswith("goodbye"):
            hosted.__exit__(None, None, None)
        return found

    monkeypatch.setattr(store, "get", get)
    assert Conversation(store, TOKEN).hear_goodbye(Said, 5) == Said(text="bye")
    with pytest.raises(StoreError):
        store.add("heard", 0)


def test_a_server_that_ends_before_the_goodbye_is_lost(hosted):
    talk = Conversation(hosted.values, TOKEN)
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


# Messages are refused where they are damaged, too large, or not signed as they should be.


PLAIN = {"a": [1, 2.5, None, True, "é\udcff"]}


def raw(
    payload: bytes, *, magic: bytes = b"DDPD", version: int = 1, signed: int = 0, length: int | None = None
) -> bytes:
    return struct.pack("!4sBBI", magic, version, signed, len(payload) if length is None else length) + payload


GOOD = zlib.compress(b"[1]")
BOMB = zlib.compress(b"[" + b" " * (MAX_PLAIN_BYTES + 1) + b"]")
assert len(BOMB) < MAX_PACKED_BYTES


def test_what_is_packed_is_unpacked_and_is_json():
    assert [unpack(pack(PLAIN, token), token) for token in (None, TOKEN)] == [PLAIN] * 2
    assert json.loads(zlib.decompress(pack(PLAIN)[struct.calcsize("!4sBBI") :])) == PLAIN
    with pytest.raises(BadMessage, match="over the limit"):
        pack("x" * (MAX_PLAIN_BYTES + 1))


def unpacked(row):
    """Unpack a message, which must be signed with the token where there is one."""
    message, _, token = row.partition(" | ")
    return unpack(eval(message), eval(token) if token else None)


test_words = words(__name__, unpack=unpacked)


# Members are heard, say that they leave, or are lost: the server can tell which, at a small cost.


LIMIT_S = 60.0


def opener(hosted):
    return lambda limit_s: by_port(("127.0.0.1",), hosted.port).open(TOKEN, limit_s)


@contextlib.contextmanager
def beats(connect, member, **options):
    beating = Heartbeating(connect, member, **options)
    beating.start()
    with contextlib.closing(beating):
        yield beating


def heard(hosted, member):
    return hosted.values.heard().get(member)


def test_a_member_is_heard_with_what_it_says_hears_the_notice_and_is_not_lost_if_it_leaves(hosted):
    notices = []
    hosted.announce(b"all is well")
    with beats(opener(hosted), "3", on_notice=notices.append) as beating:
        assert wait_until(lambda: heard(hosted, "3") is not None, LIMIT_S)
        first = heard(hosted, "3")
        beating.said = b"step 7"
        hosted.announce(b"evidence, please")
        beating.beat_now()
        assert wait_until(lambda: heard(hosted, "3").said == b"step 7", LIMIT_S)
        assert wait_until(lambda: notices == [b"all is well", b"evidence, please"], LIMIT_S)
        assert heard(hosted, "3").heard_ns > first.heard_ns
        assert beating.heard_ns is not None
        assert beating.leave(b"0")
    assert wait_until(lambda: len(hosted.server.peers) == 0, LIMIT_S)
    assert (first.left, heard(hosted, "3").left, heard(hosted, "3").broken_ns) == (None, b"0", None)


def test_a_member_is_lost_with_its_last_connection_and_comes_again(hosted):
    opener(hosted)(LIMIT_S).close()  # one that never beat loses nobody
    former, client = opener(hosted)(LIMIT_S), opener(hosted)(LIMIT_S)
    former.beat("3")
    client.beat("3", b"step 7")
    before = heard(hosted, "3")
    former.close()
    assert wait_until(lambda: len(hosted.server.peers) == 1, LIMIT_S)
    assert heard(hosted, "3").broken_ns is None
    client.close()
    assert wait_until(lambda: heard(hosted, "3").broken_ns is not None, LIMIT_S)
    assert heard(hosted, "3").said == b"step 7"
    assert heard(hosted, "3").broken_ns >= before.heard_ns
    with contextlib.closing(opener(hosted)(LIMIT_S)) as again:
        again.beat("3")
        assert heard(hosted, "3").broken_ns is None
    assert hosted.values.heard().keys() == {"3"}


def test_a_member_comes_again_by_itself_where_its_connection_broke(hosted):
    clients = []

    def open_it(limit_s):
        clients.append(opener(hosted)(limit_s))
        return clients[-1]

    with beats(open_it, "3") as beating:
        assert wait_until(lambda: heard(hosted, "3") is not None, LIMIT_S)
        clients[0]._connection.shutdown(socket.SHUT_RDWR)
        beating.beat_now()
        assert wait_until(lambda: len(clients) == 2 and heard(hosted, "3").broken_ns is None, LIMIT_S)


def test_a_member_that_reaches_nobody_knows_and_can_leave():
    nowhere = by_port(("127.0.0.1",), free_port())
    tried = threading.Event()

    def open_it(_):
        tried.set()
        return nowhere.open(TOKEN, 0.1)

    with beats(open_it, "3") as beating:
        assert tried.wait(LIMIT_S)
        assert not beating.leave(b"0")
        assert beating.heard_ns is None


def test_over_a_folder_a_member_beats_less_often(hosted, tmp_path):
    hosted.serve_folder(tmp_path)
    client = by_folder(tmp_path).open(TOKEN, LIMIT_S)
    with beats(lambda _: client, "3") as beating:
        assert wait_until(lambda: heard(hosted, "3") is not None, LIMIT_S)
        assert beating.leave(b"1")
    assert heard(hosted, "3").left == b"1"
    assert client.beat_every_s >= 3 * BEAT_EVERY_S


def test_beats_take_less_than_a_kibibyte_a_second():
    """The largest beat and answer, each with a TCP segment of 66 bytes of headers and one that acknowledges it."""
    member = "member-of-a-job-with-a-name-of-32"
    asked = LENGTH.size + len(pack_request(RequestType.BEAT, member, bytes(MAX_SAID_BYTES)))
    answered = LENGTH.size + 1 + MAX_NOTICE_BYTES
    assert (asked + answered + 4 * 66) / BEAT_EVERY_S < 1024


def test_what_is_over_the_limit_is_refused_and_the_connection_lives(hosted):
    client = opener(hosted)(LIMIT_S)
    with pytest.raises(StoreError, match="the heartbeat is over the limit"):
        client.beat("3", bytes(MAX_SAID_BYTES + 1))
    with pytest.raises(StoreError, match="the heartbeat is over the limit"):
        client.leave("3", bytes(MAX_SAID_BYTES + 1))
    with pytest.raises(StoreError, match="over the limit"):
        hosted.announce(bytes(MAX_NOTICE_BYTES + 1))
    assert hosted.values.heard() == {}
    assert client.beat("3") == b""


def test_there_are_only_so_many_members():
    presences = KeyValues()
    for number in range(MAX_MEMBERS):
        presences.beat(str(number), b"")
    with pytest.raises(StoreError, match="over the limit"):
        presences.beat("one more", b"")
    presences.beat("0", b"again")
    heard = presences.heard()["0"]
    assert heard == Heard(heard_ns=heard.heard_ns, said=b"again")


def test_a_loss_after_the_last_word_is_none():
    presences = KeyValues()
    presences.leave("3", b"0")
    presences.lose("3")
    presences.lose("nobody")
    (heard,) = presences.heard().items()
    assert heard == ("3", Heard(heard_ns=heard[1].heard_ns, left=b"0"))
