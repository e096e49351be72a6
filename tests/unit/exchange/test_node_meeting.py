"""The meeting is found by whatever way gets through, and what was in the way of the others is reported."""

import contextlib
import socket
import subprocess
import sys
import threading

import pytest

from ddpdoctor.exchange.meeting import (
    Folder,
    HostedMeeting,
    NoMeeting,
    OverStore,
    OwnPort,
    find_meeting,
    open_meeting,
)
from ddpdoctor.exchange.store import MAX_VALUE_BYTES, StoreError
from ddpdoctor.model.reaching import Contact
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until
from tests.unit.exchange.shelf import Shelf

TOKEN = b"token"
LIMIT_S = 60.0
BRIEFLY_S = 2.0
"""For what nobody answers. Time enough for a thread to try once, on a busy machine too."""


@pytest.fixture
def meeting():
    with HostedMeeting(0, TOKEN, one_host=True) as hosted:
        yield hosted


@pytest.fixture
def ways(meeting, tmp_path):
    """Every way to a meeting."""
    shelf = Shelf()
    meeting.serve_over(shelf)
    meeting.serve_folder(tmp_path)
    return {
        "own port": OwnPort(("127.0.0.1",), meeting.port),
        "store": OverStore(lambda _: shelf),
        "folder": Folder(tmp_path),
    }


def blocked_port():
    return OwnPort(("127.0.0.1",), free_port())


@pytest.mark.parametrize("name", ["own port", "store", "folder"])
def test_values_and_counters_by_every_way(meeting, ways, name):
    found = find_meeting([ways[name]], TOKEN, LIMIT_S)
    own = meeting.store()
    found.store.set("a", b"\0\xff" * 100_000)

    assert (found.way, found.tried) == (name, ())
    assert own.get("a") == found.store.get("a") == b"\0\xff" * 100_000
    assert found.store.get("b") is None
    assert [own.add("n", 1), found.store.add("n", 2), found.store.add("n", 0)] == [1, 3, 3]
    found.store.forget("a")
    assert own.get("a") is None
    found.store.close()
    found.store.close()


@pytest.mark.parametrize("name", ["own port", "store", "folder"])
def test_a_value_over_the_limit_is_refused_in_words_by_every_way(ways, name):
    store = open_meeting(ways[name], TOKEN, LIMIT_S)
    with pytest.raises(StoreError, match="over the limit"):
        store.set("large", bytes(MAX_VALUE_BYTES + 1))
    assert store.add("n", 1) == 1


@pytest.mark.parametrize("name", ["own port", "store", "folder"])
def test_the_same_way_is_open_again(ways, name):
    found = find_meeting([ways[name]], TOKEN, LIMIT_S)
    assert found.store.add("n", 1) == 1
    assert found.open(LIMIT_S).add("n", 1) == 2


def test_threads_share_a_connection_over_a_mailbox(ways):
    store = open_meeting(ways["store"], TOKEN, LIMIT_S)
    sums = []
    threads = [threading.Thread(target=lambda: sums.extend(store.add("n", 1) for _ in range(5))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 21))


def test_the_way_that_is_wanted_first_is_taken_where_all_get_through(ways):
    assert find_meeting([*ways.values()], TOKEN, LIMIT_S).way == "own port"
    assert find_meeting([*ways.values()][::-1], TOKEN, LIMIT_S).way == "folder"


def test_what_the_blocked_ways_saw_is_reported_and_typed(ways):
    port = blocked_port()
    found = find_meeting([port, ways["folder"]], TOKEN, LIMIT_S)

    assert found.way == "folder"
    (tried,) = found.tried
    assert (tried.way, tried.words) == ("own port", f"127.0.0.1:{port.port}: connection refused")
    (attempt,) = tried.attempts
    assert (attempt.host, attempt.address, attempt.port) == ("127.0.0.1", "127.0.0.1", port.port)
    assert attempt.contact is Contact.REFUSED


def test_where_no_way_gets_through_each_says_what_it_saw(tmp_path):
    def closed(_):
        raise StoreError("it refuses")

    nowhere = OwnPort(("no-such-host.invalid",), 1)
    with pytest.raises(NoMeeting) as reported:
        find_meeting([nowhere, OverStore(closed), Folder(tmp_path)], TOKEN, BRIEFLY_S)
    assert str(reported.value).startswith("by own port: no-such-host.invalid:1: the name does not resolve")
    assert str(reported.value).endswith("; by store: it refuses; by folder: it has no server")
    assert [attempt.contact for attempt in reported.value.tried[0].attempts] == [Contact.UNRESOLVED]


