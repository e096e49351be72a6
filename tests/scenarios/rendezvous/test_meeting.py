"""How the nodes of check-rendezvous meet: under launchers, by a second way where a port is closed, and not at all."""

import json
import signal
import sys
from typing import Any

import jsonschema
import pytest

from ddpdoctor.exchange.wire import NO_TOKEN
from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import SCHEMA, clean_environment, free_port, grids_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
VERB = ("-m", "ddpdoctor", "check-rendezvous", "--format", "json")
CHECK = (sys.executable, *VERB)
LIMIT_S = 250
PATIENT = ("--timeout", "120s")
"""Where all nodes come, and a busy machine is slow to start them."""
QUICK = ("--timeout", "8s")


@pytest.fixture
def closed_ports(hosts):
    """Return a function that has the first host drop what comes in on some ports."""
    require("nft")

    def close(*ports: int) -> None:
        hosts.run(
            0, "nft", "add table inet dd; add chain inet dd in { type filter hook input priority 0; }; "
            "add rule inet dd in iif lo accept; "
            f"add rule inet dd in tcp dport {{ {', '.join(map(str, ports))} }} drop",
        )  # fmt: skip

    yield close
    hosts.run(0, "nft", "delete table inet dd")


def by_number(number: int, port: int) -> tuple[str, ...]:
    return ("--nnodes", "2", "--node-rank", str(number), "--master-addr", "dd0", "--master-port", str(port))


def start(hosts: Hosts, number: int, *command: str, **env: str):
    return hosts.start(number, *command, env=clean_environment(**env))


def finish(process) -> tuple[dict[str, Any], int]:
    """Return the one report that there is to be on stdout, and the exit status."""
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert stdout.strip(), stderr
    return read(stdout), process.returncode


def read(text: str) -> dict[str, Any]:
    report = json.loads(text)
    jsonschema.validate(report, SCHEMA)
    return dict(report)


def errors(report) -> list[str]:
    return [one["kind"] for one in report["findings"] if one["severity"] == "error"]


def ways(report) -> list[str]:
    return [visit["door"]["way"] for visit in report["data"]["rendezvous"]["visits"]]


def healthy(report, *, nodes: int = 2) -> None:
    assert errors(report) == [], report["findings"]
    seen = report["data"]["rendezvous"]
    assert [trial["ok"] for trial in seen["trials"]] == [True] * nodes
    assert len(seen["pairs"]) == nodes * (nodes - 1)


def test_under_torchrun_one_report_for_all_ranks(hosts):
    port = free_port()
    processes = [
        start(
            hosts, number, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}",
            "--master-addr=dd0", f"--master-port={port}", *VERB,
        )
        for number in range(2)
    ]  # fmt: skip
    (stdout, _), (nothing, stderr) = [process.communicate(timeout=LIMIT_S) for process in processes]
    report = read(stdout)

    healthy(report)
    assert report["data"]["world_size"] == 4
    pairs = grids_of(report)["connections between nodes, from the node of the row to that of the column"]
    assert [[cell.text for cell in row] for row in pairs.cells] == [["", "ok"], ["ok", ""]]
    assert report["data"]["missing_ranks"] == []
    assert (processes[0].returncode, processes[1].returncode, nothing) == (0, 0, ""), stderr


def test_where_the_own_port_is_closed_the_nodes_meet_by_the_store(hosts, closed_ports):
    port = free_port()
    closed_ports(port + 1)
    processes = [start(hosts, number, *CHECK, *PATIENT, *by_number(number, port)) for number in range(2)]
    (report, status), (second, second_status) = [finish(process) for process in processes]

    healthy(report)
    assert ways(report) == ["own port", "store"]
    assert (status, second_status, errors(second)) == (0, 0, [])


def test_where_both_ports_are_closed_the_nodes_meet_by_a_shared_folder(hosts, closed_ports, tmp_path):
    port = free_port()
    closed_ports(port, port + 1)
    more = ("--report-dir", str(tmp_path))
    processes = [start(hosts, number, *CHECK, *by_number(number, port), *more) for number in range(2)]
    (report, status), _ = [finish(process) for process in processes]

    assert ways(report) == ["own port", "folder"]
    assert (report["verdict"]["kind"], report["verdict"]["hosts"]) == ("tcp-store", ["dd0"])
    assert status == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-1.json", "report.json"]
    assert errors(read((tmp_path / "node-1.json").read_text())) == errors(report)


def test_where_there_is_no_way_each_node_reports_what_it_saw(hosts, closed_ports):
    port = free_port()
    closed_ports(port, port + 1)
    processes = [start(hosts, number, *CHECK, *QUICK, *by_number(number, port)) for number in range(2)]
    (first, _), (second, status) = [finish(process) for process in processes]

    assert first["verdict"]["kind"] == "rank-set"
    assert first["data"]["missing_ranks"] == [1]
    assert second["verdict"]["kind"] == "tcp-store"
    assert second["data"]["rendezvous"]["complete"] is False
    (attempt,) = second["data"]["rendezvous"]["visits"][1]["door"]["attempts"]
    assert attempt["contact"] == "no-answer"
    assert status == 1


def test_a_node_that_is_interrupted_ends_at_once(hosts):
    """Node 1 never comes; node 0 waits for it and is interrupted."""
    port = free_port()
    process = start(hosts, 0, *CHECK, *by_number(0, port), "--timeout", "600")
    inside = (
        "import time; from ddpdoctor.exchange.wire import open_client as o\n"
        f"s = o(('dd0',), {port + 1}, {NO_TOKEN!r}, 150)\n"
        "while not s.add('arrived', 0): time.sleep(0.05)"
    )
    hosts.run(0, sys.executable, "-c", inside)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=200)
    # Python itself ends so where the signal came inside of code that was made from text, as of a dataclass.
    assert process.returncode in {130, -signal.SIGINT}, stderr
    assert (stdout, stderr) == ("", "")
