"""Whatever others send to the meeting's server, its members meet meanwhile, and it takes no more than it may."""

import contextlib
import os
import random
import socket
import struct
import threading
import zlib
from dataclasses import dataclass

import pytest

from ddpdoctor.exchange import server as server_module
from ddpdoctor.exchange.conversation import BadMessage, BadRecord, Conversation, read_json, unpack
from ddpdoctor.exchange.job_store import StoreReader
from ddpdoctor.exchange.mailbox import FOLDER, LINE_BYTES, MOST_READS, FolderBox, read_small
from ddpdoctor.exchange.meeting import HostedMeeting, by_folder
from ddpdoctor.exchange.reach import receive
from ddpdoctor.exchange.server import IDLE_LIMIT_S, Server
from ddpdoctor.exchange.store import KeyValues, StoreError
from ddpdoctor.exchange.wire import (
    HELLO,
    LENGTH,
    MAX_REQUEST_BYTES,
    NO_TOKEN,
    NONCE_BYTES,
    BadRequest,
    RequestType,
    ServerClient,
    answer,
    open_client,
    pack_request,
    prove,
    with_length,
)
from tests.scenarios.running import wait_for as wait_until
from tests.unit.exchange.shelf import Clock, prove_to

SECRET = b"secret"
LIMIT_S = 60.0


@dataclass(frozen=True)
class Word:
    text: str


class Attacker:
    """Connects to a server as anyone can."""

    def __init__(self, served, opened):
        self.served, self._opened = served, opened

    def connect(self, source="127.0.0.1"):
        made = self._opened.enter_context(socket.socket())
        made.bind((source, 0))
        made.settimeout(LIMIT_S)
        made.connect(("127.0.0.1", self.served.port))
        return made

    def prove(self, token=NO_TOKEN, source="127.0.0.1"):
        """Return a connection over which the token was proven."""
        made = self.connect(source)
        prove_to(made, token)
        return made


def request(kind, key, value=b""):
    return with_length(pack_request(kind, key, value))


DRAWN, WHOLE = random.Random(1), request(RequestType.SET, "key", b"value")
NOISE = [DRAWN.randbytes(DRAWN.randrange(1, 3000)) for _ in range(100)]
CUT_SHORT, NOT_TAKEN = "requests cut short", "questions whose answers nobody takes"
STRANGERS = {"nothing": [], "random bytes": NOISE, "a byte now and then": [b"x"] * 200}
AFTER_THE_PROOF = {
    "random bytes after the proof": NOISE, CUT_SHORT: [WHOLE[:length] for length in range(1, len(WHOLE))],
    "a key that is not UTF-8": [with_length(struct.pack("!BH", RequestType.SET, 3) + b"\xff\xfe\xfd" + b"x")],
    "requests that are announced and never sent": [LENGTH.pack(MAX_REQUEST_BYTES) + b"\1"] * 50,
    # 30 times 4 MiB are more than all unfinished requests together may hold.
    "large requests that lack their last byte": [LENGTH.pack(MAX_REQUEST_BYTES) + bytes(MAX_REQUEST_BYTES - 1)] * 30,
    NOT_TAKEN: [request(RequestType.NOW, "now") * 100_000] * 5,
    "beats for all members": [b"".join(request(RequestType.BEAT, str(number)) for number in range(20))],
    "a counter of a million digits": [
        request(RequestType.SET, "n", b"9" * 10**6) + request(RequestType.ADD, "n", b"1"),
    ],
}  # fmt: skip
"""What is sent, over a connection each."""


def meet(served, token):
    """Hold that two members meet: both come, each reads what the other sent, both beat."""
    members = [open_client(("127.0.0.1",), served.port, token, LIMIT_S) for _ in range(2)]
    with contextlib.ExitStack() as opened:
        for number, member in enumerate(members):
            opened.callback(member.close)
            member.add("came", 1)
            member.beat(f"member {number}")
            Conversation(member, token).send(f"word/{number}", Word(f"of {number}"))
        for number, member in enumerate(members):
            heard = Conversation(member, token).receive(Word, f"word/{1 - number}", LIMIT_S, "the other")
            assert heard == Word(f"of {1 - number}")
        assert members[0].add("came", 0) == 2
        assert {"member 0", "member 1"} <= served.values.heard().keys()


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("token", [SECRET, NO_TOKEN], ids=["token", "no token"])
@pytest.mark.parametrize("attack", [*STRANGERS, *AFTER_THE_PROOF])
def test_members_meet_while_others_attack(attack, token, opened):
    """With a secret the attackers that prove the usual word are strangers, and hung up on."""
    served = opened.enter_context(contextlib.closing(Server(0, token, one_host=True)))
    attacker = Attacker(served, opened)
    with contextlib.suppress(OSError):
        for data in (STRANGERS | AFTER_THE_PROOF)[attack]:
            connection = attacker.connect() if attack in STRANGERS else attacker.prove()
            connection.settimeout(0.2 if attack == NOT_TAKEN else LIMIT_S)
            with contextlib.suppress(OSError):  # it may have been hung up on
                connection.sendall(data)
            if attack == CUT_SHORT:
                connection.shutdown(socket.SHUT_WR)
    assert sum(peer.held_bytes for peer in list(served.peers)) <= server_module.MAX_UNFINISHED_BYTES
    meet(served, token)


