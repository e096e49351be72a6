"""The meeting is found by whatever way gets through, and who serves it where none does."""

import contextlib
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.exchange.mailbox import (
    FOLDER,
    LARGE_BYTES,
    LATE_S,
    LINE_BYTES,
    MAX_LINES,
    MAX_MESSAGE_BYTES,
    MEETING_BYTES,
    SLOTS,
    FolderBox,
    Forwarder,
    MailboxClient,
    Message,
    StoreBox,
)
from ddpdoctor.exchange.meeting import (
    BETTER_WITHIN_S,
    SETTLE_S,
    HostedMeeting,
    NoMeeting,
    ServerCandidate,
    by_folder,
    by_port,
    by_store,
    find_deputy,
    find_meeting,
    race,
)
from ddpdoctor.exchange.store import MAX_VALUE_BYTES, KeyValues, StoreError
from ddpdoctor.exchange.wire import HELLO, NONCE_BYTES, PROOF_BYTES, RequestType, pack_request
from ddpdoctor.model.launch import Contact
from tests.golden import words
from tests.scenarios.running import free_port
from tests.scenarios.running import wait_for as wait_until
from tests.unit.exchange.shelf import Shelf, served

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
        "own port": by_port(("127.0.0.1",), meeting.port),
        "store": by_store(lambda _: shelf),
        "folder": by_folder(tmp_path),
    }


@pytest.mark.parametrize("name", ["own port", "store", "folder"])
def test_values_and_counters_by_every_way(meeting, ways, name):
    found = find_meeting([ways[name]], TOKEN, LIMIT_S)
    own, store = meeting.values, found.store
    store.set("a", b"\0\xff" * 100_000)

    assert (found.way, found.tried) == (name, ())
    assert own.get("a") == store.get("a") == b"\0\xff" * 100_000
    assert store.get("b") is None
    assert [own.add("n", 1), store.add("n", 2), store.add("n", 0)] == [1, 3, 3]
    assert (own.add("fresh", 0), own.get("fresh")) == (0, None)
    with pytest.raises(StoreError, match="over the limit"):
        store.set("large", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(StoreError, match="whole numbers"):
        store.add("a", 1)
    store.forget("a")
    assert own.get("a") is None
    assert found.open(LIMIT_S).add("n", 1) == 4  # the same way is open again
    store.close()
    store.close()


def test_threads_share_a_connection_over_a_mailbox(ways):
    store = ways["store"].open(TOKEN, LIMIT_S)
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: store.add("n", 1), range(20))) == list(range(1, 21))


def test_the_way_that_is_wanted_first_is_taken_where_all_get_through_and_the_losers_are_hung_up_on(ways):
    found = find_meeting([*ways.values()], TOKEN, LIMIT_S)
    assert (found.way, found.store.add("n", 1)) == ("own port", 1)
    assert find_meeting([*ways.values()][::-1], TOKEN, LIMIT_S).way == "folder"
    assert wait_until(lambda: "ddpdoctor-find" not in {one.name for one in threading.enumerate()}, LIMIT_S)
    with pytest.raises(NoMeeting, match="no known way"):
        find_meeting([], TOKEN, 0.1)


def test_what_the_blocked_ways_saw_is_reported_and_typed(ways, tmp_path):
    def closed(_):
        raise StoreError("it refuses")

    port = free_port()
    found = find_meeting([by_port(("127.0.0.1",), port), ways["folder"]], TOKEN, LIMIT_S)
    assert found.way == "folder"
    (tried,) = found.tried
    assert (tried.way, tried.words) == ("own port", f"127.0.0.1:{port}: connection refused")
    (attempt,) = tried.attempts
    assert (attempt.host, attempt.address, attempt.port) == ("127.0.0.1", "127.0.0.1", port)
    assert attempt.contact is Contact.REFUSED
    (tmp_path / "none").mkdir()
    nowhere = by_port(("no-such-host.invalid",), 1)
    with pytest.raises(NoMeeting) as reported:
        find_meeting([nowhere, by_store(closed), by_folder(tmp_path / "none")], TOKEN, BRIEFLY_S)
    assert str(reported.value).startswith("by own port: no-such-host.invalid:1: the name does not resolve")
    assert str(reported.value).endswith("; by store: it refuses; by folder: it has no server")
    assert [attempt.contact for attempt in reported.value.tried[0].attempts] == [Contact.UNRESOLVED]


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program answers, not ddpdoctor"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n", "another program answers, not ddpdoctor"),
        (HELLO + bytes(NONCE_BYTES) + bytes(PROOF_BYTES), "has another token"),
    ],
    ids=["http", "ssh", "another ddpdoctor"],
)
def test_what_answers_and_is_another_is_not_believed_and_reported(greeting, words):
    with served(lambda one: one.sendall(greeting)) as port, pytest.raises(NoMeeting, match=words) as reported:
        find_meeting([by_port(("127.0.0.1",), port)], TOKEN, BRIEFLY_S)
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
        found = find_meeting([by_port(("127.0.0.1",), port), by_folder(tmp_path)], TOKEN, LIMIT_S)
        assert opened.wait(LIMIT_S)
        assert found.store.add("n", 1) == 1


