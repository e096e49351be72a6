"""Members are heard, say that they leave, or are lost: the server can tell which, at a small cost."""

import contextlib
import socket
import threading

import pytest

from ddpdoctor.exchange.meeting import Folder, Heartbeating, HostedMeeting, OwnPort, open_meeting
from ddpdoctor.exchange.store import (
    BEAT_EVERY_S,
    MAX_MEMBERS,
    MAX_NOTICE_BYTES,
    MAX_SAID_BYTES,
    Heard,
    KeyValues,
    StoreError,
)
from ddpdoctor.exchange.wire import LENGTH, RequestType, pack_request
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until

TOKEN = b"token"
LIMIT_S = 60.0


@pytest.fixture
def hosted():
    with HostedMeeting(0, TOKEN, one_host=True) as meeting:
        yield meeting


def opener(hosted):
    return lambda limit_s: open_meeting(OwnPort(("127.0.0.1",), hosted.port), TOKEN, limit_s)


@contextlib.contextmanager
def beats(connect, member, **options):
    beating = Heartbeating(connect, member, **options)
    beating.start()
    with contextlib.closing(beating):
        yield beating


def heard(hosted, member):
    return hosted.heard().get(member)


def test_a_member_is_heard_with_what_it_says_and_hears_the_notice(hosted):
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
    assert first.left is None


def test_a_member_that_leaves_is_not_lost(hosted):
    with beats(opener(hosted), "3") as beating:
        assert wait_until(lambda: heard(hosted, "3") is not None, LIMIT_S)
        assert beating.leave(b"0")
    assert wait_until(lambda: len(hosted.server.peers) == 0, LIMIT_S)
    assert heard(hosted, "3").left == b"0"
    assert heard(hosted, "3").broken_ns is None


def test_a_member_whose_connection_ends_without_a_word_is_lost(hosted):
    client = opener(hosted)(LIMIT_S)
    client.beat("3", b"step 7")
    before = heard(hosted, "3")
    client.close()

    assert wait_until(lambda: heard(hosted, "3").broken_ns is not None, LIMIT_S)
    assert heard(hosted, "3").said == b"step 7"
    assert heard(hosted, "3").broken_ns >= before.heard_ns
    # It comes again.
    again = opener(hosted)(LIMIT_S)
    again.beat("3")
    assert heard(hosted, "3").broken_ns is None
    again.close()


def test_a_member_that_beats_by_a_new_connection_is_not_lost_with_the_former(hosted):
    former, new = opener(hosted)(LIMIT_S), opener(hosted)(LIMIT_S)
    former.beat("3")
    new.beat("3")
    former.close()

    assert wait_until(lambda: len(hosted.server.peers) == 1, LIMIT_S)
    assert heard(hosted, "3").broken_ns is None


def test_a_connection_that_never_beat_loses_nobody(hosted):
    opener(hosted)(LIMIT_S).close()
    assert wait_until(lambda: len(hosted.server.peers) == 0, LIMIT_S)
    assert hosted.heard() == {}


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
    nowhere = OwnPort(("127.0.0.1",), free_port())
    tried = threading.Event()

    def open_it(_):
        tried.set()
        return open_meeting(nowhere, TOKEN, 0.1)

    with beats(open_it, "3") as beating:
        assert tried.wait(LIMIT_S)
        assert not beating.leave(b"0")
        assert beating.heard_ns is None


def test_over_a_folder_a_member_beats_less_often(hosted, tmp_path):
    hosted.serve_folder(tmp_path)
    client = open_meeting(Folder(tmp_path), TOKEN, LIMIT_S)
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
    assert hosted.heard() == {}
    assert client.beat("3") == b""


def test_there_are_only_so_many_members():
    presences = KeyValues(lambda: 7)
    for number in range(MAX_MEMBERS):
        presences.beat(str(number), b"")
    with pytest.raises(StoreError, match="over the limit"):
        presences.beat("one more", b"")
    presences.beat("0", b"again")
    assert presences.heard()["0"] == Heard(heard_ns=7, said=b"again")


def test_a_loss_after_the_last_word_is_none():
    presences = KeyValues(lambda: 7)
    presences.leave("3", b"0")
    presences.lose("3")
    presences.lose("nobody")
    assert presences.heard() == {"3": Heard(heard_ns=7, left=b"0")}
