"""Two hosts without a common folder: one report, drawn again offline; and one of each where the first dies."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.scenarios.hosts import Hosts, require
from tests.scenarios.running import JOBS, PATIENT, SCHEMA, clean_environment, free_port, wait_for

pytestmark = pytest.mark.usefixtures("preloaded_python")

DDPDOCTOR = (sys.executable, "-m", "ddpdoctor")
JOB = JOBS / "over_nodes.py"
LIMIT_S = 250
ENDLESS = 10**9


class Running:
    """A wrap of one rank on each of two hosts, each with a --report-dir of its own unless they share one."""

    def __init__(
        self, hosts: Hosts, folder: Path, *words: object, shares: bool = False, port: int = 0,
        torchrun: tuple[str, ...] = (), hang_timeout: tuple[str, ...] = ("--hang-timeout", "4", "--on-hang", "kill"),
    ) -> None:  # fmt: skip
        self.folders = [folder / ("shared" if shares else f"n{number}") for number in range(2)]
        self.begun = folder / "begun"
        port = port or free_port()
        self.processes = [
            hosts.start(
                number, *DDPDOCTOR, "wrap", "--nnodes", "2", "--node-rank", str(number), "--master-addr", "dd0",
                "--master-port", str(port), "--nproc-per-node", "1", *torchrun,
                *hang_timeout, "--debug-level", "OFF",
                "--report-dir", str(self.folders[number]), str(JOB), *map(str, words), str(self.begun),
                env=clean_environment(),
            )
            for number in range(2)
        ]  # fmt: skip

    def wait_until_it_trains(self) -> None:
        assert wait_for(lambda: all(Path(f"{self.begun}-{rank}").exists() for rank in range(2)), LIMIT_S)

    def finish(self, number: int) -> tuple[int, str, dict[str, Any]]:
        """Return status, stderr and report of one host."""
        _, stderr = self.processes[number].communicate(timeout=LIMIT_S)
        report = json.loads((self.folders[number] / ("node-1.json" if number else "report.json")).read_text())
        jsonschema.validate(report, SCHEMA)
        return self.processes[number].returncode, stderr, report


def test_a_rank_that_stands_still_on_the_other_host(hosts, tmp_path):
    job = Running(hosts, tmp_path, "stuck", 40)
    (status, shown, report), (other_status, other_shown, other) = job.finish(0), job.finish(1)
    assert (status, other_status) == (124, 124)
    assert (report["verdict"]["kind"], report["verdict"]["ranks"]) == ("stuck", [1])
    assert report["verdict"]["hosts"] == ["dd1"]
    assert (report["job"]["nnodes"], [row["host"] for row in report["ranks"]]) == (2, ["dd0", "dd1"])
    assert "DD601 stuck, rank 1 on dd1" in shown
    # The other host has its own ranks, the verdict on all, and says in a line where the rest is.
    assert other["verdict"] == report["verdict"]
    assert [row["rank"] for row in other["ranks"]] == [1]
    own_lines = [line for line in other_shown.splitlines() if line.startswith("ddpdoctor: ")]
    assert len(own_lines) == 1, own_lines
    assert f"dd0:{job.folders[0]}" in own_lines[0]
    assert not (job.folders[1] / "report.json").exists()

    # What the first gathered is all it takes to judge again, elsewhere.
    shutil.rmtree(job.folders[1])
    kept = job.folders[0].rename(tmp_path / "kept")
    (kept / "report.json").unlink()
    drawn = subprocess.run(
        [*DDPDOCTOR, "report", "--format", "json", str(kept)], check=False, capture_output=True, text=True,
        timeout=LIMIT_S, env=clean_environment(),
    )  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    again = json.loads(drawn.stdout)
    assert (again["verdict"]["kind"], again["verdict"]["hosts"]) == ("stuck", ["dd1"])
    assert [row["host"] for row in again["ranks"]] == ["dd0", "dd1"]


def test_two_healthy_hosts(hosts, tmp_path):
    job = Running(hosts, tmp_path, "nothing", 40, hang_timeout=PATIENT)
    (status, _, report), (other_status, other_shown, other) = job.finish(0), job.finish(1)
    assert (status, other_status) == (0, 0)
    assert (report["findings"], other["findings"]) == ([], [])
    assert [row["state"] for row in report["ranks"]] == ["exit status 0", "exit status 0"]
    assert "ddpdoctor:" not in other_shown


@pytest.mark.parametrize("shares", [True, False], ids=["a shared folder", "the job's store"])
def test_another_way_is_taken_where_the_port_is_closed(hosts, tmp_path, shares):
    require("nft")
    port = free_port()
    rule = "add table inet dd; add chain inet dd in { type filter hook input priority 0; }; "
    hosts.run(0, "nft", f"{rule}add rule inet dd in tcp dport {port + 1} drop")
    try:
        job = Running(hosts, tmp_path, "stuck", 40, shares=shares, port=port)
        (status, _, report), (other_status, other_shown, other) = job.finish(0), job.finish(1)
    finally:
        hosts.run(0, "nft", "delete table inet dd")
    assert (status, other_status) == (124, 124)
    assert (report["verdict"]["kind"], report["verdict"]["hosts"]) == ("stuck", ["dd1"])
    assert [row["host"] for row in report["ranks"]] == ["dd0", "dd1"]
    assert other["verdict"] == report["verdict"]
    assert f"dd0:{job.folders[0]}" in other_shown
