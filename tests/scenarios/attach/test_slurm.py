"""``attach --slurm`` under a real Slurm of two nodes, each with processes, a network and a name of its own."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.attach.running import SCRIPT, marked
from tests.scenarios.running import clean_environment, free_port, wait_for
from tests.scenarios.slurm import Slurm

pytestmark = pytest.mark.timeout(600)
HOSTS, OWN_PIDS = 2, True
RANKS = 4
BATCH = """#!/bin/bash
srun --distribution=cyclic {python} {script} plain {folder}
"""
"""Ranks 0 and 2 are on the first node, 1 and 3 on the second. Rank 1 is at fault."""


class HungJob:
    """A batch job that hangs."""

    def __init__(self, slurm: Slurm, number: str, folder: Path) -> None:
        self.slurm, self.number, self.folder = slurm, number, folder

    def field(self, name: str) -> str:
        words = self.slurm.run("scontrol", "show", "job", self.number, "--oneliner").stdout.split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def ends_well(self) -> bool:
        """Let it go on, and return whether it ends with status 0."""
        with (self.folder / "release").open("w"):
            pass
        return wait_for(lambda: self.field("JobState") == "COMPLETED") and self.field("ExitCode") == "0:0"


@contextlib.contextmanager
def hung(slurm: Slurm, name: str) -> Iterator[HungJob]:
    folder = slurm.folder / name
    folder.mkdir()
    os.mkfifo(folder / "release")
    script = folder / "batch"
    script.write_text(BATCH.format(python=sys.executable, script=SCRIPT, folder=folder))
    env = {**clean_environment(), "MASTER_ADDR": slurm.hosts.address(0), "MASTER_PORT": str(free_port())}
    number = slurm.run(
        "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--output=%j.txt", str(script), **env
    ).stdout.strip()
    job = HungJob(slurm, number, folder)
    try:
        assert wait_for(lambda: all((folder / f"at_{rank}").exists() for rank in range(RANKS))), (
            slurm.folder / f"{number}.txt"
        ).read_text()
        yield job
    finally:
        slurm.run("scancel", "--full", number, check=False)
        assert wait_for(lambda: not slurm.run("squeue", "-h", "-j", number, check=False).stdout)


def attach(slurm: Slurm, *options: str, before: tuple[str, ...] = (), **env: str) -> Any:
    command = [*before, sys.executable, "-m", "ddpdoctor", "attach", *options, "--folder", str(slurm.folder)]
    return subprocess.run(
        command, env=clean_environment(**{"SLURM_CONF": str(slurm.conf), **env}), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def judged(done: Any) -> dict[str, Any]:
    assert done.stdout, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def hung_job(slurm: Slurm) -> Iterator[HungJob]:
    with hung(slurm, "hung") as job:
        yield job


def test_all_nodes_are_judged_together_and_the_job_goes_on(slurm):
    with hung(slurm, "goes-on") as job:
        done = attach(slurm, "--slurm", job.number, "--format", "json")
        steps = slurm.run("squeue", "--steps", "-h", "-j", job.number, "-o", "%i").stdout.split()
        assert job.ends_well()

    report = judged(done)
    verdict = report["verdict"]
    assert (done.returncode, verdict["code"], verdict["ranks"], verdict["hosts"]) == (1, "DD601", [1], ["dd1"])
    assert (verdict["confidence"], f"attached.py:{marked('FAULT')}" in verdict["summary"]) == ("high", True)
    assert [(rank["rank"], rank["host"]) for rank in report["ranks"]] == [
        (0, "dd0"), (1, "dd1"), (2, "dd0"), (3, "dd1")
    ]  # fmt: skip
    # No step of ours is left in the job.
    assert steps == [f"{job.number}.0", f"{job.number}.batch"]


def test_a_node_that_is_not_reached_is_named_and_may_hold_the_cause(slurm, hung_job):
    slurm.hosts.ip(1, "link", "set", "eth0", "down")
    try:
        done = attach(slurm, "--slurm", hung_job.number, "--format", "json")
    finally:
        slurm.hosts.ip(1, "link", "set", "eth0", "up")
        slurm.hosts.ip(1, "route", "add", "default", "via", f"{slurm.hosts.subnet}.1")

    report = judged(done)
    evidence = report["data"]["evidence"]
    assert (done.returncode, report["verdict"]) == (4, None)
    assert (evidence["seen_ranks"], evidence["world_size"]) == ([0, 2], 4)
    assert [note for note in evidence["notes"] if note.startswith("dd1: ")]
    assert [step for step in evidence["collect"] if "scontrol show node dd1" in step]
    # It is back, and now its ranks are seen as well.
    assert wait_for(lambda: slurm.run("srun", "-w", "dd1", "--overlap", f"--jobid={hung_job.number}", "-N1", "-n1",
                                      "true", check=False).returncode == 0)  # fmt: skip
    assert judged(attach(slurm, "--slurm", hung_job.number, "--format", "json"))["verdict"]["ranks"] == [1]


def test_another_users_job(slurm, hung_job):
    as_nobody = ("setpriv", "--reuid=65534", "--clear-groups")
    done = attach(slurm, "--slurm", hung_job.number, before=as_nobody)
    assert (done.returncode, f"error: job {hung_job.number} belongs to root" in done.stderr) == (2, True)


def test_a_job_that_does_not_run(slurm):
    number = slurm.run("sbatch", "--parsable", "--hold", "--wrap=true").stdout.strip()
    waiting = attach(slurm, "--slurm", number)
    slurm.run("scancel", number)
    assert (waiting.returncode, f"job {number} is not running: it is PENDING" in waiting.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "env", "words"),
    [
        pytest.param(("--slurm", "999999"), {}, "Slurm does not know job 999999", id="no such job"),
        pytest.param(("--slurm", "1"), {"PATH": "/nowhere"}, "squeue is not on PATH", id="no Slurm here"),
        pytest.param(("--slurm", "1"), {"SLURM_CONF": "alone.conf"}, "Slurm does not answer", id="no controller"),
    ],
)
def test_what_is_asked_is_refused(slurm, options, env, words):
    if "SLURM_CONF" in env:
        alone = slurm.folder / env["SLURM_CONF"]
        alone.write_text(re.sub(r"(SlurmctldPort)=.*", rf"\1={free_port()}\nMessageTimeout=2", slurm.conf.read_text()))
        env = {"SLURM_CONF": str(alone)}
    done = attach(slurm, *options, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"ddpdoctor: error: {words}" in done.stderr
