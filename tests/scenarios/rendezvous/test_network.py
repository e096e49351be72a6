"""What is wrong between hosts that know each other's names: ports, large packets, loss, a slow link, interfaces."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import Hosts, lent_hosts, require
from tests.scenarios.running import SCHEMA, clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")

PORT = 29500
OWN_PORT = PORT + 1
LIMIT_S = 250
SYN = "tcp flags & (syn|ack) == syn"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require("nft", "tc")
    with lent_hosts(3) as lent:
        yield lent


@contextmanager
def filtered(hosts: Hosts, number: int, *rules: str, policy: str = "accept") -> Iterator[None]:
    """Filter what comes in to a host, save for its own."""
    chain = f"chain inet dd in {{ type filter hook input priority 0; policy {policy}; }}"
    lines = [
        "add table inet dd",
        f"add {chain}",
        *(f"add rule inet dd in {rule}" for rule in ("iif lo accept", *rules)),
    ]
    hosts.run(number, "nft", "; ".join(lines))
    try:
        yield
    finally:
        hosts.run(number, "nft", "delete table inet dd")


def known_ports(action: str) -> tuple[str, ...]:
    """Let through what belongs to something, and the two ports that are known beforehand."""
    return (
        "ct state established,related accept", f"tcp dport {{ {PORT}, {OWN_PORT} }} accept", f"{SYN} {action}",
    )  # fmt: skip


@contextmanager
def limited(hosts: Hosts, number: int, rate: str) -> Iterator[None]:
    """Limit what a host sends, as a card with a deep buffer does: nothing is lost."""
    where = ("tc", "-n", hosts.namespace(number), "qdisc")
    limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "30s")
    subprocess.run([*where, "add", "dev", "eth0", *limit], check=True, timeout=200)
    try:
        yield
    finally:
        subprocess.run([*where, "del", "dev", "eth0", "root"], check=True, timeout=200)


@dataclass(frozen=True)
class Case:
    """A fault, and what is to be said of it."""

    fault: Callable[[Hosts], Any]
    kind: str
    blamed: tuple[str, ...]
    says: str
    """In the summary."""
    count: int = 2
    severity: str = "error"


@contextmanager
def black_hole(hosts: Hosts, number: int) -> Iterator[None]:
    """Drop large packets that come in to a host, and have the others send packets one by one, as a card does."""
    others = [other for other in range(hosts.count) if other != number]
    for other in others:
        hosts.ip(other, "link", "set", "eth0", "gso_max_segs", "1")
    try:
        with filtered(hosts, number, "ip length > 1400 drop"):
            yield
    finally:
        for other in others:
            hosts.ip(other, "link", "set", "eth0", "gso_max_segs", "65535")


def on(number: int, *rules: str) -> Callable[[Hosts], Any]:
    return lambda hosts: filtered(hosts, number, *rules)


CASES = {
    "the store's port is dropped": Case(on(0, f"tcp dport {PORT} drop"), "tcp-store", ("dd0",), "gets no response"),
    "other ports are dropped on one host": Case(
        on(2, *known_ports("drop")), "mesh", ("dd2",), "inbound", count=3
    ),
    "large packets vanish": Case(lambda hosts: black_hole(hosts, 1), "mtu", ("dd1",), "large packets"),
    "packets are lost": Case(
        on(1, "numgen random mod 100 < 20 drop"), "packet-loss", ("dd1",), "lost", severity="warning"
    ),
    # "on the way from dd2 (outbound)", or "on the way to dd2 and from it" where others came in while it sent.
    "a host is slow": Case(
        lambda hosts: limited(hosts, 2, "10mbit"), "slow-link", ("dd2",), "from", count=3, severity="warning"
    ),
}  # fmt: skip

BY_SPEED = {"packets are lost", "a host is slow"}
"""A busy machine is slow too."""


def start(hosts: Hosts, number: int, count: int, *options: str, **variables: str) -> subprocess.Popen[str]:
    return hosts.start(
        number, sys.executable, "-m", "ddpdoctor", "check-rendezvous", "--nnodes", str(count), "--node-rank",
        str(number), "--master-addr", "dd0", "--master-port", str(PORT), "--format", "json", *options,
        env=clean_environment(**variables),
    )  # fmt: skip


def finish(processes: list[subprocess.Popen[str]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the reports on stdout, as far as there are, and the exit statuses."""
    ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    reports = [json.loads(stdout) for stdout, _ in ended if stdout.strip()]
    assert reports, ended[0][1]
    for report in reports:
        jsonschema.validate(report, SCHEMA)
    return reports, [process.returncode for process in processes]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_SPEED)) for name in CASES]
)
def test_fault(hosts, name):
    case = CASES[name]
    with case.fault(hosts):
        reports, statuses = finish([start(hosts, number, case.count) for number in range(case.count)])
    verdict = reports[0]["verdict"]
    assert verdict is not None, reports[0]["data"]["rendezvous"]["pairs"]
    assert (verdict["kind"], verdict["hosts"]) == (case.kind, list(case.blamed))
    assert case.says in verdict["summary"]
    assert (verdict["severity"], verdict["fix"] != "") == (case.severity, True)
    assert statuses == [1 if case.severity == "error" else 0] * case.count


def test_nobody_listens_at_the_store(hosts):
    """The first node never comes; its host is up."""
    (report,), (status,) = finish([start(hosts, 1, 2, "--timeout", "5s")])
    assert status != 0
    found = [one for one in report["findings"] if one["severity"] == "error"]
    assert found, report
    assert any("refused" in line for one in found for line in (one["summary"], *one["evidence"]))


@pytest.mark.nightly
def test_hosts_that_are_well_in_an_unusual_way(hosts):
    """A filter that lets the right ports in, a smaller MTU, a slow network, variables that say what is so."""
    low, high = 32768, 60999
    opened = (
        "ct state established,related accept", f"tcp dport {{ {PORT}, {OWN_PORT}, {low}-{high} }} accept",
    )  # fmt: skip
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^docker,lo"}
    with (
        small_mtu(hosts),
        limited(hosts, 0, "200mbit"),
        limited(hosts, 1, "200mbit"),
        filtered(hosts, 0, *opened, policy="drop"),
        filtered(hosts, 1, *opened, policy="drop"),
    ):
        reports, statuses = finish([start(hosts, number, 2, **variables) for number in range(2)])
    assert statuses == [0, 0]
    assert [one for one in reports[0]["findings"] if one["severity"] != "info"] == []
    assert reports[0]["verdict"] is None


@contextmanager
def small_mtu(hosts: Hosts) -> Iterator[None]:
    for number in range(hosts.count):
        hosts.ip(number, "link", "set", "eth0", "mtu", "1400")
    try:
        yield
    finally:
        for number in range(hosts.count):
            hosts.ip(number, "link", "set", "eth0", "mtu", "1500")
