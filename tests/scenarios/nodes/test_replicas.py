"""Replicas and attempts of a job on two nodes: what no node can see by itself is found, live and at the end."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import Hosts
from tests.scenarios.running import PATIENT, SCHEMA, clean_environment, free_port, wait_for, words_of

pytestmark = pytest.mark.usefixtures("preloaded_python")

LIMIT_S = 250


class Node:
    """One `ddpdoctor wrap`, and what it says meanwhile."""

    def __init__(self, hosts: Hosts, number: int, folder: Path, options: tuple[str, ...], job: tuple[str, ...]) -> None:
        command = (
            sys.executable, "-m", "ddpdoctor", "wrap", "--rdzv-backend", "c10d", "--rdzv-id", "replicas",
            "--rdzv-conf", "last_call_timeout=1", *PATIENT, "--report-dir", str(folder / f"n{number}"),
            *options, *words_of(job[0]), *job[1:],
        )  # fmt: skip
        # Torch's agents and ranks otherwise share a store, in which keys of an earlier attempt lead Gloo astray.
        env = clean_environment(GLOO_SOCKET_IFNAME="eth0", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.process: subprocess.Popen[str] = hosts.start(number, *command, env=env)
        self.said: list[str] = []
        assert self.process.stderr is not None
        self._lines = self.process.stderr
        self._reader = threading.Thread(target=lambda: self.said.extend(self._lines), daemon=True)
        self._reader.start()

    def end(self) -> str:
        """Wait for its end, which must be a good one; return all that it said."""
        assert self.process.wait(timeout=LIMIT_S) == 0, "".join(self.said)
        self._reader.join(timeout=200)
        return "".join(self.said)


def start(hosts: Hosts, number: int, folder: Path, port: int, *job: str, each: int = 2, nnodes: str = "2") -> Node:
    options = ("--nnodes", nnodes, "--nproc-per-node", str(each), "--rdzv-endpoint", f"{hosts.names[0]}:{port}")
    return Node(hosts, number, folder, options, job)


def run(hosts: Hosts, folder: Path, *job: str, each: int = 2) -> dict[str, Any]:
    """Run a job on both nodes to its end; return the report of the first."""
    port = free_port()
    for node in [start(hosts, number, folder, port, *job, each=each) for number in range(2)]:
        node.end()
    return read(folder)


def read(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "n0" / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    return report


def test_a_node_that_joins_and_differs_is_reported_at_once(hosts: Hosts, tmp_path: Path) -> None:
    port, job = free_port(), ("nodes_join", str(tmp_path))
    first = start(hosts, 0, tmp_path, port, *job, each=1, nnodes="1:2")
    assert wait_for((tmp_path / "begun").exists), first.said
    second = start(hosts, 1, tmp_path, port, *job, each=1, nnodes="1:2")
    assert wait_for(lambda: any("DD501 param-drift" in line for line in first.said)), (first.said, second.said)
    (tmp_path / "end").touch()
    second.end()
    first.end()
    report = read(tmp_path)
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["step"], verdict["hosts"]) == ("param-drift", 1, ["dd0", "dd1"])
    assert "lr is 0.1 on rank 0, 0.05 on rank 1" in verdict["summary"]
    # A node that joins slowly misses torch's last call: the first one then runs alone once more.
    *earlier, last = report["data"]["sections"]
    assert earlier
    for section in earlier:
        assert [(rank["rank"], rank["host"]) for rank in section["ranks"]] == [(0, "dd0")]
        assert section["findings"] == []
    assert [(rank["rank"], rank["host"]) for rank in last["ranks"]] == [(0, "dd0"), (1, "dd1")]
    assert report["data"]["attempts"] == len(earlier) + 1


def test_ranks_of_both_nodes_show_which_one_differs(hosts: Hosts, tmp_path: Path) -> None:
    report = run(hosts, tmp_path, "replicas", "wrong", "rate", "clipped")
    found = {finding["tensor"]: finding for finding in report["findings"] if finding["code"] in {"DD501", "DD503"}}
    rate, clipped = found["rate.weight"], found["clipped.weight"]
    assert (rate["ranks"], rate["hosts"], rate["step"], rate["confidence"]) == ([2], ["dd1"], 16, "high")
    assert "lr is 0.1 on ranks 0, 1, 3, 0.05 on rank 2" in rate["summary"]
    assert (clipped["ranks"], clipped["hosts"], clipped["step"]) == ([1], ["dd0"], 16)


def test_equal_replicas_on_both_nodes_stay_silent(hosts: Hosts, tmp_path: Path) -> None:
    report = run(hosts, tmp_path, "replicas", "right", "rate", "clipped", "one_steps", "dropped", "stale", each=1)
    assert report["findings"] == []
    outcomes = {check["code"]: check["outcome"] for check in report["checks"]}
    assert {outcomes[f"DD50{n}"] for n in (1, 3, 5, 7, 8)} == {"passed"}, report["checks"]


def test_data_of_both_nodes_are_held_against_each_other(hosts: Hosts, tmp_path: Path) -> None:
    report = run(hosts, tmp_path, "data_shared_badly", each=1)
    found = next(finding for finding in report["findings"] if finding["kind"] == "duplicate-data")
    assert (found["ranks"], found["hosts"]) == ([0, 1], ["dd0", "dd1"])
