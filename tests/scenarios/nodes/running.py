"""Runs a job of one rank a host under a ``wrap`` on each host, and reads what each has reported."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

from tests.scenarios.hosts import Hosts
from tests.scenarios.running import JOBS, SCHEMA, clean_environment, free_port, wait_for

DDPDOCTOR = (sys.executable, "-m", "ddpdoctor")
JOB = JOBS / "over_nodes.py"
IMPATIENT = ("--hang-timeout", "4", "--on-hang", "kill")
LIMIT_S = 250
ENDLESS = 10**9


@dataclass(frozen=True)
class Member:
    """What came of the wrap on one host."""

    status: int
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
    """One job: a wrap on each host, by torchrun's options or as ``ranks`` by variables.

    Each has a --report-dir of its own unless it ``shares`` one.
    """

    def __init__(
        self, hosts: Hosts, folder: Path, *words: object, world: int = 2, shares: bool = False, ranks: bool = False,
        port: int = 0, options: tuple[str, ...] = IMPATIENT,
    ) -> None:  # fmt: skip
        self.folders = [folder / ("shared" if shares else f"n{number}") for number in range(world)]
        self.begun = folder / "begun"
        port = port or free_port()

        def start(number: int) -> subprocess.Popen[str]:
            by_options = (
                "--nnodes", str(world), "--node-rank", str(number), "--master-addr", "dd0", "--master-port", str(port),
                "--nproc-per-node", "1",
            )  # fmt: skip
            as_rank = {"RANK": f"{number}", "WORLD_SIZE": f"{world}", "MASTER_ADDR": "dd0", "MASTER_PORT": f"{port}"}
            return hosts.start(
                number, *DDPDOCTOR, "wrap", *(() if ranks else by_options), *options, "--debug-level", "OFF",
                "--report-dir", str(self.folders[number]), str(JOB), *map(str, words), str(self.begun),
                env=clean_environment(**(as_rank if ranks else {})),
            )  # fmt: skip

        self.processes = list(map(start, range(world)))

    def wait_until_it_trains(self) -> None:
        ranks = [Path(f"{self.begun}-{number}") for number in range(len(self.processes))]
        assert wait_for(lambda: all(path.exists() for path in ranks), LIMIT_S)

    def wait_until_nodes_know_each_other(self) -> None:
        """Wait until each node has been heard for two more seconds: a beat a second brings it the list of nodes."""
        seen: list[list[int]] = []

        def knows() -> bool:
            path = self.folders[0] / "members.json"
            heard = [node["heard_ns"] for node in json.loads(path.read_text())["nodes"]] if path.exists() else []
            if len(heard) == len(self.processes) and None not in heard:
                seen.append(heard)
            return bool(seen) and min(seen[-1]) > max(seen[0]) + 2e9

        assert wait_for(knows), seen

    def finish(self) -> list[Member]:
        """Wait for all hosts."""
        ended = []
        for number, process in enumerate(self.processes):
            _, stderr = process.communicate(timeout=LIMIT_S)
            path = self.folders[number] / (f"node-{number}.json" if number else "report.json")
            assert path.exists(), stderr
            report = json.loads(path.read_text())
            jsonschema.validate(report, SCHEMA)
            ended.append(Member(process.returncode, stderr, report))
        return ended