def test_a_port_that_is_taken_leaves_the_other_ways(meeting, tmp_path):
    with HostedMeeting(meeting.port, TOKEN, one_host=True) as hosted:
        assert hosted.not_listening == f"cannot listen on port {meeting.port}: Address already in use"
        assert hosted.port == 0
        hosted.serve_folder(tmp_path)
        assert by_folder(tmp_path).open(TOKEN, LIMIT_S).add("n", 1) == 1
        assert hosted.values.add("n", 0) == 1


def test_a_meeting_that_has_closed_says_so(tmp_path):
    with HostedMeeting(None, TOKEN) as hosted:
        own = hosted.values
        hosted.serve_folder(tmp_path)
        member = by_folder(tmp_path).open(TOKEN, LIMIT_S)
    with pytest.raises(StoreError):
        own.get("a")
    with pytest.raises(StoreError):
        member.ask(b"", 0.1)
    assert list(tmp_path.iterdir()) == []


def test_who_does_not_hold_the_token_gets_in_by_no_way(meeting, ways):
    with pytest.raises(NoMeeting) as reported:
        find_meeting([*ways.values()], b"another", BRIEFLY_S)
    assert all("has another token" in tried.words for tried in reported.value.tried)
    assert meeting.server.strangers >= 1
    assert meeting.values.heard() == {}


def test_a_folder_that_another_run_has_left_behind_is_no_meeting(tmp_path):
    """The former first node was killed: what shows its meeting is still there, and so is a message to it."""
    (tmp_path / "its").mkdir()
    with HostedMeeting(None, TOKEN) as killed:
        killed.serve_folder(tmp_path / "its")
        by_folder(tmp_path / "its").open(TOKEN, LIMIT_S).add("n", 1)
        shutil.copytree(tmp_path / "its", tmp_path / "left")
    assert (tmp_path / "left" / FOLDER / "meeting").exists()
    with pytest.raises(NoMeeting, match="does not answer"):
        find_meeting([by_folder(tmp_path / "left")], TOKEN, BRIEFLY_S)
    with HostedMeeting(None, TOKEN) as hosted:
        hosted.serve_folder(tmp_path / "left")
        assert find_meeting([by_folder(tmp_path / "left")], TOKEN, LIMIT_S).store.add("n", 1) == 1


def test_a_store_that_ends_and_a_folder_that_cannot_be_written_end_their_ways_alone(meeting, tmp_path):
    shelf = Shelf()
    by_store = meeting.serve_over(shelf)
    shelf.ended = True
    (tmp_path / "file").touch()
    by_folder = meeting.serve_folder(tmp_path / "file")

    assert wait_until(lambda: by_store.failed == "the store has ended", LIMIT_S)
    assert wait_until(lambda: "cannot be made: Not a directory" in by_folder.failed, LIMIT_S)
    assert by_port(("127.0.0.1",), meeting.port).open(TOKEN, LIMIT_S).add("n", 1) == 1


# Where the first member never comes, the lowest of those that are there serves the meeting in a shared folder.


BEFORE, AFTER = SETTLE_S - 1, SETTLE_S + 1


def lowest_of(row):
    """Return who is the lowest of members with these numbers at these times; what a former run left is nobody."""
    numbers, times = eval(row)
    now_s, found = [100.0], []
    with TemporaryDirectory() as place:
        (Path(place) / FOLDER).mkdir()
        (Path(place) / FOLDER / f"here-00000000-{'0' * 16}").write_bytes(b"7")
        members = [(number, ServerCandidate(Path(place), number, lambda: now_s[0])) for number in numbers]
        for seconds, living in times:
            for _ in range(round(seconds * 2)):
                now_s[0] += 0.5
                for number, member in members:
                    if number in living:
                        member.update()
            found.append([number for number, member in members if number in living and member.is_lowest])
        before = set((Path(place) / FOLDER).iterdir())
        members[0][1].close()
        assert len(before - set((Path(place) / FOLDER).iterdir())) == 1, "one that leaves takes its file away"
    return found


