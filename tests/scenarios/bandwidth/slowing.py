"""Makes a link, a node or a rank slow, as real machines do: rate limits, competing load, a delay."""

import subprocess
from typing import Any

from tests.scenarios.bandwidth.running import BENCH, FAULTS, ROOT, Ran, finish
from tests.scenarios.hosts import Hosts
from tests.scenarios.running import clean_environment

SMALL = ("--max-size", "1KiB", "--iters", "3", "--warmup", "1", "--mode", "latency", "--format", "json")
"""Next to nothing of the sweep: pairs and nodes are what is wanted."""
RATE = "100mbit"
PORT = 29400
"""Each set of hosts has a network of its own, so that no two jobs share it."""


def limit_host(hosts: Hosts, number: int) -> None:
    """Limit the rate of all that a host sends."""
    _tc(hosts, number, "qdisc add dev eth0 root tbf", f"rate {RATE} burst 64kb latency 50ms")


def limit_link(hosts: Hosts, one: int, other: int) -> None:
    """Limit the rate of what two hosts send each other, and of nothing else."""
    for number, peer in ((one, other), (other, one)):
        _tc(hosts, number, "qdisc add dev eth0 root handle 1: htb default 1")
        _tc(hosts, number, "class add dev eth0 parent 1: classid 1:1 htb rate 10gbit quantum 60000")
        _tc(hosts, number, f"class add dev eth0 parent 1: classid 1:2 htb rate {RATE} burst 64kb quantum 60000")
        match = f"u32 match ip dst {hosts.address(peer)}/32 flowid 1:2"
        _tc(hosts, number, f"filter add dev eth0 parent 1: protocol ip prio 1 {match}")


def _tc(hosts: Hosts, number: int, *words: str) -> None:
    command = ["tc", "-n", hosts.namespace(number), *" ".join(words).split()]
    subprocess.run(command, check=True, capture_output=True, timeout=200)


def bench_on(hosts: Hosts, *options: str) -> Ran:
    """Run a bench of one rank a host; return what came of rank 0."""
    ranks: list[Any] = []
    for number in range(hosts.count):
        env = clean_environment(
            PYTHONPATH=str(ROOT), RANK=str(number), WORLD_SIZE=str(hosts.count), LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1", MASTER_ADDR=hosts.address(0), MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="eth0",
        )  # fmt: skip
        ranks.append(hosts.start(number, *BENCH, *options, env=env, start_new_session=True))
    ran = [finish(process) for process in ranks]
    return ran[0]


def late(rank: int) -> dict[str, str]:
    """Return the environment in which this rank comes late to each call."""
    return {"PYTHONPATH": str(FAULTS), "LATE_RANK": str(rank)}


def crowded(rank: int) -> dict[str, str]:
    """Return the environment in which this rank has to share its core while pairs are measured."""
    return {"PYTHONPATH": str(FAULTS), "CROWDED_RANK": str(rank)}


def named(ran: Ran, kinds: tuple[str, ...] = ("slow-rank", "slow-link", "slow-node")) -> list[tuple[str, Any, Any]]:
    """Return who is named for what."""
    assert ran.stdout, ran.stderr
    assert ran.report["job"]["status"] == "finished"
    return [
        (finding["kind"], finding["ranks"], finding["hosts"])
        for finding in ran.report["findings"]
        if finding["kind"] in kinds
    ]
