"""Messages by way of a store or a folder that others reach too: none is forged, none counts twice, none does harm."""

import os
import random
import threading

import pytest

from ddpdoctor.exchange.conversation import BadMessage
from ddpdoctor.exchange.mailbox import (
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
from ddpdoctor.exchange.meeting import HostedMeeting, OverStore, open_meeting
from ddpdoctor.exchange.store import MAX_VALUE_BYTES, KeyValues, StoreError
from ddpdoctor.exchange.wire import RequestType, pack_request
from tests.scenarios.running import wait_for as wait_until
from tests.unit.exchange.shelf import Shelf

TOKEN = b"token"
MEETING = bytes(range(MEETING_BYTES))
LINE = bytes(range(LINE_BYTES))
LIMIT_S = 60.0
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
    return open_meeting(OverStore(lambda _: shelf), TOKEN, LIMIT_S)


def add_one():
    return pack_request(RequestType.ADD, "n", b"1")


def test_a_message_is_read_as_it_was_sealed():
    assert Message.unseal(MESSAGE.seal(b"client", MEETING, TOKEN), b"client", MEETING, TOKEN) == MESSAGE


@pytest.mark.parametrize(
    ("side", "meeting", "token"),
    [
        (b"server", MEETING, TOKEN),
        (b"client", MEETING[::-1], TOKEN),
        (b"client", MEETING, b"another"),
    ],
    ids=["sent back", "of another meeting", "by another token"],
)
def test_a_message_of_another_side_meeting_or_token_is_refused(side, meeting, token):
    with pytest.raises(BadMessage, match="of another meeting, or by another token"):
        Message.unseal(MESSAGE.seal(b"client", MEETING, TOKEN), side, meeting, token)


def test_a_message_with_any_bit_changed_is_refused():
    sealed = MESSAGE.seal(b"client", MEETING, TOKEN)
    for place in range(len(sealed)):
        changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises(BadMessage):
            Message.unseal(changed, b"client", MEETING, TOKEN)


@pytest.mark.parametrize("message", [b"", b"x", bytes(100), bytes(MAX_MESSAGE_BYTES + 1)])
def test_what_is_no_message_is_refused(message):
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
    assert hosted.store().add("n", 0) == 2


def test_a_message_that_is_left_again_for_want_of_an_answer_counts_once(shelf):
    """The answer was lost, not the question."""
    with HostedMeeting(None, TOKEN) as hosted:
        inbox = StoreBox(shelf)
        forwarder = Forwarder(inbox, hosted.store(), TOKEN).start()
        assert wait_until(lambda: shelf.get("meeting") is not None, LIMIT_S)
        outbox, key = StoreBox(shelf), announced(shelf)
        message = Message(LINE, 1, add_one()).seal(b"client", key, TOKEN)
        outbox.post(LINE, message)
        outbox.post(LINE, message)
        assert wait_until(lambda: inbox.next_ticket == 3, LIMIT_S)
        forwarder.close()
        assert hosted.store().add("n", 0) == 1
    assert Message.unseal(outbox.answer(LINE), b"server", key, TOKEN).text[1:] == b"1"


def announced(shelf):
    return StoreBox(shelf).meeting()


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("garbage", [b"", b"x", random.Random(1).randbytes(200), bytes(100_000)])
def test_garbage_in_the_store_is_passed_over(shelf, garbage):
    client = by_mailbox(shelf)
    for _ in range(20):
        ticket = shelf.add("tickets", 1)
        shelf.set(f"slot/{ticket % SLOTS}", ticket.to_bytes(8, "big") + garbage)
    assert client.add("n", 1) == 1


@pytest.mark.usefixtures("hosted")
@pytest.mark.parametrize("text", [b"\x09\x00\x01a", b"\x01\x00\x09a", b"x", b"\x01\x00\x01\xff"])
def test_a_malformed_request_does_not_end_the_way_of_the_others(shelf, text):
    client = by_mailbox(shelf)
    assert client.ask(text)[1:] == b"a malformed request"
    assert by_mailbox(shelf).add("n", 1) == 1


@pytest.mark.usefixtures("hosted")
def test_a_forged_answer_is_not_taken(shelf):
    client = by_mailbox(shelf)
    forged = Message(client._line, 2, b"\x00forged").seal(b"server", client._meeting, b"another")
    shelf.set(f"line/{client._line.hex()}", forged)
    assert client.get("a") is None


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
    outbox.post(LINE, b"one")
    assert list(inbox.messages()) == [b"one"]
    assert list(inbox.messages()) == []
    outbox.post(LINE, b"two")
    assert list(inbox.messages()) == [b"two"]
    assert outbox.answer(LINE) is None
    inbox.reply(LINE, b"answer that is long")
    inbox.reply(LINE, b"answer")
    assert outbox.answer(LINE) == b"answer"


def test_a_folder_is_left_as_it_was(tmp_path):
    inbox, outbox = FolderBox(tmp_path), FolderBox(tmp_path)
    inbox.announce(MEETING)
    outbox.post(LINE, b"one")
    list(inbox.messages())
    inbox.reply(LINE, b"answer")
    inbox.withdraw()
    assert list(tmp_path.iterdir()) == []
    outbox.close()


def test_whoever_leaves_a_folder_last_removes_it(tmp_path):
    inbox, outbox = FolderBox(tmp_path), FolderBox(tmp_path)
    inbox.announce(MEETING)
    outbox.post(LINE, b"one")
    late = tmp_path / ".meeting" / "late"
    late.touch()  # as a client's file that arrives while the server clears the folder
    inbox.withdraw()
    late.unlink()
    assert [path.name for path in tmp_path.iterdir()] == [".meeting"]
    outbox.close()
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_leaves_keeps_the_folder_of_a_meeting_that_goes_on(folder):
    _, outbox, place = folder
    outbox.post(LINE, b"one")
    outbox.close()
    assert [path.name for path in place.iterdir()] == ["meeting"]


def test_an_answer_whose_request_is_gone_is_removed_too(tmp_path):
    inbox = FolderBox(tmp_path)
    inbox.announce(MEETING)
    inbox.reply(LINE, b"answer")
    inbox.withdraw()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "large"])
def test_what_is_no_plain_small_file_is_not_read(folder, tmp_path, kind):
    inbox, _, place = folder
    path = place / f"{LINE.hex()}.asked"
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(MAX_MESSAGE_BYTES + 1)
    assert list(inbox.messages()) == []


def test_an_answer_is_not_written_through_a_link(folder, tmp_path):
    inbox, _, place = folder
    kept = tmp_path / "kept"
    kept.write_bytes(b"kept")
    (place / f"{LINE.hex()}.answered").symlink_to(kept)
    with pytest.raises(StoreError, match="cannot be written"):
        inbox.reply(LINE, b"answer")
    assert kept.read_bytes() == b"kept"


def test_other_files_in_the_folder_are_let_be(folder):
    inbox, _, place = folder
    (place / "notes.txt").write_text("mine")
    assert list(inbox.messages()) == []
    inbox.withdraw()
    assert (place / "notes.txt").read_text() == "mine"


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
        assert hosted.store().add("n", 0) == 1


def test_large_messages_of_a_line_are_distinguished(folder):
    inbox, outbox, _ = folder
    for fill in (b"a", b"b"):
        outbox.post(LINE, fill * MAX_VALUE_BYTES)
        assert [message[:1] for message in inbox.messages()] == [fill]