test_words = words(__name__, lowest=lowest_of)


def test_one_serves_and_the_others_find_it(tmp_path):
    """It is the lowest, unless that one stands still for so long that it counts as gone, as on a very busy machine."""

    def wait(number):
        client = find_deputy(tmp_path, TOKEN, number, 100)
        if client is None:
            hosted.serve_folder(tmp_path)
        return "serves" if client is None else f"guest {client.add('guests', 1)}"

    with HostedMeeting(None, TOKEN) as hosted, ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(wait, (3, 1))) == ["guest 1", "serves"]


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


class Line(threading.Event):
    """Stands for a connection, and says whether it was closed."""

    close = threading.Event.set


class Lane:
    """A way that gets through once ``through`` is set."""

    def __init__(self):
        self.line, self.through = Line(), threading.Event()

    def open(self, limit_s):
        if not self.through.wait(limit_s):
            raise StoreError("blocked")
        return self.line


@pytest.mark.parametrize("order", [*permutations(range(3)), (1, 2), (2, 1)])
def test_the_best_of_those_that_get_through_wins_and_a_blocked_one_is_not_waited_for(order):
    lanes = [Lane() for _ in range(3)]
    for place in order:
        lanes[place].through.set()
    winner = race([lane.open for lane in lanes], LIMIT_S).best
    assert winner == min(order)
    lanes[0].through.set()  # it gets through after all: nobody wants it
    assert all(lane.line.wait(LIMIT_S) for lane in lanes if lane is not lanes[winner])
    assert not lanes[winner].line.is_set()


def test_a_worse_one_that_gets_through_while_a_better_is_waited_for_changes_nothing_and_nobody_wins_where_none_does():
    lanes = [Lane() for _ in range(3)]
    lanes[1].through.set()
    threading.Timer(BETTER_WITHIN_S / 4, lanes[2].through.set).start()
    assert race([lane.open for lane in lanes], LIMIT_S).best == 1
    raced = race([Lane().open], 2.0)
    assert (raced.best, raced.errors) == (None, {0: "blocked"})


# Messages by way of a store or a folder that others reach too: none is forged, none counts twice, none does
# harm.


MEETING = bytes(range(MEETING_BYTES))
LINE = bytes(range(LINE_BYTES))
MESSAGE = Message(LINE, 7, b"text")


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def hosted(shelf):
    with HostedMeeting(None, TOKEN) as meeting:
        meeting.serve_over(shelf)
        yield meeting


def by_mailbox(shelf):
    return by_store(lambda _: shelf).open(TOKEN, LIMIT_S)


def add_one():
    return pack_request(RequestType.ADD, "n", b"1")


def test_a_message_is_read_as_it_was_sealed_and_refused_where_anything_differs():
    sealed = MESSAGE.seal(b"client", MEETING, TOKEN)
    assert Message.unseal(sealed, b"client", MEETING, TOKEN) == MESSAGE
    sent_back, another_meeting, another_token = (
        (b"server", MEETING, TOKEN), (b"client", MEETING[::-1], TOKEN), (b"client", MEETING, b"another"),
    )  # fmt: skip
    for place in (sent_back, another_meeting, another_token):
        with pytest.raises(BadMessage, match="of another meeting, or by another token"):
            Message.unseal(sealed, *place)
    flipped = [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in range(len(sealed))]
    for message in (*flipped, b"", b"x", bytes(100), bytes(MAX_MESSAGE_BYTES + 1)):
        with pytest.raises(BadMessage):
            Message.unseal(message, b"client", MEETING, TOKEN)


def test_a_message_that_is_seen_and_left_again_counts_once(hosted, shelf):
    """Whoever sees the job's store can copy a message, and cannot make it count."""
    client = by_mailbox(shelf)
    assert client.add("n", 1) == 1
    seen = [value for key, value in shelf.history if key.startswith("slot/")]
    for message in seen:
        ticket = shelf.add("tickets", 1)
        shelf.set(f"slot/{ticket % SLOTS}", ticket.to_bytes(8, "big") + message[8:])
    assert client.add("n", 1) == 2
    assert hosted.values.add("n", 0) == 2


