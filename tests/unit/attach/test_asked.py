"""Servers and nodes that are asked, and what they send."""

import base64
import contextlib
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ddpdoctor.attach.find import FoundJob, choose_ranks
from ddpdoctor.attach.look import JobLook, compare_looks, of_job
from ddpdoctor.attach.process import find_py_spy, read_host, read_stacks, remedy_for_tracing
from ddpdoctor.attach.remote import MARK, NO_RANK, SEE_LOG, Way, ask_nodes, receive_folder, send_look
from ddpdoctor.attach.servers import ask_ras, ask_server, find_server, read_store
from ddpdoctor.collect.proc import read_process, read_processes
from ddpdoctor.model.attached import (
    AskedNodes,
    JobIdentity,
    Movement,
    Peer,
    ProcessFacts,
    RankBy,
    RankLook,
    RankMovement,
    Refusal,
    SeenRank,
    StoreLook,
)
from ddpdoctor.model.codec import decode
from ddpdoctor.model.errors import UserError
from tests.golden import words
from tests.scenarios.running import wait_for
from tests.unit.exchange.shelf import served

# Servers that are not what they seem, and stores of an older torch: asked once, and never waited for in vain.


LIST_KEYS = 17


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
    assert (told.source, f"127.0.0.1:{port}" in told.reason, "rank 0" in told.remedy) == ("store", True, True)


def http(connection):
    assert connection.recv(4096) == b"CLIENT PROTOCOL 2\n"
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def endless(connection):
    while True:
        connection.sendall(b"x" * 65536)


def ras_in_pieces(connection):
    lines = connection.makefile("rb")
    for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b'{"nccl'):
        lines.readline()
        connection.sendall(answer)
    connection.sendall(b'_version": "2.29.7"}\n')


def asked_of_ras(answer):
    with served(eval(answer)) as port:
        told = ask_ras("127.0.0.1", port)
    return told.reason.replace(str(port), "PORT").partition(": [Errno")[0] if isinstance(told, Refusal) else told


def drip(connection):
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