@pytest.mark.full
@pytest.mark.parametrize("token", [SECRET, NO_TOKEN], ids=["token", "no token"])
def test_where_all_places_are_taken_one_that_is_dropped_may_have_just_sent_its_proof(token, opened):
    """What the selectors' loop died of: one batch of events dropped a peer and then read from it."""
    served = opened.enter_context(contextlib.closing(Server(0, token, one_host=True, max_peers=2)))
    attacker = Attacker(served, opened)
    for _ in range(50):
        connections = [attacker.connect() for _ in range(3)]
        for connection in connections:
            with contextlib.suppress(OSError):
                nonce, own = receive(connection, len(HELLO) + NONCE_BYTES)[len(HELLO) :], bytes(NONCE_BYTES)
                connection.sendall(own + prove(token, b"client", nonce, own))
        for connection in connections:
            connection.close()
    meet(served, token)


def test_members_of_other_hosts_keep_their_places_beside_one_that_takes_all(opened):
    served = opened.enter_context(contextlib.closing(Server(0, NO_TOKEN, max_peers=10)))
    attacker = Attacker(served, opened)
    for _ in range(10):
        attacker.prove(source="127.0.0.9")
    meet(served, NO_TOKEN)


def test_who_does_nothing_gives_up_its_place_after_a_while_and_who_beats_keeps_it(opened):
    clock = Clock()
    served = opened.enter_context(contextlib.closing(Server(0, NO_TOKEN, one_host=True, max_peers=3, clock=clock)))
    attacker = Attacker(served, opened)
    member = open_client(("127.0.0.1",), served.port, NO_TOKEN, LIMIT_S)
    member.beat("0")
    for _ in range(2):
        attacker.prove()
    with pytest.raises(StoreError):
        open_client(("127.0.0.1",), served.port, NO_TOKEN, 0.3)
    clock.now_s += IDLE_LIMIT_S
    with contextlib.closing(open_client(("127.0.0.1",), served.port, NO_TOKEN, LIMIT_S)) as late:
        assert late.add("n", 1) == 1
    assert member.beat("0") == b""


def test_an_error_of_ours_ends_one_connection_alone(opened, monkeypatch):
    served = opened.enter_context(contextlib.closing(Server(0, SECRET, one_host=True)))
    wrong = open_client(("127.0.0.1",), served.port, SECRET, LIMIT_S)
    with monkeypatch.context() as patched:
        patched.setattr("ddpdoctor.exchange.wire.answer", lambda *_: 1 / 0)
        with pytest.raises(StoreError):
            wrong.add("n", 1)
    meet(served, SECRET)


def test_random_requests_are_answered_or_refused_and_change_nothing_else():
    drawn, values = random.Random(3), KeyValues()
    values.set("kept", b"1")
    for _ in range(20_000):
        operation, length = drawn.randrange(10), drawn.randrange(6)
        request = struct.pack("!BH", operation, length) + drawn.randbytes(drawn.randrange(40))
        with contextlib.suppress(BadRequest):
            found, _ = answer(values, request)
            assert found[0] in {0, 1, 2}
    assert values.get("kept") == b"1"


DEEP = b"[" * 100_000
JSON = {
    "deep": DEEP, "deep objects": b'{"a":' * 100_000, "not UTF-8": b'"\xff"', "NaN": b"[NaN]", "Infinity": b"-Infinity",
    "a float that is none": b"1e999", "a whole number of 65 bits": b"[18446744073709551616]",
    "digits that take minutes": b"9" * 10**7, "cut short": b'{"a":', "very many values": b"[" + b"0," * 2**22 + b"0]",
}  # fmt: skip


@pytest.mark.parametrize("text", JSON.values(), ids=JSON)
def test_json_that_is_no_message_is_refused_wherever_it_is_read(text):
    with pytest.raises(BadMessage):
        read_json(text)
    values = KeyValues()
    payload = zlib.compress(text)
    values.set("word", struct.pack("!4sBBI", b"DDPD", 1, 0, len(payload)) + payload)
    with pytest.raises(BadRecord):
        Conversation(values).get(Word, "word", "another")


def test_json_of_ordinary_numbers_is_read():
    text = b'[-9223372036854775808, 18446744073709551615, 1.5e-7, {"a": null}]'
    assert read_json(text) == [-(2**63), 2**64 - 1, 1.5e-7, {"a": None}]


def test_a_message_with_any_byte_changed_is_refused_or_read():
    values, drawn = KeyValues(), random.Random(4)
    Conversation(values).send("word", Word("text"))
    message = values.get("word")
    for _ in range(3000):
        place = drawn.randrange(len(message))
        changed = message[:place] + drawn.randbytes(1) + message[place + 1 :]
        with contextlib.suppress(BadMessage):
            unpack(changed)


