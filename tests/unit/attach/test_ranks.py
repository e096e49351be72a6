"""Which of a family of processes is the rank, what moves, and who may look."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from ddpdoctor.attach.find import choose_ranks
from ddpdoctor.attach.look import JobLook, compare_looks, of_job
from ddpdoctor.attach.process import find_py_spy, read_host, read_stacks, remedy_for_tracing
from ddpdoctor.attach.servers import WorkerServer, find_server
from ddpdoctor.collect.proc import read_processes
from ddpdoctor.model.attached import (
    JobIdentity,
    Movement,
    Peer,
    ProcessFacts,
    RankLook,
    RankMovement,
    Refusal,
)
from tests.unit.attach.records import seen_rank

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


def look(number, pid=NOBODY, line=10, **changes):
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


@pytest.mark.parametrize(
    ("after", "movement", "evidence"),
    [
        pytest.param({"line": 11}, Movement.MOVING, ("stack",), id="another line"),
        pytest.param({}, Movement.STILL, ("stack", "slept"), id="asleep at the same line"),
        pytest.param({"process": RAN}, Movement.STILL, ("stack",), id="awake at the same line"),
        pytest.param({"process": None}, Movement.MOVING, ("ended",), id="ended"),
        pytest.param({"process": None, "refused": (SILENT,)}, Movement.STILL, ("stack",), id="/proc gave no answer"),
        pytest.param({"stacks": None}, Movement.STILL, ("slept",), id="asleep, without a stack"),
        pytest.param({"stacks": None, "process": RAN}, Movement.UNKNOWN, (), id="awake, without a stack"),
        pytest.param({"process": process(state="T")}, Movement.STILL, ("stack", "slept"), id="stopped"),
    ],
)
def test_one_rank(after, movement, evidence):
    (told,) = compare([look(1)], [look(2, **after)])
    assert (told.movement, told.evidence) == (movement, evidence)


def test_a_rank_that_was_seen_at_one_line_twice_and_runs_is_looked_at_again():
    many_lines = "import time\nprint('here', flush=True)\nwhile True:\n" + "    time.sleep(0.01)\n" * 500
    ranks = subprocess.Popen([sys.executable, "-c", many_lines], stdout=subprocess.PIPE)
    try:
        ranks.stdout.readline()
        (told,) = compare([look(1, ranks.pid)], [look(2, ranks.pid, process=RAN)])
    finally:
        ranks.kill()
        ranks.communicate()
    assert (told.movement, told.evidence) == (Movement.MOVING, ("stack",))


@pytest.mark.parametrize(
    ("local", "remote", "movement"),
    [
        pytest.param("1.1.1.1:5", "1.1.1.1:6", Movement.MOVING, id="from another rank"),
        pytest.param("1.1.1.1:5", "9.9.9.9:443", Movement.STILL, id="from elsewhere"),
        pytest.param("1.1.1.1:5", f"1.1.1.1:{STORE}", Movement.STILL, id="from the store"),
    ],
)
def test_bytes_count_if_they_come_from_another_rank(local, remote, movement):
    def both(number, received):
        ends = (connection("1.1.1.1:6", local, 0), connection(f"1.1.1.1:{STORE}", local, 0))
        mine = process(peers=(connection(local, remote, received),))
        return [look(number, process=mine), look(number, NOBODY + 1, process=process(peers=ends))]

    assert [one.movement for one in compare(both(1, 10), both(2, 20))] == [movement, Movement.STILL]


def test_a_flight_recorder_that_goes_on():
    name = "fr_trace_pid_1_rank_0.json"
    entries = [{"record_id": 0, "retired": True}, {"record_id": 1, "retired": False}]
    done = [{**one, "retired": True} for one in entries]
    before, after = look(1, files=(name,)), look(2, files=(name,))
    raws = [{name: json.dumps({"entries": some}).encode()} for some in (entries, entries, done)]

    assert compare([before], [after], raws[:2])[0].evidence == ("stack", "flight recorder", "slept")
    assert compare([before], [after], raws[1:])[0].evidence == ("flight recorder",)
    assert compare([before], [after], ({name: b"{"}, {name: b"{"}))[0].evidence == ("stack", "slept")


@pytest.mark.parametrize(
    ("ranks", "job"),
    [
        ("MOVING MOVING", "MOVING"), ("STILL STILL", "STILL"), ("MOVING STILL", "PARTLY"), ("UNKNOWN", "UNKNOWN"),
        ("STILL UNKNOWN", "STILL"), ("MOVING UNKNOWN", "MOVING"),
    ],
)  # fmt: skip
def test_a_job(ranks, job):
    movements = [
        RankMovement(pid=1, rank=0, movement=Movement[one], evidence=(), main_cpu_ticks=None, main_slept=None)
        for one in ranks.split()
    ]
    assert of_job(movements) is Movement[job]


# Which of a family of processes is the rank. These are real processes, without torch.


OF_A_RANK = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
IN_A_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
WAITS = "print('here', flush=True); input()"
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


def chosen_of(mine, processes):
    ours = {one.pid for one in mine}
    return [(one.process.pid, one.rank) for one in choose_ranks(processes) if one.process.pid in ours]


PYTHON = [sys.executable, "-c", WAITS]
IN_A_SHELL = ["bash", "-c", f"{shlex.join(PYTHON)}; true"]
A_WORKER = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"]


@pytest.mark.parametrize(
    ("command", "env", "place"),
    [
        pytest.param(PYTHON, OF_A_RANK, 0, id="a rank"),
        pytest.param(IN_A_SHELL, OF_A_RANK, 1, id="not the shell above it"),
        pytest.param(A_WORKER, OF_A_RANK, 0, id="not its worker"),
        pytest.param(
            [sys.executable, "-c", AS_RANK, WAITS], {**IN_A_STEP, "WORLD_SIZE": "8"}, 1, id="not its launcher"
        ),
    ],
)
def test_one_of_a_family_is_the_rank(command, env, place):
    with family(command, env) as (mine, processes):
        assert chosen_of(mine, processes) == [(mine[place].pid, 3)]


@pytest.mark.parametrize(
    ("command", "env"),
    [
        pytest.param(PYTHON, IN_A_STEP, id="a program without torch in a step of Slurm"),
        pytest.param(["bash", "-c", "echo here; read line"], OF_A_RANK, id="no Python"),
        pytest.param(PYTHON, {"WORLD_SIZE": "8"}, id="no rank number"),
    ],
)
def test_others_are_none(command, env):
    with family(command, env) as (mine, processes):
        assert chosen_of(mine, processes) == []


# Who may not trace is told what helps on this machine.


@pytest.mark.parametrize(
    ("uid", "scope", "words"),
    [
        pytest.param(1000, "", ("sudo -E", "kubectl debug", "--cap-add SYS_PTRACE"), id="a user without yama"),
        pytest.param(1000, "0", ("sudo -E", "kubectl debug", "--cap-add SYS_PTRACE"), id="a user, open yama"),
        pytest.param(
            1000, "1", ("sudo -E", "ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"), id="children only"
        ),
        pytest.param(0, "1", ("CAP_SYS_PTRACE", "capabilities.add: [SYS_PTRACE]", "kubectl debug"), id="root in a pod"),
        pytest.param(0, "3", ("nobody", "boots"), id="nobody"),
    ],
)
def test_the_remedy_fits_the_machine(uid, scope, words):
    told = remedy_for_tracing(uid, scope)
    assert [word for word in words if word not in told] == []


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


def test_the_address_in_the_store_on_which_the_rank_listens(own_port):
    assert found(f"http://node0:{own_port}") == WorkerServer(port=own_port)


def test_others_are_never_asked(own_port):
    assert found(f"http://node0:{own_port}", pid=os.getppid()) is None  # another process listens there
    assert found("http://node0:1") is None
    assert found("http://node0:70000") is None
    assert found("no address") is None


def test_a_path_that_another_rank_has_bound_is_not_this_ranks(tmp_path):
    path = str(tmp_path / "server.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        env = {"TORCH_WORKER_SERVER_SOCKET": path}
        assert found("", env=env) == WorkerServer(path=path)
        assert found("", pid=os.getppid(), env=env) is None
