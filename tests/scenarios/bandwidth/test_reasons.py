"""What `allreduce-bench` says beside its numbers of the machine that it really runs on."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.scenarios.bandwidth.running import BENCH, bench, finish, start
from tests.scenarios.running import free_port

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.alone, pytest.mark.nightly]

SMALL = ("--max-size", "1KiB", "--iters", "2", "--warmup", "1", "--mode", "latency", "--format", "json")
CPUS = sorted(os.sched_getaffinity(0))
ON = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
WORK = "print('working', flush=True)\nwhile True: pass"
HOST_ALONE = "GLOO_SOCKET_IFNAME, the host name's address"
BUSY = "/proc/stat, while the ranks were idle"

two_processors = pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")


def on(cpu, *command):
    """Return a command that is bound to one processor with all that it starts."""
    return (sys.executable, "-c", ON, str(cpu), *command)


@contextmanager
def competing(*cpus):
    """Keep these processors busy."""
    others = [subprocess.Popen(on(cpu, sys.executable, "-c", WORK), stdout=subprocess.PIPE) for cpu in cpus]
    try:
        for other in others:
            assert other.stdout.readline() == b"working\n"
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


def reasons(ran):
    assert ran.status == 0, ran.stderr
    return ran.report["data"]["reasons"]


@two_processors
def test_a_machine_as_it_should_be():
    found = reasons(bench(*SMALL))

    # Whether somebody else works on this machine, or on its host, is not the test's to say.
    assert [one["source"] for one in found if not one["source"].startswith("/proc/stat")] == [HOST_ALONE]
    assert "not a network" in found[-1]["text"]
    assert found[-1]["hosts"] == [os.uname().nodename]


def test_more_ranks_than_processors():
    ran = finish(start(*on(CPUS[0], *BENCH, "--nproc-per-node", "2", *SMALL)))

    (found,) = [one for one in reasons(ran) if one["source"] == "sched_getaffinity"]
    assert found["text"].startswith("2 ranks share 1 CPU")
    assert found["ranks"] == [0, 1]


@two_processors
def test_a_busy_machine():
    with competing(*CPUS):
        (found,) = [one for one in reasons(bench(*SMALL)) if one["source"] == BUSY]
    assert found["ranks"] == [0, 1]


@two_processors
def test_one_rank_beside_a_competing_process():
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with competing(CPUS[1]):
        started = [start(*on(CPUS[rank], *BENCH, *SMALL), RANK=str(rank), **common) for rank in range(2)]
        first, second = [finish(process) for process in started]

    assert second.status == 0, second.stderr
    (found,) = [one for one in reasons(first) if one["source"] == BUSY and 1 in one["ranks"]]
    assert found["ranks"] == [1]
    assert f"1 CPU busy (CPU {CPUS[1]})" in found["text"]


def test_a_variable_left_set():
    found = reasons(bench(*SMALL, TORCH_DISTRIBUTED_DEBUG="DETAIL", NCCL_P2P_DISABLE="1"))

    (text,) = [one["text"] for one in found if one["source"] == "DD114 env-danger"]
    assert text.startswith("TORCH_DISTRIBUTED_DEBUG=DETAIL")  # and Gloo does not read the other one