def test_chunks_that_are_larger_than_described_are_not_put_together():
    values = KeyValues()
    values.set("word", struct.pack("!Q32s", 2**20, bytes(32)))
    for number in range(4):
        values.set(f"word/{number}", bytes(4 * 2**20))
    with pytest.raises(BadRecord, match="arrived damaged"):
        Conversation(values).take_bytes("word", 0.0)
    assert values.get("word") is None


# The other side of a connection


@pytest.fixture
def pair():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


ASKED = {
    "bytes": (b"", lambda connection: receive(connection, 10_000)),
    "a server": (LENGTH.pack(10_000), lambda connection: _short(ServerClient(connection)).get("a")),
    "the job's store": (struct.pack("=QQ", 1, 10_000), lambda connection: _short(StoreReader(connection)).list_keys()),
}


def _short(client):
    client._connection.settimeout(0.3)
    return client


@pytest.mark.parametrize("case", ASKED)
def test_another_side_that_drips_is_given_up_at_the_limit_of_a_call(case, pair):
    head, ask = ASKED[case]
    ours, theirs = pair
    over = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            theirs.sendall(head)
            while not over.wait(0.02):
                theirs.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    ours.settimeout(0.3)
    with pytest.raises((StoreError, TimeoutError)):
        ask(ours)
    over.set()
    thread.join()


def test_a_list_of_keys_without_end_is_given_up(monkeypatch, pair):
    monkeypatch.setattr("ddpdoctor.exchange.job_store.MAX_LIST_BYTES", 10**5)
    ours, theirs = pair
    key = struct.pack("=Q", 50_000) + bytes(50_000)
    threading.Thread(target=lambda: theirs.sendall(struct.pack("=Q", 100) + 3 * key), daemon=True).start()
    with pytest.raises(StoreError, match="do not end"):
        StoreReader(ours).list_keys()


# Files that others put into the shared folder


def files_of_others(folder):
    (folder / "notes.txt").write_text("x")
    for number in range(3000):
        (folder / f"{number:0{2 * LINE_BYTES}x}.asked").write_bytes(b"nothing")
    (folder / f"{'0' * 2 * LINE_BYTES}.asked").write_bytes(random.Random(1).randbytes(200_000))
    (folder / f"{'1' * 2 * LINE_BYTES}.asked").write_bytes(b"short")
    os.mkfifo(folder / f"{'2' * 2 * LINE_BYTES}.asked")
    (folder / f"{'3' * 2 * LINE_BYTES}.asked").symlink_to("/dev/zero")
    (folder / f"{'4' * 2 * LINE_BYTES}.asked").mkdir()
    with (folder / f"{'5' * 2 * LINE_BYTES}.asked").open("wb") as giant:
        giant.truncate(2**40)


def test_members_meet_in_a_folder_that_others_fill(tmp_path):
    (tmp_path / FOLDER).mkdir(mode=0o700)
    files_of_others(tmp_path / FOLDER)
    with HostedMeeting(None, SECRET) as hosted:
        hosted.serve_folder(tmp_path)
        with contextlib.closing(by_folder(tmp_path).open(SECRET, LIMIT_S)) as member:
            assert member.add("n", 1) == 1
            assert member.add("n", 1) == 2


def test_a_line_that_cannot_be_answered_keeps_no_other_waiting(tmp_path):
    """Somebody has put a link where its answers belong."""
    with HostedMeeting(None, SECRET) as hosted:
        hosted.serve_folder(tmp_path)
        first = by_folder(tmp_path).open(SECRET, LIMIT_S)
        (answered,) = (tmp_path / FOLDER).glob("*.answered")
        answered.unlink()
        answered.symlink_to("/dev/full")
        with pytest.raises(StoreError):
            first.ask(pack_request(RequestType.NOW, "now", b""), 0.5)
        with contextlib.closing(by_folder(tmp_path).open(SECRET, LIMIT_S)) as second:
            assert second.add("n", 1) == 1


def test_a_folder_that_is_a_link_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be read"):
        FolderBox(tmp_path).announce(bytes(16))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_stranger_s_file_is_read_a_few_times_and_again_when_it_has_changed(tmp_path, monkeypatch):
    (tmp_path / FOLDER).mkdir()
    file = tmp_path / FOLDER / f"{'0' * 2 * LINE_BYTES}.asked"
    read = []
    monkeypatch.setattr("ddpdoctor.exchange.mailbox.read_small", lambda path: read.append(path) or read_small(path))
    box = FolderBox(tmp_path)
    file.write_bytes(bytes(100_000))
    for _ in range(20):
        list(box.messages())
    assert len(read) == MOST_READS
    file.write_bytes(b"x" * 200_000)
    assert [len(message) for message in box.messages()] == [200_000]


def test_a_forwarder_goes_on_when_its_folder_works_again(tmp_path):
    with HostedMeeting(None, SECRET) as hosted:
        (tmp_path / FOLDER).write_text("in the way")
        forwarder = hosted.serve_folder(tmp_path)
        assert wait_until(lambda: forwarder.failed, LIMIT_S)
        (tmp_path / FOLDER).unlink()
        with contextlib.closing(by_folder(tmp_path).open(SECRET, LIMIT_S)) as member:
            assert member.add("n", 1) == 1