ANSWERS = {
    "without a trace": lambda connection: say(connection, b'["ping"]'),
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


def asked_of_worker(case):
    with pytest.MonkeyPatch.context() as patched, served(ANSWERS[case]) as port:
        patched.setattr("ddpdoctor.attach.servers.WHOLE_LIMIT_S", 0.5)
        told = ask_server(port, want_stacks=case == "without a trace")
    return told if told.refused is None else told.refused.reason.replace(str(port), "PORT").partition(":")[0]


# Programs that ask nodes, and what they send. These are real processes, which do what srun and kubectl exec do.


WAY = Way(name="srun", noun="node", remedies=[([""], "see NODE")])
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


def test_what_one_side_saved_the_other_side_saves_also_between_lines_of_others_or_cut_off(sent, tmp_path):
    noise = b"module load cuda\n\xff\xfe {\n" + b'{"stream": "' + MARK.encode() + b'", cut\r\n'
    mixed = b"".join(noise + b"0: " + line for line in sent.splitlines(keepends=True)).replace(b"\n", b"\r\n")
    for name, stream in (("alone", sent), ("mixed", mixed)):
        arrived = receive_folder(io.BytesIO(stream), tmp_path / name)
        assert (arrived.files, arrived.whole, arrived.error, saved(tmp_path / name)) == (3, True, "", FILES)
    first, second, *_ = sent.splitlines(keepends=True)
    arrived = receive_folder(io.BytesIO(first + second[:-20]), tmp_path / "cut")
    assert (arrived.files, arrived.whole, len(saved(tmp_path / "cut"))) == (1, False, 1)


ELSEWHERE = ("../escaped", "/escaped", "look_1/../../escaped", "look_3/x", ["attach.json"])
DAMAGED = ("not base64", base64.b64encode(b"not packed").decode(), 5)


def test_names_that_lead_elsewhere_and_damaged_files_are_not_saved(tmp_path):
    for file, data in (*((one, packed(b"x")) for one in ELSEWHERE), *(("attach.json", one) for one in DAMAGED)):
        assert receive_folder(io.BytesIO(record(file=file, data=data)), tmp_path / "a").files == 0
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
    with pytest.raises(UserError, match="none of 2 nodes sent results") as told:
        ask_nodes(WAY, {"n1": fails("no way"), "n2": fails("no way")}, tmp_path)
    assert (told.value.help, told.value.status) == ("n1 and n2: no way; see n1", 2)
    assert not list(tmp_path.iterdir())


def test_a_ctrl_c_ends_what_was_started_and_leaves_no_folder(tmp_path):
    place = tmp_path / "pid"
    waits = f"import os, pathlib, time; pathlib.Path({str(place)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    own = threading.get_ident()

    def interrupt():
        assert wait_for(lambda: place.exists() and place.read_text())
        signal.pthread_kill(own, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ask_nodes(WAY, {"n1": python(waits)}, tmp_path)
    thread.join()
    asked = int(place.read_text())
    assert wait_for(lambda: (found := read_process(asked)) is None or found.state in "ZX")
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


# Records of what attach saw, for tests.


def seen_rank(pid: int, rank: int) -> SeenRank:
    """Return a rank of a job of torchrun."""
    return SeenRank(
        pid=pid, namespace_pid=None, start_ticks=1, rank=rank, rank_by=RankBy.ENVIRONMENT, local_rank=0, world_size=2,
        node_rank=0, restart_count=0, launcher="torchrun", parent_pid=1, command="python", user="me", wrap_folder=None,
        variables={},
    )  # fmt: skip


# What counts as movement between two looks, and what does not.


SILENT = Refusal(source="/proc", reason="no answer")
NOBODY = 2**22 + 1
"""No process has this pid, so that no further look at it brings anything."""
STORE = 29500


def process(**changes):
    facts = ProcessFacts(
        state="S", cpu_ticks=9, main_cpu_ticks=5, main_switches=7, threads=(), blocked=None, kernel_function=None,
        peers=(), children=(),
    )  # fmt: skip
    return replace(facts, **changes)


def look_at(number, pid=NOBODY, line=10, **changes):
    rank = seen_rank(pid, pid - NOBODY)
    stacks = [{"pid": pid, "thread_name": "MainThread", "frames": [{"filename": "t.py", "name": "f", "line": line}]}]
    made = RankLook(
        number=number, host="h", wall_ns=0, monotonic_ns=0, job=JobIdentity(name="j", master_port=STORE), rank=rank,
        process=process(), stacks=stacks,
    )  # fmt: skip
    return replace(made, **changes)


def compare(before, after, raws=({}, {})):
    looks = [
        JobLook(number=number, ranks=tuple(ranks), store=None, refused=(), raw=raw)
        for number, ranks, raw in ((1, before, raws[0]), (2, after, raws[1]))
    ]
    return compare_looks(*looks)


def connection(local, remote, received):
    return Peer(local=local, remote=remote, state="established", unsent_bytes=0, retries=0, received_bytes=received)


RAN = process(main_switches=8)


def test_a_rank_that_was_seen_at_one_line_twice_and_runs_is_looked_at_again():
    many_lines = "import time\nprint('here', flush=True)\nwhile True:\n" + "    time.sleep(0.01)\n" * 500
    ranks = subprocess.Popen([sys.executable, "-c", many_lines], stdout=subprocess.PIPE)
    try:
        ranks.stdout.readline()
        (told,) = compare([look_at(1, ranks.pid)], [look_at(2, ranks.pid, process=RAN)])
    finally:
        ranks.kill()
        ranks.communicate()
    assert (told.movement, told.evidence) == (Movement.MOVING, ("stack",))


def moved_by(remote):
    """Return how two ranks moved of which the first received more bytes from there."""

    def both(number, received):
        ends = [connection(f"1.1.1.1:{port}", "1.1.1.1:5", 0) for port in (6, STORE)]
        mine = process(peers=(connection("1.1.1.1:5", remote, received),))
        return [look_at(number, process=mine), look_at(number, NOBODY + 1, process=process(peers=tuple(ends)))]

    return [one.movement for one in compare(both(1, 10), both(2, 20))]


def test_a_flight_recorder_that_goes_on():
    name = "fr_trace_pid_1_rank_0.json"
    entries = [{"record_id": 0, "retired": True}, {"record_id": 1, "retired": False}]
    done = [{**one, "retired": True} for one in entries]
    before, after = look_at(1, files=(name,)), look_at(2, files=(name,))
    raws = [{name: json.dumps({"entries": some}).encode()} for some in (entries, entries, done)]

    assert compare([before], [after], raws[:2])[0].evidence == ("stack", "flight recorder", "slept")
    assert compare([before], [after], raws[1:])[0].evidence == ("flight recorder",)
    assert compare([before], [after], ({name: b"{"}, {name: b"{"}))[0].evidence == ("stack", "slept")


def job_of(ranks):
    """Return what ranks that move so come to."""
    known = {"pid": 1, "rank": 0, "evidence": (), "main_cpu_ticks": None, "main_slept": None}
    return of_job([RankMovement(movement=Movement[one], **known) for one in ranks.split()]).name


# Which of a family of processes is the rank. These are real processes, without torch.


OF_A_RANK = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
IN_A_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
WAITS_RANKS = "print('here', flush=True); input()"
AS_RANK = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={**os.environ, 'RANK': '3', 'LOCAL_RANK': '0'})"  # noqa: E501


@contextlib.contextmanager
def family(command, env):
    """Run a command whose last descendant says that it is there; yield all of its processes."""
    began = subprocess.Popen(
        command, env={"PATH": os.environ["PATH"], **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert began.stdout.readline() == "here\n"
        processes = read_processes()
        mine = {began.pid}
        for pid in sorted(processes):
            mine |= {pid} if processes[pid].ppid in mine else set()
        yield [processes[pid] for pid in sorted(mine)], processes
    finally:
        began.communicate("\n")


PYTHON = [sys.executable, "-c", WAITS_RANKS]
IN_A_SHELL = ["bash", "-c", f"{shlex.join(PYTHON)}; true"]
A_WORKER = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS_RANKS!r}])"]

