"""Jobs over three hosts: whichever node reports, the culprit on another one is named, with its host."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import JOBS, PATIENT, SCHEMA, clean_environment, free_port, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")

JOB = JOBS / "over_nodes.py"
WRAP = (sys.executable, "-m", "ddpdoctor", "wrap")
IMPATIENT = ("--hang-timeout", "4", "--on-hang", "kill")
LIMIT_S = 250
ENDLESS = 10**9
HOSTS = 3


@dataclass(frozen=True)
class Member:
    """What came of the wrap on one host."""

    status: int
    stdout: str
    stderr: str
    report: dict[str, Any]

    @property
    def verdict(self) -> dict[str, Any]:
        assert self.report["verdict"] is not None, (self.report["checks"], self.stderr)
        return dict(self.report["verdict"])

    @property
    def named(self) -> tuple[str, list[int], list[str]]:
        return self.verdict["kind"], self.verdict["ranks"], self.verdict["hosts"]


class Running:
    """One job: a wrap on each of some hosts, of one rank each, which all have the same --report-dir."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        *words: object,
        world=HOSTS,
        absent: int | None = None,
        hang_timeout: tuple[str, ...] = IMPATIENT,
    ) -> None:
        self.folder, self.begun = folder / "run", folder / "begun"
        port = free_port()
        self.processes = {
            number: hosts.start(
                number,
                *WRAP,
                *(*hang_timeout, "--report-dir", str(self.folder), "--debug-level", "OFF"),
                *(str(JOB), *map(str, words), str(self.begun)),
                env=clean_environment(**_as_rank(number, world, port)),
            )
            for number in range(world)
            if number != absent
        }

    def wait_until_it_trains(self) -> None:
        ranks = [Path(f"{self.begun}-{number}") for number in self.processes]
        assert wait_for(lambda: all(path.exists() for path in ranks), LIMIT_S)

    def wait_until_nodes_know_each_other(self) -> None:
        """Wait until each node has been heard for two more seconds: a beat a second brings it the list of nodes."""
        seen: list[list[int]] = []

        def knows() -> bool:
            path = self.folder / "members.json"
            heard = [node["heard_ns"] for node in json.loads(path.read_text())["nodes"]] if path.exists() else []
            if len(heard) == len(self.processes) and None not in heard:
                seen.append(heard)
            return bool(seen) and min(seen[-1]) > max(seen[0]) + 2e9

        assert wait_for(knows), seen

    def finish(self, number: int) -> Member:
        process = self.processes[number]
        stdout, stderr = process.communicate(timeout=LIMIT_S)
        path = self.folder / (f"node-{number}.json" if number else "report.json")
        assert path.exists(), stderr
        report = json.loads(path.read_text())
        jsonschema.validate(report, SCHEMA)
        return Member(process.returncode, stdout, stderr, report)

    def finish_all(self) -> list[Member]:
        return [self.finish(number) for number in self.processes]


def _as_rank(number: int, world: int, port: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_ADDR": "dd0", "MASTER_PORT": str(port)}


def line_of(fault: str) -> list[int]:
    lines = JOB.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith(f"# FAULT {fault}")]


FAULTS = {
    "deadlock": (2, [0, 1], 124),
    "exit-hang": (2, [1], 0),
    "killed": (2, [1], 1),
    "straggler": (2, [1], 0),
}
"""By kind, which is also what the job is reported to do wrong: nodes, ranks to blame, exit status of the first."""
END = ("killed", "straggler")
"""After these a job ends by itself."""


@pytest.mark.parametrize("kind", [*list(FAULTS)[:-1], pytest.param("straggler", marks=pytest.mark.nightly)])
def test_the_culprit_on_another_node_is_named(hosts, tmp_path, kind):
    world, blamed, status = FAULTS[kind]
    hang_timeout = PATIENT if kind in END else IMPATIENT[:2] if kind == "deadlock" else IMPATIENT
    first, *others = Running(hosts, tmp_path, kind, 40, world=world, hang_timeout=hang_timeout).finish_all()

    assert first.named == (kind, blamed, [f"dd{number}" for number in blamed]), first.verdict
    assert "on dd" in first.verdict["summary"]
    places = {place["line"] for place in first.verdict["where"]}
    assert not line_of(kind) or places & set(line_of(kind)), first.verdict
    # On a busy machine the first rank is not at its end when the job is stopped.
    assert first.status in {status, *((124,) if kind == "exit-hang" else ())}, first.stderr
    rows = [(row["rank"], row["host"]) for row in first.report["ranks"]]
    assert rows == [(number, f"dd{number}") for number in range(world)]
    # What the first node found is reported to all.
    assert all(other.named == first.named for other in others)


def test_a_network_that_loses_everything_between_two_nodes_is_no_fault_of_a_rank(hosts, tmp_path):
    require("nft")
    job = Running(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    rule = f"add table inet dd; add chain inet dd in {{ type filter hook input priority 0; }}; \
add rule inet dd in ip saddr {hosts.address(2)} drop"
    hosts.run(1, "nft", rule)
    try:
        first, *others = job.finish_all()
    finally:
        hosts.run(1, "nft", "delete table inet dd")

    assert first.named == ("transport", [0, 1, 2], ["dd0", "dd1", "dd2"]), first.verdict
    seen = " ".join(first.verdict["evidence"])
    assert "data from rank 1 to rank 2 is not acknowledged" in seen or "data from rank 2 to rank 1" in seen, seen
    assert "no interface has that address" not in seen, seen
    assert first.verdict["fix"].startswith("packets between "), first.verdict
    assert [other.status for other in others] == [124, 124]


def test_a_node_that_never_comes(hosts, tmp_path):
    first, last = Running(hosts, tmp_path, "nothing", 40, absent=1).finish_all()

    assert (first.verdict["kind"], first.verdict["ranks"]) == ("missing", [1]), first.verdict
    assert "check-rendezvous" in first.verdict["fix"]
    assert first.verdict["confidence"] == "high"
    assert (first.status, first.report["job"]["status"]) == (124, "hung")
    assert (last.status != 0, last.named) == (True, first.named)


def isolate(hosts: Hosts, number: int) -> None:
    hosts.run(number, "nft", "add table inet dd; add chain inet dd in { type filter hook input priority 0; }; "
              "add chain inet dd out { type filter hook output priority 0; }; "
              "add rule inet dd in iif != lo drop; add rule inet dd out oif != lo drop")  # fmt: skip


def test_a_node_that_is_cut_off_while_it_trains(hosts, tmp_path):
    require("nft")
    job = Running(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    job.wait_until_nodes_know_each_other()
    isolate(hosts, 1)
    try:
        first, cut_off, other = job.finish_all()
    finally:
        hosts.run(1, "nft", "delete table inet dd")

    assert first.named == ("killed", [1], ["dd1"]), first.verdict
    assert "dd1 died or was cut off" in first.verdict["summary"]
    assert other.named == first.named
    # Of three nodes the one that reaches none of the others knows that it is itself.
    assert (cut_off.verdict["kind"], cut_off.verdict["hosts"]) == ("killed", ["dd1"]), cut_off.verdict
    assert "this node (dd1) is cut off: dd0 and dd2 do not respond" in cut_off.verdict["summary"]
    assert [member.status for member in (first, cut_off, other)] == [124, 124, 124]
