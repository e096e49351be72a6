"""The sbatch scripts of docs/examples under a real Slurm: ranks by torchrun and by Slurm, a hang, signals, requeue."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.scenarios.running import SCHEMA, wait_for, words_of
from tests.scenarios.slurm import Slurm

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
BY_TORCHRUN = EXAMPLES / "slurm-torchrun.sbatch"
BY_SLURM = EXAMPLES / "slurm-task-per-rank.sbatch"
# Nodes of the lab have four cores and no GPU. On a busy machine the ranks of a job take long to come.
LAB = ("--cpus-per-task=1", "--gpus-per-node=0", "--time=10", "--output=%j.txt")
LIMIT_S = 400
pytestmark = pytest.mark.timeout(600)
HOSTS = 3


class Job:
    """A batch job and what it leaves."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self.slurm, self.number = slurm, number
        self.folder = slurm.folder / "ddpdoctor-report" / number

    @property
    def said(self) -> str:
        file = self.slurm.folder / f"{self.number}.txt"
        return file.read_text() if file.exists() else ""

    def state(self) -> str:
        return self.slurm.run("squeue", "-h", "-j", self.number, "-o", "%T", check=False).stdout.strip()

    def change(self, setting: str) -> None:
        """Change a setting of the job. Slurm refuses that for a moment while the job's state changes."""
        command = ("scontrol", "update", f"jobid={self.number}", setting)
        assert wait_for(lambda: self.slurm.run(*command, check=False).returncode == 0, LIMIT_S), self.said

    def wait_for_step(self, count: int = 1) -> None:
        """Wait until rank 0 has trained a step, in its so many-th start."""
        assert wait_for(lambda: self.said.count("\nstep") >= count, LIMIT_S), self.said

    def end(self) -> None:
        assert wait_for(lambda: self.state() == "", LIMIT_S), self.said

    def report(self, file: str = "report.json") -> dict[str, Any]:
        path = self.folder / file
        assert path.exists(), self.said
        report = json.loads(path.read_text())
        jsonschema.validate(report, SCHEMA)
        return dict(report)


@contextmanager
def submitted(
    slurm: Slurm, script: Path, *options: str, job: str, args: tuple[str, ...] = (), **env: str
) -> Iterator[Job]:
    """Submit an example script for a job of ``jobs``."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    drop = {name: "" for name in os.environ if name.startswith(("DDPDOCTOR_", "SLURM_", "MASTER_", "PET_"))}
    words = ("--parsable", *LAB, *options, str(script), *words_of(job), *args)
    done = slurm.run("sbatch", *words, **drop, PATH=path, **env)
    running = Job(slurm, done.stdout.strip())
    try:
        yield running
    finally:
        slurm.run("scancel", "--signal=KILL", "--full", running.number, check=False)
        slurm.run("scancel", running.number, check=False)
        running.end()


def hosts_of(report: dict[str, Any]) -> list[str]:
    return [rank["host"] for rank in report["ranks"]]


def test_one_task_a_node_starts_torchrun(slurm):
    with submitted(slurm, BY_TORCHRUN, job="over_nodes", args=("nothing", "20")) as job:
        job.end()
        report = job.report()

    assert (report["job"]["status"], report["job"]["exit_status"]) == ("finished", 0), job.said
    assert (report["job"]["nnodes"], report["job"]["world_size"]) == (2, 4)
    assert hosts_of(report) == ["dd0", "dd0", "dd1", "dd1"]
    assert report["findings"] == []
    # Each node has its own report, and the job one.
    assert job.report("node-1.json")["job"]["status"] == "finished"
    assert job.said.count("ddpdoctor: no problem found\n") == 1


def test_a_hang_of_tasks_that_are_ranks(slurm):
    env = {"DDPDOCTOR_HANG_TIMEOUT": "4", "DDPDOCTOR_ON_HANG": "kill"}
    with submitted(slurm, BY_SLURM, "--ntasks-per-node=2", job="stuck_before_init", **env) as job:
        job.end()
        report = job.report()

    assert report["job"]["status"] == "hung", job.said
    assert (report["job"]["nnodes"], report["job"]["world_size"]) == (2, 4)
    assert hosts_of(report) == ["dd0", "dd0", "dd1", "dd1"]
    verdict = report["verdict"]
    assert (verdict["kind"], verdict["ranks"], verdict["hosts"]) == ("stuck", [1], ["dd0"])
    assert {job.report(f"node-{number}.json")["verdict"]["kind"] for number in (1, 2, 3)} == {"stuck"}
    assert job.said.count("Exited with exit code 124") >= 1


def test_tasks_that_are_ranks_and_a_signal_that_the_script_minds(slurm):
    """SIGUSR1 is what --signal sends before a time limit; then the job ends by itself, well."""
    with submitted(slurm, BY_SLURM, "--ntasks-per-node=2", "--nodes=1", job="until_warned") as job:
        job.wait_for_step()
        slurm.run("scancel", "--signal=USR1", f"{job.number}.0")
        job.end()
        report = job.report()

    assert (report["job"]["status"], report["findings"]) == ("finished", []), job.said
    assert "ended by SIGUSR1" in job.said


def test_scancel(slurm):
    with submitted(slurm, BY_TORCHRUN, job="endless") as job:
        job.wait_for_step()
        slurm.run("scancel", job.number)
        job.end()
        report = job.report()

    assert report["job"]["status"] == "interrupted", job.said
    assert report["findings"] == []
    assert hosts_of(report) == ["dd0", "dd0", "dd1", "dd1"]
    # What each rank was at was saved within the grace.
    assert all("life.py" in json.dumps(rank) for rank in report["ranks"])
    assert job.report("node-1.json")["job"]["status"] == "interrupted"


def test_a_requeue_and_then_the_time_limit(slurm):
    with submitted(slurm, BY_SLURM, "--ntasks-per-node=2", "--nodes=1", job="endless") as job:
        job.wait_for_step()
        steps = job.said.count("\nstep")
        slurm.run("scontrol", "requeue", job.number)
        assert wait_for(lambda: job.state() == "PENDING", LIMIT_S), job.said
        assert job.report()["job"]["status"] == "interrupted"
        before = (job.folder / "report.json").read_text()
        # Slurm would hold it back for two minutes.
        job.change("StartTime=now")
        assert wait_for((job.folder / "restart-1" / "run.json").exists, LIMIT_S), job.said
        job.wait_for_step(steps + 1)
        job.change("EndTime=now")
        job.end()

    assert "DUE TO TIME LIMIT" in job.said
    assert job.report("restart-1/report.json")["job"]["status"] == "interrupted", job.said
    assert (job.folder / "report.json").read_text() == before
