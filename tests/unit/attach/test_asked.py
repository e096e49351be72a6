"""Servers that are not what they seem, and stores of an older torch: asked once, and never waited for in vain."""

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ddpdoctor.attach.find import FoundJob
from ddpdoctor.attach.ras import RasAnswer, ask_ras
from ddpdoctor.attach.store import read_store
from ddpdoctor.attach.worker_server import Answers, WorkerServer, ask_server
from ddpdoctor.model.attached import JobIdentity, Refusal, StoreLook

LIST_KEYS = 17


@contextlib.contextmanager
def served(answer):
    """Serve connections with a function that gets each of them; yield the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def job_at(port):
    identity = JobIdentity(name="job", master_addr="127.0.0.1", master_port=port)
    return FoundJob(identity=identity, ranks=(), environments={})


@pytest.fixture
def store():
    made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=100))
    made.set("default_pg/0//cuda//0", "an id of NCCL")
    made.set("debug_server/rank1", "http://node1:4711")
    return made


def test_all_keys_of_a_store_and_the_values_that_help(store):
    seen = read_store(job_at(store.port))
    assert isinstance(seen, StoreLook)
    assert {"default_pg/0//cuda//0", "debug_server/rank1"} <= set(seen.keys)
    assert (seen.complete, seen.values) == (True, {"debug_server/rank1": "http://node1:4711"})


def test_of_an_older_torch_that_lists_no_keys_those_that_matter_are_asked_for(store):
    def pass_on(connection):
        """Behave as an older server does: close at a request that it does not know."""
        with socket.create_connection(("127.0.0.1", store.port)) as real:

            def back():
                with contextlib.suppress(OSError):
                    while answer := real.recv(4096):
                        connection.sendall(answer)

            threading.Thread(target=back, daemon=True).start()
            while (data := connection.recv(4096)) not in {b"", bytes([LIST_KEYS])}:
                real.sendall(data)

    with served(pass_on) as port:
        seen = read_store(job_at(port))
    assert isinstance(seen, StoreLook)
    assert (seen.complete, seen.keys) == (False, ("default_pg/0//cuda//0",))


def test_a_store_that_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    told = read_store(job_at(port))
    assert isinstance(told, Refusal)
    assert told.source == "store"
    assert f"127.0.0.1:{port}" in told.reason
    assert "rank 0" in told.remedy


def test_what_is_no_ras_is_left_alone():
    asked = []

    def http(connection):
        asked.append(connection.recv(4096))
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with served(http) as port:
        told = ask_ras("127.0.0.1", port)
    assert isinstance(told, Refusal)
    assert "not NCCL's RAS" in told.reason
    assert asked == [b"CLIENT PROTOCOL 2\n"]


def test_an_answer_of_ras_in_pieces():
    def ras(connection):
        lines = connection.makefile("rb")
        for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b'{"nccl'):
            lines.readline()
            connection.sendall(answer)
        connection.sendall(b'_version": "2.29.7"}\n')

    with served(ras) as port:
        assert ask_ras("127.0.0.1", port) == RasAnswer(text=b'{"nccl_version": "2.29.7"}\n', is_json=True)


def test_a_ras_that_hangs_up_early():
    with served(lambda connection: connection.recv(1)) as port:
        told = ask_ras("127.0.0.1", port)
    assert isinstance(told, Refusal)
    assert "incomplete answer" in told.reason


def drip(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


ANSWERS = {
    "no HTTP": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"),
    "deep": lambda connection: say(connection, b"[" * 100_000),
    "no list": lambda connection: say(connection, b"7"),
    "not UTF-8": lambda connection: say(connection, b"\xff\xfe"),
    "cut short": lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[]"),
    "without end": drip,
}


def say(connection, body):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("case", ANSWERS)
def test_a_worker_server_that_answers_anything_is_refused_in_words(case, monkeypatch):
    monkeypatch.setattr("ddpdoctor.attach.worker_server.WHOLE_LIMIT_S", 0.5)
    with served(ANSWERS[case]) as port:
        told = ask_server(WorkerServer(port=port), want_stacks=False)
    assert told.trace is None
    assert told.refused is not None
    assert "torch's server in the rank gave no answer" in told.refused.reason


def test_a_worker_server_without_a_trace_is_no_refusal():
    with served(lambda connection: say(connection, b'["ping"]')) as port:
        assert ask_server(WorkerServer(port=port), want_stacks=True) == Answers()


def test_a_line_of_ras_without_end_is_not_kept():
    def endless(connection):
        while True:
            connection.sendall(b"x" * 65536)

    with served(endless) as port:
        told = ask_ras("127.0.0.1", port)
    assert isinstance(told, Refusal)
    assert "its line does not end" in told.reason