def test_a_message_that_is_left_again_for_want_of_an_answer_counts_once(shelf):
    """The answer was lost, not the question."""
    with HostedMeeting(None, TOKEN) as hosted:
        inbox = StoreBox(shelf)
        forwarder = Forwarder(inbox, hosted.values, TOKEN).start()
        assert wait_until(lambda: shelf.get("meeting") is not None, LIMIT_S)
        outbox, key = StoreBox(shelf), StoreBox(shelf).meeting()
        message = Message(LINE, 1, add_one()).seal(b"client", key, TOKEN)
        outbox.post(LINE, message)
        outbox.post(LINE, message)
        assert wait_until(lambda: inbox.next_ticket == 3, LIMIT_S)
        forwarder.close()
        assert hosted.values.add("n", 0) == 1
    assert Message.unseal(outbox.answer(LINE), b"server", key, TOKEN).text[1:] == b"1"


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("garbage", [b"", b"x", random.Random(1).randbytes(200), bytes(100_000)])
def test_garbage_and_forged_answers_in_the_store_are_passed_over(shelf, garbage):
    client = by_mailbox(shelf)
    for _ in range(20):
        ticket = shelf.add("tickets", 1)
        shelf.set(f"slot/{ticket % SLOTS}", ticket.to_bytes(8, "big") + garbage)
    forged = Message(client._line, 2, b"\x00forged").seal(b"server", client._meeting, b"another")
    shelf.set(f"line/{client._line.hex()}", forged)
    assert client.get("a") is None
    assert client.add("n", 1) == 1


@pytest.mark.usefixtures("hosted")
def test_a_malformed_request_does_not_end_the_way_of_the_others(shelf):
    client = by_mailbox(shelf)
    for text in (b"\x09\x00\x01a", b"\x01\x00\x09a", b"x", b"\x01\x00\x01\xff"):
        assert client.ask(text)[1:] == b"a malformed request"
    assert by_mailbox(shelf).add("n", 1) == 1


def test_a_ticket_without_a_message_holds_up_the_others_for_a_while_only(shelf):
    now_s = [0.0]
    inbox = StoreBox(shelf, lambda: now_s[0])
    inbox.announce(MEETING)
    shelf.add("tickets", 1)
    StoreBox(shelf).post(LINE, b"message")

    assert list(inbox.messages()) == []
    now_s[0] = LATE_S - 0.1
    assert list(inbox.messages()) == []
    now_s[0] = LATE_S
    assert list(inbox.messages()) == [b"", b"message"]
    assert list(inbox.messages()) == []


@pytest.mark.usefixtures("hosted")
def test_messages_take_few_keys_of_the_store_and_little_space(shelf):
    """The store is the job's own: however long it is used, it does not fill up."""
    client = by_mailbox(shelf)
    for number in range(30):
        client.set("a", bytes(100_000))
        assert client.get("a") == bytes(100_000)
        assert client.add("n", 1) == number + 1
    client.add("n", 0)
    assert wait_until(lambda: sum(map(len, shelf.values.values())) < 100 * LARGE_BYTES, LIMIT_S)
    lines = [key for key in shelf.values if key.startswith("line/")]
    slots = [key for key in shelf.values if key.startswith("slot/")]
    assert len(lines) == 1
    assert len(slots) <= SLOTS


def test_a_new_meeting_does_not_read_what_was_left_for_the_former(shelf):
    with HostedMeeting(None, TOKEN) as former:
        former.serve_over(shelf)
        by_mailbox(shelf).add("n", 5)
    assert StoreBox(shelf).meeting() is None
    with HostedMeeting(None, TOKEN) as hosted:
        hosted.serve_over(shelf)
        assert by_mailbox(shelf).add("n", 1) == 1


def test_however_many_clients_there_have_been_the_next_one_is_answered(shelf):
    """The line that was used the longest ago is forgotten."""
    forwarder = Forwarder(StoreBox(shelf), KeyValues(), TOKEN)
    for number in range(MAX_LINES):
        forwarder._answered[number.to_bytes(LINE_BYTES, "big")] = 1
    outbox = StoreBox(shelf)
    for line, number in ((bytes(LINE_BYTES), 2), (b"f" * LINE_BYTES, 1)):
        message = Message(line, number, add_one())
        outbox.post(line, message.seal(b"client", forwarder.meeting, TOKEN))
        assert forwarder.serve_once()
        answer = Message.unseal(outbox.answer(line), b"server", forwarder.meeting, TOKEN)
        assert (answer.number, answer.text[:1]) == (number, b"\0")
    assert len(forwarder._answered) == MAX_LINES
    assert (1).to_bytes(LINE_BYTES, "big") not in forwarder._answered


