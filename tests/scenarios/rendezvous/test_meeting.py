"""Nodes of check-rendezvous on real hosts: how they meet, and what is said of names, ports, packets and links."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import NETNS, Hosts, require
from tests.scenarios.running import SCHEMA, clean_environment, free_port, grids_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

VERB = ("-m", "ddpdoctor", "check-rendezvous", "--format", "json")
LIMIT_S = 250
PATIENT = "120s"
"""Where all nodes come, and a busy machine is slow to start them."""
QUICK = "8s"
"""How long nodes wait for one that does not come; where all come it costs nothing to wait longer."""
LONG_ENOUGH = "20s"
"""The same where others do come, each in its own time."""
HOSTS = 4
PORT = 29500
OWN_PORT = PORT + 1
SYN = "tcp flags & (syn|ack) == syn"


def start(hosts: Hosts, number: int, *words: object, **env: str) -> Any:
    return hosts.start(number, sys.executable, *map(str, words), env=clean_environment(**env))


def finish(process: Any) -> tuple[dict[str, Any], int]:
    """Return the one report that there is to be on stdout, and the exit status."""
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert stdout.strip(), stderr
    return read(stdout), process.returncode


def read(text: str) -> dict[str, Any]:
    report = json.loads(text)
    jsonschema.validate(report, SCHEMA)
    return dict(report)


def meet(hosts: Hosts, options: Any, *, wait: str = PATIENT, **env: str) -> list[tuple[dict[str, Any], int]]:
    """Run the check with these options, one list a host; return report and exit status of each."""
    started = [start(hosts, number, *VERB, "--timeout", wait, *own, **env) for number, own in enumerate(options)]
    return [finish(process) for process in started]


def by_number(count: int, master: str = "dd0", port: int = 0, more: tuple[object, ...] = ()) -> list[list[object]]:
    """Return the options of so many nodes that are numbered; ``more`` go to all."""
    port = port or free_port()
    return [
        ["--nnodes", count, "--node-rank", number, "--master-addr", master, "--master-port", port, *more]
        for number in range(count)
    ]


def errors(report: dict[str, Any]) -> list[str]:
    return [one["kind"] for one in report["findings"] if one["severity"] == "error"]


def ways(report: dict[str, Any]) -> list[str]:
    return [visit["door"]["way"] for visit in report["data"]["rendezvous"]["visits"]]


def verdict(report: dict[str, Any], kind: str) -> dict[str, Any]:
    assert report["verdict"]["kind"] == kind, report["findings"]
    return dict(report["verdict"])


def healthy(report: dict[str, Any], *, nodes: int = 2) -> None:
    assert errors(report) == [], report["findings"]
    seen = report["data"]["rendezvous"]
    assert [trial["ok"] for trial in seen["trials"]] == [True] * nodes
    assert len(seen["pairs"]) == nodes * (nodes - 1)


def test_under_torchrun_one_report_for_all_ranks(hosts):
    options = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=dd0", f"--master-port={free_port()}")
    processes = [
        start(hosts, number, "-m", "torch.distributed.run", f"--node-rank={number}", *options, *VERB)
        for number in range(2)
    ]
    (stdout, _), (nothing, stderr) = [process.communicate(timeout=LIMIT_S) for process in processes]
    report = read(stdout)

    healthy(report)
    assert report["data"]["world_size"] == 4
    pairs = grids_of(report)["connections between nodes, from the node of the row to that of the column"]
    assert [[cell.text for cell in row] for row in pairs.cells] == [["", "ok"], ["ok", ""]]
    assert report["data"]["missing_ranks"] == []
    assert (processes[0].returncode, processes[1].returncode, nothing) == (0, 0, ""), stderr


def test_where_the_own_port_is_closed_the_nodes_meet_by_the_store(hosts):
    with hosts.filtered(0, f"tcp dport {OWN_PORT} drop"):
        (report, status), (second, second_status) = meet(hosts, by_number(2, port=PORT))

    healthy(report)
    assert ways(report) == ["own port", "store"]
    assert (status, second_status, errors(second)) == (0, 0, [])


def test_where_both_ports_are_closed_the_nodes_meet_by_a_shared_folder(hosts, tmp_path):
    with hosts.filtered(0, f"tcp dport {{ {PORT}, {OWN_PORT} }} drop"):
        (report, status), _ = meet(hosts, by_number(2, port=PORT, more=("--report-dir", tmp_path)))

    assert ways(report) == ["own port", "folder"]
    assert verdict(report, "tcp-store")["hosts"] == ["dd0"]
    assert status == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-1.json", "report.json"]
    assert errors(read((tmp_path / "node-1.json").read_text())) == errors(report)


def test_where_there_is_no_way_each_node_reports_what_it_saw(hosts):
    with hosts.filtered(0, f"tcp dport {{ {PORT}, {OWN_PORT} }} drop"):
        (first, _), (second, status) = meet(hosts, by_number(2, port=PORT), wait=QUICK)

    verdict(first, "rank-set")
    assert first["data"]["missing_ranks"] == [1]
    verdict(second, "tcp-store")
    assert second["data"]["rendezvous"]["complete"] is False
    (attempt,) = second["data"]["rendezvous"]["visits"][1]["door"]["attempts"]
    assert attempt["contact"] == "no-answer"
    assert status == 1


# Names, numbers and versions that keep nodes apart.


@contextlib.contextmanager
def own_hosts_file(hosts: Hosts, number: int, *lines: str):
    """Give a host other lines in /etc/hosts for a while, before those it has."""
    file = NETNS / hosts.namespace(number) / "hosts"
    former = file.read_text()
    hosts.write(number, "hosts", "\n".join([*lines, former]))
    try:
        yield
    finally:
        hosts.write(number, "hosts", former)


def test_four_hosts_that_are_well(hosts):
    ended = meet(hosts, by_number(4))

    assert [(errors(report), status) for report, status in ended] == [([], 0)] * 4
    healthy(ended[0][0], nodes=4)
    assert [visit["host"] for visit in ended[0][0]["data"]["rendezvous"]["visits"]] == list(hosts.names)


def test_one_of_four_hosts_is_absent(hosts):
    ended = meet(hosts, by_number(4)[:3], wait=LONG_ENOUGH)

    for report, status in ended:
        assert verdict(report, "rank-set")["ranks"] == [3]
        assert errors(report) == ["rank-set"]
        assert status == 1


def test_a_master_that_one_host_cannot_resolve(hosts):
    with own_hosts_file(hosts, 0, f"{hosts.address(0)} head"):
        (_, second) = meet(hosts, by_number(2, "head"), wait=QUICK)

    report, status = second
    assert verdict(report, "master-resolve")["hosts"] == ["dd1"]
    assert "tcp-store" not in errors(report)
    assert status == 1


@pytest.fixture
def second_card(hosts):
    """Give the first host an address that its name does not lead to."""
    address = hosts.address(100)
    hosts.ip(0, "addr", "add", f"{address}/24", "dev", "eth0")
    yield address
    hosts.ip(0, "addr", "del", f"{address}/24", "dev", "eth0")


def by_endpoint(endpoint, *, conf=("", "")):
    port = free_port()
    return [
        ["--nnodes", 2, "--rdzv-endpoint", f"{endpoint}:{port}", "--rdzv-id", "job"]
        + (["--rdzv-conf", one] if one else [])
        for one in conf
    ]  # fmt: skip


def test_an_endpoint_on_a_second_card_with_a_host_that_is_given(hosts, second_card):
    for report, status in meet(hosts, by_endpoint(second_card, conf=("is_host=1", "is_host=0"))):
        assert errors(report) == [], report["findings"]
        assert status == 0


def test_a_host_name_that_is_loopback(hosts):
    with own_hosts_file(hosts, 0, "127.0.1.1 dd0"):
        ended = meet(hosts, by_number(2, hosts.address(0)))

    for report, status in ended:
        found = verdict(report, "hostname-loopback")
        assert found["hosts"] == ["dd0"]
        assert "export GLOO_SOCKET_IFNAME=eth0" in found["fix"]
        assert "mesh" not in errors(report)
        assert status == 1


# What is wrong between hosts that know each other's names: ports, large packets, loss, a slow link.


def known_ports(action: str) -> tuple[str, ...]:
    """Let through what belongs to something, and the two ports that are known beforehand."""
    return (
        "ct state established,related accept", f"tcp dport {{ {PORT}, {OWN_PORT} }} accept", f"{SYN} {action}",
    )  # fmt: skip


@contextlib.contextmanager
def limited(hosts: Hosts, number: int, rate: str) -> Iterator[None]:
    """Limit what a host sends, as a card with a deep buffer does: nothing is lost."""
    require("tc")
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


@contextlib.contextmanager
def black_hole(hosts: Hosts, number: int) -> Iterator[None]:
    """Drop large packets that come in to a host, and have the others send packets one by one, as a card does."""
    others = [other for other in range(hosts.count) if other != number]
    for other in others:
        hosts.ip(other, "link", "set", "eth0", "gso_max_segs", "1")
    try:
        with hosts.filtered(number, "ip length > 1400 drop"):
            yield
    finally:
        for other in others:
            hosts.ip(other, "link", "set", "eth0", "gso_max_segs", "65535")


def on(number: int, *rules: str) -> Callable[[Hosts], Any]:
    return lambda hosts: hosts.filtered(number, *rules)


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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in BY_SPEED)) for name in CASES]
)
def test_fault(hosts, name):
    case = CASES[name]
    with case.fault(hosts):
        ended = meet(hosts, by_number(case.count, port=PORT))
    found = verdict(ended[0][0], case.kind)
    assert found["hosts"] == list(case.blamed)
    assert case.says in found["summary"]
    assert (found["severity"], found["fix"] != "") == (case.severity, True)
    assert [status for _, status in ended] == [1 if case.severity == "error" else 0] * case.count


@pytest.mark.nightly
def test_hosts_that_are_well_in_an_unusual_way(hosts):
    """A filter that lets the right ports in, a smaller MTU, a slow network, variables that say what is so."""
    opened = ("ct state established,related accept", f"tcp dport {{ {PORT}, {OWN_PORT}, 32768-60999 }} accept")
    variables = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "^docker,lo"}
    with (
        small_mtu(hosts),
        limited(hosts, 0, "200mbit"),
        limited(hosts, 1, "200mbit"),
        hosts.filtered(0, *opened, policy="drop"),
        hosts.filtered(1, *opened, policy="drop"),
    ):
        (report, status), (_, second_status) = meet(hosts, by_number(2, port=PORT), **variables)
    assert (status, second_status, report["verdict"]) == (0, 0, None)
    assert [one for one in report["findings"] if one["severity"] != "info"] == []


@contextlib.contextmanager
def small_mtu(hosts: Hosts) -> Iterator[None]:
    for number in range(hosts.count):
        hosts.ip(number, "link", "set", "eth0", "mtu", "1400")
    try:
        yield
    finally:
        for number in range(hosts.count):
            hosts.ip(number, "link", "set", "eth0", "mtu", "1500")
