"""Names, numbers and versions that keep nodes apart: what check-rendezvous says of each, on real hosts."""

import contextlib
import json
import re
import sys
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import NETNS, Hosts, require
from tests.scenarios.running import SCHEMA, clean_environment, free_port

pytestmark = pytest.mark.usefixtures("preloaded_python")

CHECK = (sys.executable, "-m", "ddpdoctor", "check-rendezvous", "--format", "json")
LIMIT_S = 250
QUICK = "8s"
"""How long nodes wait for one that does not come; where all come it costs nothing to wait longer."""
LONG_ENOUGH = "20s"
"""The same where others do come, each in its own time."""
HOSTS = 4


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


def meet(hosts: Hosts, options, *, wait="60s", before=(), env=None) -> list[tuple[dict[str, Any], int]]:
    """Run the check with these options, one list a host; return report and exit status of each.

    ``before`` stands before the command of the second host, and ``env`` is added to its environment.
    """
    base = clean_environment(OMP_NUM_THREADS="1")
    started = [
        hosts.start(
            number, *(before if number == 1 else ()), *CHECK, "--timeout", wait, *map(str, own),
            env={**base, **(env or {})} if number == 1 else base,
        )
        for number, own in enumerate(options)
    ]  # fmt: skip
    ended = []
    for process in started:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        assert stdout.strip(), stderr
        report = json.loads(stdout)
        jsonschema.validate(report, SCHEMA)
        ended.append((report, process.returncode))
    return ended


def by_number(count: int, master: str = "dd0"):
    """Return the options of so many nodes that are numbered."""
    port = free_port()
    return [
        ["--nnodes", count, "--node-rank", number, "--master-addr", master, "--master-port", port]
        for number in range(count)
    ]


def kinds(report) -> set[str]:
    """Return the kinds that are errors."""
    return {one["kind"] for one in report["findings"] if one["severity"] == "error"}


def verdict(report, kind):
    assert report["verdict"]["kind"] == kind, report["findings"]
    return report["verdict"]


def test_four_hosts_that_are_well(hosts):
    ended = meet(hosts, by_number(4))

    for report, status in ended:
        assert kinds(report) == set(), report["findings"]
        assert status == 0, report["checks"]
    seen = ended[0][0]["data"]["rendezvous"]
    assert [visit["host"] for visit in seen["visits"]] == list(hosts.names)
    assert len(seen["pairs"]) == 12
    assert [trial["ok"] for trial in seen["trials"]] == [True] * 4


def test_one_of_four_hosts_is_absent(hosts):
    ended = meet(hosts, by_number(4)[:3], wait=LONG_ENOUGH)

    for report, status in ended:
        assert verdict(report, "rank-set")["ranks"] == [3]
        assert kinds(report) == {"rank-set"}
        assert status == 1


def test_a_master_that_one_host_cannot_resolve(hosts):
    with own_hosts_file(hosts, 0, f"{hosts.address(0)} head"):
        (_, second) = meet(hosts, by_number(2, "head"), wait=QUICK)

    report, status = second
    assert verdict(report, "master-resolve")["hosts"] == ["dd1"]
    assert "tcp-store" not in kinds(report)
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
        assert kinds(report) == set(), report["findings"]
        assert status == 0


def test_a_host_name_that_is_loopback(hosts):
    with own_hosts_file(hosts, 0, "127.0.1.1 dd0"):
        ended = meet(hosts, by_number(2, hosts.address(0)))

    for report, status in ended:
        found = verdict(report, "hostname-loopback")
        assert found["hosts"] == ["dd0"]
        assert "export GLOO_SOCKET_IFNAME=eth0" in found["fix"]
        assert "mesh" not in kinds(report)
        assert status == 1


def test_a_clock_that_is_behind_and_another_torch(hosts, tmp_path):
    require("faketime")
    installed = tmp_path / "torch-1.0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    ended = meet(hosts, by_number(2), before=("faketime", "-f", "-20s"), env={"PYTHONPATH": str(tmp_path)})

    report, status = ended[0]
    found = {one["kind"]: one for one in report["findings"] if one["severity"] == "error"}
    assert set(found) == {"clock", "version-same"}
    assert "dd1" in found["clock"]["hosts"]
    # A busy machine reads a clock some tenths late.
    assert re.search(r"clock of dd0 is (19\.[5-9]|20\.[0-5]) s ahead of the clock of dd1", found["clock"]["summary"])
    assert "1.0.0 on dd1" in found["version-same"]["summary"]
    assert status == 1
