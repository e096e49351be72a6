"""Jobs over three hosts: whichever node reports, the culprit on another one is named, with its host."""

import json
import os
import signal
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
        torchrun=False,
        hang_timeout: tuple[str, ...] = IMPATIENT,
    ) -> None:
        self.folder, self.begun = folder / "run", folder / "begun"
        port = free_port()
        self.processes = {
            number: hosts.start(
                number,
                *WRAP,
                *(_torchrun(number, world, port) if torchrun else ()),
                *(*hang_timeout, "--report-dir", str(self.folder), "--debug-level", "OFF"),
                *(str(JOB), *map(str, words), str(self.begun)),
                env=clean_environment(**({} if torchrun else _as_rank(number, world, port))),
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


def _torchrun(number: int, world: int, port: int) -> tuple[str, ...]:
    where = ("--nnodes", str(world), "--node-rank", str(number), "--master-addr", "dd0", "--master-port", str(port))
    return (*where, "--nproc-per-node", "1")


def line_of(fault: str) -> list[int]:
    lines = JOB.read_text().splitlines()
    return [number for number, line in enumerate(lines, start=1) if line.endswith(f"# FAULT {fault}")]


FAULTS = {
    "stuck": (3, [1], 124),
    "mismatch": (3, [1], 124),
    "stopped": (2, [1], 124),
    "deadlock": (2, [0, 1], 124),
    "exit-hang": (2, [1], 0),
    "early-exit": (2, [1], 1),
    "crash": (3, [1], 1),
    "killed": (2, [1], 1),
    "straggler": (2, [1], 0),
}
"""By kind, which is also what the job is reported to do wrong: nodes, ranks to blame, exit status of the first."""
END = ("early-exit", "crash", "killed", "straggler")
"""After these a job ends by itself."""
MAY_BE_STOPPED = ("early-exit", "exit-hang")
"""After these the first rank ends by itself; on a busy machine it is not at its end when the job is stopped."""
NEVER_GO_ON = ("mismatch", "stopped", "deadlock")
"""These are stopped without being asked to."""


@pytest.mark.parametrize("kind", [*list(FAULTS)[:-1], pytest.param("straggler", marks=pytest.mark.nightly)])
def test_the_culprit_on_another_node_is_named(hosts, tmp_path, kind):
    world, blamed, status = FAULTS[kind]
    hang_timeout = PATIENT if kind in END else IMPATIENT[:2] if kind in NEVER_GO_ON else IMPATIENT
    first, *others = Running(hosts, tmp_path, kind, 40, world=world, hang_timeout=hang_timeout).finish_all()

    assert first.named == (kind, blamed, [f"dd{number}" for number in blamed]), first.verdict
    assert "on dd" in first.verdict["summary"]
    places = {place["line"] for place in first.verdict["where"]}
    assert not line_of(kind) or places & set(line_of(kind)), first.verdict
    assert first.status in {status, *((124,) if kind in MAY_BE_STOPPED else ())}, first.stderr
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


@pytest.mark.parametrize("torchrun", [False, True], ids=["ranks", "torchrun"])
def test_a_node_that_never_comes(hosts, tmp_path, torchrun):
    first, last = Running(hosts, tmp_path, "nothing", 40, absent=1, torchrun=torchrun).finish_all()

    assert (first.verdict["kind"], first.verdict["ranks"]) == ("missing", [1]), first.verdict
    assert "check-rendezvous" in first.verdict["fix"]
    assert first.verdict["confidence"] == "high"
    assert (first.status, first.report["job"]["status"]) == (124, "hung")
    assert (last.status != 0, last.named) == (True, first.named)


def test_a_first_node_that_never_comes(hosts, tmp_path):
    """Each of the others hears nothing, judges for itself, and says what it sees of the first."""
    members = Running(hosts, tmp_path, "nothing", 40, absent=0, torchrun=True).finish_all()
    for number, member in enumerate(members, start=1):
        assert member.named == ("missing", [0], ["dd0"]), member.verdict
        assert member.verdict["summary"].startswith(f"dd{number} cannot reach dd0:"), member.verdict
        assert any("Connection refused" in line or "refused" in line for line in member.verdict["evidence"])
        assert member.status == 124


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


def test_a_ddpdoctor_that_is_killed_takes_its_node_with_it(hosts, tmp_path):
    job = Running(hosts, tmp_path, "nothing", ENDLESS)
    job.wait_until_it_trains()
    os.kill(job.processes[1].pid, signal.SIGKILL)
    first, last = job.finish(0), job.finish(2)

    assert first.named == ("killed", [1], ["dd1"]), first.verdict
    assert last.named == first.named
    assert first.status not in (0, 2, 3)
    job.processes[1].communicate(timeout=LIMIT_S)


def test_healthy_nodes(hosts, tmp_path):
    members = Running(hosts, tmp_path, "nothing", 40, world=2, hang_timeout=PATIENT).finish_all()
    assert [(member.status, member.report["verdict"]) for member in members] == [(0, None)] * 2
