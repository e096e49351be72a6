"""What ranks and the processes below them were seen to do, and over which connections they receive."""

import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from ddpdoctor.collect.proc import Process
from ddpdoctor.launch.watching.work import Receptions, WorkSeen

S = 1_000_000_000
RANK = Process(pid=os.getpid(), ppid=1, state="R", start_ticks=1, cpu_ticks=100, name="python")
CHILD = replace(RANK, pid=os.getppid(), ppid=RANK.pid, cpu_ticks=0, name="gcc")


def busier(process: Process, ticks: int) -> Process:
    return replace(process, cpu_ticks=process.cpu_ticks + ticks)


def test_rates_are_those_between_two_samples_that_are_far_enough_apart() -> None:
    seen = WorkSeen()
    seen.follow(RANK, (CHILD,), S)
    seen.follow(busier(RANK, 90), (CHILD,), 2 * S)
    assert seen.of_rank(RANK.pid) is None
    assert seen.busy_cores(RANK.pid) is None
    seen.follow(busier(RANK, 100), (busier(CHILD, 400),), 5 * S)
    work = seen.of_rank(RANK.pid)
    assert work is not None
    assert (work.over_s, work.cores) == (4.0, pytest.approx(0.25))
    assert seen.busy_cores(RANK.pid) == pytest.approx(1.25)
    (child,) = seen.of_children(RANK.pid, (CHILD,))
    assert (child.pid, child.work.cores) == (CHILD.pid, pytest.approx(1.0))
    assert child.name


def test_a_child_that_is_new_or_idle_is_not_named() -> None:
    seen = WorkSeen()
    seen.follow(RANK, (CHILD,), S)
    seen.follow(RANK, (CHILD, replace(CHILD, pid=1, cpu_ticks=1000)), 1001 * S)
    assert seen.of_children(RANK.pid, (CHILD, replace(CHILD, pid=1))) == ()


SENDS = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sender, _ = server.accept()
    sys.stdin.readline()
    sender.sendall(bytes(100_000))
    sys.stdin.readline()
"""


def test_what_comes_over_a_connection_is_seen_unless_another_rank_sends_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        assert sender.stdin is not None
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as client:
            since = Receptions()
            sender.stdin.write("send\n")
            sender.stdin.flush()
            assert client.recv(1)
            alone = since.of({1: (os.getpid(),)})
            together = since.of({1: (os.getpid(),), 2: (sender.pid,)})
            sender.stdin.write("end\n")
    assert alone[1].remote == f"127.0.0.1:{port}"
    assert alone[1].bytes_s > 0
    assert together == {}
