"""Servers and nodes that are asked, and what they send."""

import base64
import contextlib
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ddpdoctor.attach.find import FoundJob
from ddpdoctor.attach.remote import MARK, NO_RANK, SEE_LOG, Way, ask_nodes, receive_folder, send_look
from ddpdoctor.attach.servers import Answers, RasAnswer, WorkerServer, ask_ras, ask_server, read_store
from ddpdoctor.collect.proc import read_process
from ddpdoctor.model.attached import AskedNodes, JobIdentity, Refusal, StoreLook
from ddpdoctor.model.codec import decode
from ddpdoctor.model.errors import UserError
from tests.scenarios.running import wait_for

# Servers that are not what they seem, and stores of an older torch: asked once, and never waited for in vain.


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
    monkeypatch.setattr("ddpdoctor.attach.servers.WHOLE_LIMIT_S", 0.5)
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


# Programs that ask nodes, and what they send. These are real processes, which do what srun and kubectl exec do.


WAY = Way(name="srun", noun="node", remedy=lambda _reason: "see NODE")
FILES = {"attach.json": b"{}\n", "look_1/rank_0_pid_7.json": b"\xff" * 5000, "look_2/fr_dump_pid_7_rank_0": b""}


def look(folder):
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def sent():
    out = io.BytesIO()
    assert send_look(look, out) == 0
    return out.getvalue()


def saved(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(**fields):
    return json.dumps({"stream": MARK, "version": 1, **fields}).encode() + b"\n"


def packed(content):
    return base64.b64encode(zlib.compress(content)).decode()


def test_what_one_side_saved_the_other_side_saves(sent, tmp_path):
    arrived = receive_folder(io.BytesIO(sent), tmp_path / "a")
    assert (arrived.files, arrived.whole, arrived.error) == (3, True, "")
    assert saved(tmp_path / "a") == FILES


def test_lines_of_others_between_are_left_out(sent, tmp_path):
    noise = b"module load cuda\n\xff\xfe {\n" + b'{"stream": "' + MARK.encode() + b'", cut\r\n'
    mixed = b"".join(noise + b"0: " + line for line in sent.splitlines(keepends=True))
    assert receive_folder(io.BytesIO(mixed.replace(b"\n", b"\r\n")), tmp_path / "a").whole
    assert saved(tmp_path / "a") == FILES


def test_of_a_stream_that_is_cut_off_the_whole_files_are_kept(sent, tmp_path):
    first, second, *_ = sent.splitlines(keepends=True)
    arrived = receive_folder(io.BytesIO(first + second[:-20]), tmp_path / "a")
    assert (arrived.files, arrived.whole) == (1, False)
    assert len(saved(tmp_path / "a")) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"file": "../escaped", "data": packed(b"x")},
        {"file": "/escaped", "data": packed(b"x")},
        {"file": "look_1/../../escaped", "data": packed(b"x")},
        {"file": "look_3/x", "data": packed(b"x")},
        {"file": "attach.json", "data": "not base64"},
        {"file": "attach.json", "data": base64.b64encode(b"not packed").decode()},
        {"file": "attach.json", "data": 5},
        {"file": ["attach.json"], "data": packed(b"x")},
    ],
)
def test_names_that_lead_elsewhere_and_damaged_files_are_not_saved(fields, tmp_path):
    assert receive_folder(io.BytesIO(record(**fields)), tmp_path / "a").files == 0
    assert not list(tmp_path.iterdir())


def test_why_nothing_was_seen_arrives(tmp_path):
    def refuse(_folder):
        raise UserError("no training job runs on this machine", help="Look elsewhere.")

    out = io.BytesIO()
    assert send_look(refuse, out) == 2
    arrived = receive_folder(io.BytesIO(out.getvalue()), tmp_path / "a")
    assert (arrived.error, arrived.help, arrived.files) == (
        "no training job runs on this machine", "Look elsewhere.", 0
    )  # fmt: skip


def python(code):
    return (sys.executable, "-c", code)


def prints(data):
    return python(f"import sys; sys.stdout.buffer.write({data!r})")


def fails(words, status=1):
    return python(f"import sys; print({words!r}, file=sys.stderr); sys.exit({status})")


WAITS = python("import time; print('here', flush=True); time.sleep(1000)")
MINDS_NO_SIGNAL = python(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
)  # fmt: skip
LOST = (
    "srun: error: Task launch for StepId=7.{0} failed on node {0}: Communication connection failure\n"
    "srun: error: Application launch failed: Communication connection failure\nsrun: Job step aborted"
)


def test_each_node_has_its_folder_and_those_that_sent_nothing_are_told_with_the_reason(sent, tmp_path):
    commands = {
        "n1": prints(sent), "n2": fails(LOST.format(2)), "n3": fails(LOST.format(3)), "n4": WAITS,
        "n5": MINDS_NO_SIGNAL, "n6": prints(record(error="no training job", help="Look elsewhere.")),
        "n7": prints(sent[: sent.rindex(b"{")]), "n8": python(""),
    }  # fmt: skip
    folder = ask_nodes(WAY, commands, tmp_path, limit_s=1.5)

    asked = decode(AskedNodes, json.loads((folder / "nodes.json").read_text()))
    assert [one.node for one in asked.nodes] == sorted(commands)
    assert {one.node: one.folder for one in asked.nodes if one.folder} == {"n1": "n1", "n7": "n7"}
    assert saved(folder / "n1") == saved(folder / "n7") == FILES
    assert [one.line() for one in asked.unseen()] == [
        "n2 and n3: Task launch failed: Communication connection failure; see n2",
        "n4 and n5: no answer within 2 s; see n4",
        f"n6: {NO_RANK}; {SEE_LOG}",
        "n7 and n8: it ended with status 0; see n7",
    ]


def test_if_no_node_sent_anything_that_is_an_error_and_no_folder_is_left(tmp_path):
    with pytest.raises(UserError, match="none of 2 nodes sent what it saw") as told:
        ask_nodes(WAY, {"n1": fails("no way"), "n2": fails("no way")}, tmp_path)
    assert (told.value.help, told.value.status) == ("n1 and n2: no way; see n1", 2)
    assert not list(tmp_path.iterdir())


ASKS = """
import pathlib, signal, sys
from ddpdoctor.attach.remote import Way, ask_nodes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
folder = pathlib.Path(sys.argv[1])
pid = str(folder / "pid")
waits = f"import os, pathlib, time; pathlib.Path({pid!r}).write_text(str(os.getpid())); time.sleep(1000)"
ask_nodes(Way(name="srun", noun="node", remedy=str), {"n1": (sys.executable, "-c", waits)}, folder)
"""


def test_a_ctrl_c_ends_what_was_started_and_leaves_no_folder(tmp_path):
    asking = subprocess.Popen([*python(ASKS), str(tmp_path)], stderr=subprocess.PIPE)
    assert wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=100)
    asked = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: (found := read_process(asked)) is None or found.state in "ZX")
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