def test_without_any_way_there_is_no_meeting():
    with pytest.raises(NoMeeting, match="no way is known"):
        find_meeting([], TOKEN, 0.1)


def test_what_answers_and_is_no_ddpdoctor_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(NoMeeting, match="another program answers, not ddpdoctor") as reported:
            find_meeting([OwnPort(("127.0.0.1",), server.getsockname()[1])], TOKEN, BRIEFLY_S)
    assert reported.value.tried[0].attempts[0].contact is Contact.NO_STORE


def test_a_meeting_that_opens_later_is_waited_for(tmp_path):
    port = free_port()
    opened = threading.Event()
    with contextlib.ExitStack() as stack:

        def serve():
            hosted = stack.enter_context(HostedMeeting(port, TOKEN, one_host=True))
            hosted.serve_folder(tmp_path)
            opened.set()

        threading.Timer(0.3, serve).start()
        found = find_meeting([OwnPort(("127.0.0.1",), port), Folder(tmp_path)], TOKEN, LIMIT_S)
        assert opened.wait(LIMIT_S)
        assert found.store.add("n", 1) == 1


def test_a_port_that_is_taken_leaves_the_other_ways(meeting, tmp_path):
    with HostedMeeting(meeting.port, TOKEN, one_host=True) as hosted:
        assert hosted.not_listening == f"cannot listen on port {meeting.port}: Address already in use"
        assert hosted.port == 0
        hosted.serve_folder(tmp_path)
        assert open_meeting(Folder(tmp_path), TOKEN, LIMIT_S).add("n", 1) == 1
        assert hosted.store().add("n", 0) == 1


def test_the_own_store_needs_no_network():
    """Neither a port nor a loopback interface."""
    with HostedMeeting(None, TOKEN) as hosted:
        assert hosted.store().add("n", 1) == 1


def test_a_meeting_that_has_closed_says_so(tmp_path):
    with HostedMeeting(None, TOKEN) as hosted:
        own = hosted.store()
        hosted.serve_folder(tmp_path)
        by_folder = open_meeting(Folder(tmp_path), TOKEN, LIMIT_S)
    with pytest.raises(StoreError):
        own.get("a")
    with pytest.raises(StoreError):
        by_folder.ask(b"", 0.1)
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_hold_the_token_gets_in_by_no_way(meeting, ways):
    with pytest.raises(NoMeeting) as reported:
        find_meeting([*ways.values()], b"another", BRIEFLY_S)
    assert all("has another token" in tried.words for tried in reported.value.tried)
    assert meeting.server.strangers >= 1
    assert meeting.heard() == {}


def test_a_folder_that_another_run_has_left_behind_is_no_meeting(tmp_path):
    """The former first node was killed: what shows its meeting is still there, and so is a message to it."""
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout.readline() == "1\n"
    killed.kill()
    killed.wait()
    assert (tmp_path / ".meeting" / "meeting").exists()
    with pytest.raises(NoMeeting, match="does not answer"):
        find_meeting([Folder(tmp_path)], TOKEN, BRIEFLY_S)

    with HostedMeeting(None, TOKEN) as hosted:
        hosted.serve_folder(tmp_path)
        assert find_meeting([Folder(tmp_path)], TOKEN, LIMIT_S).store.add("n", 1) == 1


KILLED = """
import sys
from pathlib import Path
from ddpdoctor.exchange.meeting import Folder, HostedMeeting, open_meeting
with HostedMeeting(None, b"token") as hosted:
    hosted.serve_folder(Path(sys.argv[1]))
    print(open_meeting(Folder(Path(sys.argv[1])), b"token", 10).add("n", 1), flush=True)
    sys.stdin.read()
"""


def test_a_store_that_ends_ends_that_way_alone(meeting):
    shelf = Shelf()
    forwarder = meeting.serve_over(shelf)
    shelf.ended = True

    assert wait_until(lambda: forwarder.failed == "the store has ended", LIMIT_S)
    assert open_meeting(OwnPort(("127.0.0.1",), meeting.port), TOKEN, LIMIT_S).add("n", 1) == 1


def test_a_folder_that_cannot_be_written_is_reported(meeting, tmp_path):
    (tmp_path / "file").touch()
    forwarder = meeting.serve_folder(tmp_path / "file")

    assert wait_until(lambda: "cannot be made: Not a directory" in forwarder.failed, LIMIT_S)


def test_the_losers_are_hung_up_on(ways):
    found = find_meeting([*ways.values()], TOKEN, LIMIT_S)
    assert found.store.add("n", 1) == 1
    assert wait_until(
        lambda: not [thread for thread in threading.enumerate() if thread.name == "ddpdoctor-find"], LIMIT_S
    )