A_LAUNCHER = [sys.executable, "-c", AS_RANK, WAITS_RANKS]


def chosen_of(row):
    """Return the place in its family, and the rank, of each process that is chosen as one."""
    with family(*eval(row)) as (mine, processes):
        places = {one.pid: at for at, one in enumerate(mine)}
        return [(places[one.pid], one.rank) for one in choose_ranks(processes) if one.pid in places]


# Who may not trace is told what helps on this machine.


def later_of(changes):
    """Return how a rank moved that the second look finds so."""
    (told,) = compare([look_at(1)], [eval(f"look_at(2, {changes})")])
    return " ".join((told.movement.name, *told.evidence))


test_words = words(
    __name__, one_rank=later_of, a_job=job_of, family=chosen_of,
    remedy_for_tracing=lambda row: remedy_for_tracing(*row), ras=asked_of_ras, worker_server=asked_of_worker,
    bytes_from=moved_by,
)  # fmt: skip


def test_py_spy_is_there_and_says_that_a_process_is_gone():
    assert find_py_spy() is not None
    threads, refusal = read_stacks(2**22 + 1)
    assert threads is None
    assert isinstance(refusal, Refusal)
    assert refusal.reason
    assert not refusal.remedy


# Which address of a debug server is used: that on which the rank itself listens, and no other.


@pytest.fixture
def own_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def found(address, pid=None, env=None):
    pid = os.getpid() if pid is None else pid
    return find_server(seen_rank(pid, 3), env or {}, {"debug_server/rank3": address}, read_host([pid]))


def test_the_address_in_the_store_on_which_the_rank_listens_is_asked_and_no_other(own_port):
    assert found(f"http://node0:{own_port}") == own_port
    assert found(f"http://node0:{own_port}", pid=os.getppid()) is None  # another process listens there
    assert [found(address) for address in ("http://node0:1", "http://node0:70000", "no address")] == [None] * 3


def test_a_path_that_another_rank_has_bound_is_not_this_ranks(tmp_path):
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        env = {"TORCH_WORKER_SERVER_SOCKET": path}
        assert found("", env=env) == path
        assert found("", pid=os.getppid(), env=env) is None
