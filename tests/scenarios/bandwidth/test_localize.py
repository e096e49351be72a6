"""A slow node, link or rank made for real, and a late one: it is named, and nobody else; where all is well, nobody."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.scenarios.bandwidth.running import BENCH, bench, finish, start
from tests.scenarios.bandwidth.slowing import SMALL, bench_on, crowded, late, limit_host, limit_link, named
from tests.scenarios.hosts import lent_hosts, require
from tests.scenarios.running import free_port

pytestmark = [pytest.mark.usefixtures("preloaded_python"), pytest.mark.alone, pytest.mark.nightly]

CPUS = sorted(os.sched_getaffinity(0))
two_processors = pytest.mark.skipif(len(CPUS) < 2, reason="needs two processors")
CALLS = ("--max-size", "1KiB", "--iters", "30", "--warmup", "1", "--mode", "latency", "--format", "json")
"""As many calls as it takes to say who comes late."""

LARGE = ("--iters", "20", "--warmup", "1", "--collective", "broadcast")
SOON = ("--budget", "5s")
"""Turns end earlier, the slow ones above all."""


@pytest.fixture
def hosts():
    require("tc")
    with lent_hosts(3) as lent:
        yield lent


def seen(ran, kind):
    return next(check for check in ran.report["checks"] if check["id"] == kind)


def test_three_hosts_that_are_well(hosts):
    ran = bench_on(hosts, *SMALL, *SOON, "--by-node")

    assert named(ran) == []
    assert ran.status == 0
    assert [node["ranks"] for node in ran.report["data"]["nodes"]] == [[1, 2], [0, 2], [0, 1]]
    assert all(node["alone"] and len(node["busbws_gb_s"]) >= 5 for node in ran.report["data"]["nodes"])
    assert seen(ran, "slow-node")["seen"].startswith("3 pairs of nodes: ")


def test_a_host_that_sends_slowly(hosts):
    limit_host(hosts, 2)

    ran = bench_on(hosts, *SMALL, *SOON, "--by-node")

    assert named(ran) == [("slow-node", [2], ["dd2"])]
    (finding,) = ran.report["findings"]
    assert "0.012 GB/s" in finding["summary"]
    assert "the bandwidth is low" in " ".join(finding["evidence"])


def test_two_hosts_that_are_slow_with_each_other(hosts):
    limit_link(hosts, 0, 2)

    ran = bench_on(hosts, *SMALL, *SOON, "--by-node")

    assert named(ran) == [("slow-link", [0, 2], ["dd0", "dd2"])]


@two_processors
def test_a_core_that_a_rank_has_to_share_is_no_link():
    require()

    ran = bench(*SMALL, "--pairs", ranks=3, **crowded(2))

    assert named(ran) == [("slow-rank", [2], [os.uname().nodename])]


def test_a_rank_that_comes_late_to_every_call():
    ran = bench(*CALLS, ranks=3, **late(1))

    ((kind, ranks, _),) = named(ran)
    assert (kind, ranks) == ("slow-rank", [1])
    (finding,) = ran.report["findings"]
    assert "late to each call" in finding["summary"]
    arrivals = ran.report["data"]["arrivals"]
    assert arrivals[1]["late_us"] >= 15_000
    assert all(arrivals[rank]["late_us"] < 0 for rank in (0, 2))


def test_a_slow_network_makes_nobody_late(hosts):
    limit_host(hosts, 0)

    ran = bench_on(hosts, "--min-size", "512KiB", "--max-size", "1MiB", "--mode", "latency", "--format", "json", *LARGE)

    assert named(ran) == []
    # What host 0 sends is with the others 40 ms and more after it has sent it.
    assert all(abs(arrival["late_us"]) < 20_000 for arrival in ran.report["data"]["arrivals"])


def test_pairs_for_which_there_is_no_time():
    ran = bench(*SMALL, "--budget", "0.2s", "--pairs", ranks=5)

    pairs = ran.report["data"]["pairs"]
    assert 2 <= len(pairs) < 10
    assert not any(pair["alone"] for pair in pairs)
    (note,) = (note for note in ran.report["data"]["notes"] if note.startswith("--pairs"))
    assert f"{len(pairs)} of 10 pairs of ranks (a budget of 0.2 s allows no more), several in parallel" in note


# What is said beside the numbers of the machine that it really runs on.


FEW = ("--max-size", "1KiB", "--iters", "2", "--warmup", "1", "--mode", "latency", "--format", "json")
ON = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execv(sys.argv[2], sys.argv[2:])"
WORK = "print('working', flush=True)\nwhile True: pass"
HOST_ALONE = "GLOO_SOCKET_IFNAME, the host name's address"
BUSY = "/proc/stat, while the ranks were idle"


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
    found = reasons(bench(*FEW))

    # Whether somebody else works on this machine, or on its host, is not the test's to say.
    assert [one["source"] for one in found if not one["source"].startswith("/proc/stat")] == [HOST_ALONE]
    assert "not a network" in found[-1]["text"]
    assert found[-1]["hosts"] == [os.uname().nodename]


@two_processors
def test_one_rank_beside_a_competing_process():
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with competing(CPUS[1]):
        started = [start(*on(CPUS[rank], *BENCH, *FEW), RANK=str(rank), **common) for rank in range(2)]
        first, second = [finish(process) for process in started]

    assert second.status == 0, second.stderr
    (found,) = [one for one in reasons(first) if one["source"] == BUSY and 1 in one["ranks"]]
    assert found["ranks"] == [1]
    assert f"1 CPU busy (CPU {CPUS[1]})" in found["text"]
