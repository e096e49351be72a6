"""The meeting is found by whatever way gets through, and who serves it where none does."""

import contextlib
import socket
import subprocess
import sys
import threading
from itertools import permutations

import pytest

from ddpdoctor.exchange.mailbox import FOLDER
from ddpdoctor.exchange.meeting import (
    BETTER_WITHIN_S,
    SETTLE_S,
    Folder,
    HostedMeeting,
    NoMeeting,
    OverStore,
    OwnPort,
    ServerCandidate,
    find_deputy,
    find_meeting,
    open_meeting,
    race,
)
from ddpdoctor.exchange.store import MAX_VALUE_BYTES, StoreError
from ddpdoctor.model.reaching import Contact
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until
from tests.unit.exchange.shelf import Shelf

# The meeting is found by whatever way gets through, and what was in the way of the others is reported.


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


# Where the first member never comes, the lowest of those that are there serves the meeting in a shared folder.


class Waiting:
    """Members that wait in one folder, by a clock of the test's own."""

    def __init__(self, path, *numbers):
        self.now_s = 100.0
        self.members = {number: ServerCandidate(path, number, lambda: self.now_s) for number in numbers}

    def pass_time(self, seconds, without=()):
        for _ in range(round(seconds * 2)):
            self.now_s += 0.5
            for number, member in self.members.items():
                if number not in without:
                    member.update()

    @property
    def lowest(self):
        return [number for number, member in self.members.items() if member.is_lowest]


def test_nobody_serves_before_the_others_could_be_seen(tmp_path):
    waiting = Waiting(tmp_path, 3, 1, 2)
    waiting.pass_time(SETTLE_S - 0.5)
    assert waiting.lowest == []
    waiting.pass_time(1)
    assert waiting.lowest == [1]


def test_who_has_no_number_comes_after_all_that_have_one(tmp_path):
    waiting = Waiting(tmp_path, None, 7)
    waiting.pass_time(SETTLE_S + 1)
    assert waiting.lowest == [7]


def test_of_two_with_the_same_number_one_serves(tmp_path):
    """So it is with a node rank that was given twice."""
    waiting = Waiting(tmp_path, 1)
    waiting.members["again"] = ServerCandidate(tmp_path, 1, lambda: waiting.now_s)
    waiting.pass_time(SETTLE_S + 1)
    assert len(waiting.lowest) == 1


def test_one_that_was_killed_is_not_waited_for(tmp_path):
    waiting = Waiting(tmp_path, 1, 2)
    waiting.pass_time(SETTLE_S - 1)
    assert not waiting.members[2].is_lowest
    waiting.pass_time(SETTLE_S + 1, without=(1,))
    assert waiting.members[2].is_lowest


def test_what_a_former_run_left_is_nobody(tmp_path):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / f"here-00000000-{'0' * 16}").write_bytes(b"7")
    waiting = Waiting(tmp_path, 2)
    waiting.pass_time(SETTLE_S + 1)
    assert waiting.lowest == [2]


def test_one_that_leaves_takes_its_file_away(tmp_path):
    waiting = Waiting(tmp_path, 1)
    waiting.pass_time(1)
    waiting.members[1].close()
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_one_serves_and_the_others_find_it(tmp_path):
    """It is the lowest, unless that one stands still for so long that it counts as gone, as on a very busy machine."""
    results = {}

    def wait(number):
        client = find_deputy(tmp_path, TOKEN, number, 100)
        results[number] = "serves" if client is None else client.add("guests", 1)
        if client is None:
            hosted.serve_folder(tmp_path)

    with HostedMeeting(None, TOKEN) as hosted:
        threads = [threading.Thread(target=wait, args=(number,)) for number in (3, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, results.values())) == ["1", "serves"]


def test_a_lower_one_that_serves_nothing_is_waited_for_until_the_limit(tmp_path):
    lower, ended = ServerCandidate(tmp_path, 0), threading.Event()

    def keep():
        while not ended.wait(0.1):
            lower.update()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        with pytest.raises(StoreError, match="a node with a lower number has joined"):
            find_deputy(tmp_path, TOKEN, 1, SETTLE_S + 0.3)
    finally:
        ended.set()
        thread.join()


# Of several ways the best that gets through in time is taken, in whatever order they do, and the others are closed.


class Line:
    """Stands for a connection."""

    def __init__(self):
        self.closed = threading.Event()

    def close(self):
        self.closed.set()


class Lane:
    """A way that gets through once ``through`` is set."""

    def __init__(self):
        self.line, self.through = Line(), threading.Event()

    def open(self, limit_s):
        if not self.through.wait(limit_s):
            raise StoreError("blocked")
        return self.line


def race_in_order(order, *, blocked=()):
    """Have three ways get through one after the other; return the winner's place, and the lanes."""
    lanes = [Lane() for _ in range(3)]
    for place in order:
        if place not in blocked:
            lanes[place].through.set()
    return race([lane.open for lane in lanes], LIMIT_S).best, lanes


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_first_wins_where_all_get_through(order):
    winner, lanes = race_in_order(order)
    assert winner == 0
    assert [lane.line.closed.wait(LIMIT_S) for lane in lanes[1:]] == [True, True]
    assert not lanes[0].line.closed.is_set()


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_blocked_first_is_not_waited_for(order):
    winner, lanes = race_in_order(order, blocked=(0,))
    assert winner == 1
    assert lanes[2].line.closed.wait(LIMIT_S)
    # It gets through after all: nobody wants it.
    lanes[0].through.set()
    assert lanes[0].line.closed.wait(LIMIT_S)


def test_a_worse_one_that_gets_through_while_a_better_is_waited_for_changes_nothing():
    lanes = [Lane() for _ in range(3)]
    lanes[1].through.set()
    threading.Timer(BETTER_WITHIN_S / 4, lanes[2].through.set).start()
    assert race([lane.open for lane in lanes], LIMIT_S).best == 1


def test_nobody_wins_where_none_gets_through():
    raced = race([Lane().open], 2.0)
    assert (raced.best, raced.errors) == (None, {0: "blocked"})