def test_an_answer_that_does_not_come_is_waited_for_until_the_limit(shelf):
    client = MailboxClient(StoreBox(shelf), MEETING, TOKEN, "the first node")
    with pytest.raises(StoreError, match=r"the first node did not answer within 0\.1 s"):
        client.ask(add_one(), 0.1)


@pytest.fixture
def folder(tmp_path):
    """A folder with a meeting open in it: its inbox, an outbox, and where the files are."""
    inbox = FolderBox(tmp_path)
    inbox.announce(MEETING)
    yield inbox, FolderBox(tmp_path), tmp_path / ".meeting"
    inbox.withdraw()


def test_messages_in_a_folder_come_and_are_answered_once_each(folder):
    inbox, outbox, _ = folder
    assert outbox.meeting() == MEETING
    for message in (b"one", b"two", *(fill * MAX_VALUE_BYTES for fill in (b"a", b"b"))):
        outbox.post(LINE, message)
        assert list(inbox.messages()) == [message]
        assert list(inbox.messages()) == []
    assert outbox.answer(LINE) is None
    inbox.reply(LINE, b"answer that is long")
    inbox.reply(LINE, b"answer")
    assert outbox.answer(LINE) == b"answer"


@pytest.mark.parametrize("asks", [True, False])
def test_a_folder_is_left_as_it_was_by_whoever_leaves_it_last(tmp_path, asks):
    """Also if the request of an answer is gone, or a client's file arrives while the server clears the folder."""
    inbox, outbox = FolderBox(tmp_path), FolderBox(tmp_path)
    inbox.announce(MEETING)
    if asks:
        outbox.post(LINE, b"one")
        list(inbox.messages())
    inbox.reply(LINE, b"answer")
    late = tmp_path / ".meeting" / "late"
    if asks:
        late.touch()
    inbox.withdraw()
    assert [path.name for path in tmp_path.iterdir()] == [".meeting"] * asks
    late.unlink(missing_ok=True)
    outbox.close()
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_leaves_keeps_the_folder_of_a_meeting_that_goes_on(folder):
    _, outbox, place = folder
    outbox.post(LINE, b"one")
    outbox.close()
    assert [path.name for path in place.iterdir()] == ["meeting"]


ODD = {
    "link": lambda path: path.symlink_to(path.with_name("meeting")), "pipe": os.mkfifo, "folder": Path.mkdir,
    "large": lambda path: path.write_bytes(bytes(MAX_MESSAGE_BYTES + 1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_plain_small_file_is_not_read_nor_written_through(folder, tmp_path, kind):
    """Other files in the folder are let be."""
    inbox, _, place = folder
    (place / "notes.txt").write_text("mine")
    (tmp_path / "kept").write_bytes(b"kept")
    (place / f"{LINE.hex()}.answered").symlink_to(tmp_path / "kept")
    ODD[kind](place / f"{LINE.hex()}.asked")
    assert list(inbox.messages()) == []
    with pytest.raises(StoreError, match="cannot be written"):
        inbox.reply(LINE, b"answer")
    inbox.withdraw()
    assert [(place / "notes.txt").read_text(), (tmp_path / "kept").read_bytes()] == ["mine", b"kept"]


def test_a_message_half_written_is_read_again_when_it_is_whole(tmp_path):
    whole = {}
    with HostedMeeting(None, TOKEN) as hosted:
        hosted.serve_folder(tmp_path)
        outbox = FolderBox(tmp_path)
        assert wait_until(lambda: outbox.meeting() is not None, LIMIT_S)
        message = Message(LINE, 1, add_one()).seal(b"client", outbox.meeting(), TOKEN)
        outbox.post(LINE, message[: len(message) // 2])
        threading.Event().wait(0.05)
        outbox.post(LINE, message)
        assert wait_until(lambda: whole.setdefault("answer", outbox.answer(LINE)) or whole.clear(), LIMIT_S)
        assert hosted.values.add("n", 0) == 1
