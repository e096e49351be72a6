"""Which of a family of processes is the rank. These are real processes, without torch."""

import contextlib
import os
import shlex
import subprocess
import sys

import pytest

from ddpdoctor.attach.ranks import choose_ranks
from ddpdoctor.collect.proc import read_processes

OF_A_RANK = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
IN_A_STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}
WAITS = "print('here', flush=True); input()"
AS_RANK = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], env={**os.environ, 'RANK': '3', 'LOCAL_RANK': '0'})"  # noqa: E501


@contextlib.contextmanager
def family(command, env):
    """Run a command whose last descendant says that it is there; yield all of its processes."""
    began = subprocess.Popen(
        command, env={"PATH": os.environ["PATH"], **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert began.stdout.readline() == "here\n"
        processes = read_processes()
        mine = {began.pid}
        for pid in sorted(processes):
            mine |= {pid} if processes[pid].ppid in mine else set()
        yield [processes[pid] for pid in sorted(mine)], processes
    finally:
        began.communicate("\n")


def chosen_of(mine, processes):
    ours = {one.pid for one in mine}
    return [(one.process.pid, one.rank) for one in choose_ranks(processes) if one.process.pid in ours]


PYTHON = [sys.executable, "-c", WAITS]
IN_A_SHELL = ["bash", "-c", f"{shlex.join(PYTHON)}; true"]
A_WORKER = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WAITS!r}])"]


@pytest.mark.parametrize(
    ("command", "env", "place"),
    [
        pytest.param(PYTHON, OF_A_RANK, 0, id="a rank"),
        pytest.param(IN_A_SHELL, OF_A_RANK, 1, id="not the shell above it"),
        pytest.param(A_WORKER, OF_A_RANK, 0, id="not its worker"),
        pytest.param(
            [sys.executable, "-c", AS_RANK, WAITS], {**IN_A_STEP, "WORLD_SIZE": "8"}, 1, id="not its launcher"
        ),
    ],
)
def test_one_of_a_family_is_the_rank(command, env, place):
    with family(command, env) as (mine, processes):
        assert chosen_of(mine, processes) == [(mine[place].pid, 3)]


@pytest.mark.parametrize(
    ("command", "env"),
    [
        pytest.param(PYTHON, IN_A_STEP, id="a program without torch in a step of Slurm"),
        pytest.param(["bash", "-c", "echo here; read line"], OF_A_RANK, id="no Python"),
        pytest.param(PYTHON, {"WORLD_SIZE": "8"}, id="no rank number"),
    ],
)
def test_others_are_none(command, env):
    with family(command, env) as (mine, processes):
        assert chosen_of(mine, processes) == []
