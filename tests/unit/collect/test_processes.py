"""Which rank a process is, and where it stands."""

import os
import subprocess
import sys

import pytest

from ddpdoctor.collect.launch import read_identity, read_process
from ddpdoctor.collect.system import System
from tests.machines import RecordedCalls
from tests.scenarios.hosts import require

IDENTITY = (
    "from ddpdoctor.collect.launch import read_identity as r;"
    "from ddpdoctor.collect.system import System as S;"
    "i = r(S()); print(i.host, i.machine, i.container)"
)
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


def process_of(env, **known):
    return read_process(System(env=env, calls=RecordedCalls(answers={"cpus": "0-2"})), **known)


@pytest.mark.parametrize(
    ("env", "rank", "local_rank"),
    [
        ({}, None, None),
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5, 1),
        (STEP, 3, 1),
        ({**STEP, "RANK": "7", "LOCAL_RANK": "0"}, 7, 0),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}, None, None),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, 2, 0),
        ({**STEP, "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 6, 2),
        ({"PMI_RANK": "4"}, 4, None),
        ({"RANK": "two", "PMI_RANK": "4"}, 4, None),
    ],
)
def test_ranks(env, rank, local_rank):
    process = process_of(env)
    assert (process.rank, process.local_rank) == (rank, local_rank)


def test_what_the_launch_knows_fills_in():
    assert process_of({}, rank=1, local_rank=0).rank == 1
    assert process_of({"RANK": "6"}, rank=1, local_rank=0).rank == 6


def test_values_of_listed_variables_only():
    process = process_of({"NCCL_DEBUG": "INFO", "NCCL_DEBUGG": "secret", "AWS_SECRET_ACCESS_KEY": "x"})
    assert process.variables["NCCL_DEBUG"] == "INFO"
    assert process.other_names == ("NCCL_DEBUGG",)
    assert "secret" not in repr(process)
    assert "AWS" not in repr(process)


def test_this_process():
    process = read_process(System(env={"DDPDOCTOR_RUN": "/x"}))
    assert process.pid == os.getpid()
    assert process.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert process.under_wrap


def identity(*wrapper):
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", IDENTITY], check=True, capture_output=True, text=True, timeout=200
    )
    return done.stdout.split()


def test_processes_of_one_host_are_one_node():
    assert identity() == identity()


def test_a_container_with_a_network_of_its_own_is_another_node():
    require("unshare")
    assert identity("unshare", "--net")[1] != identity()[1]


def test_a_task_with_mounts_of_its_own_is_on_the_same_node():
    require("unshare")
    own, other = identity(), identity("unshare", "--mount")
    assert own[1] == other[1]
    assert own[2] != other[2]


def test_where_there_is_no_proc_the_name_has_to_do(tmp_path):
    mac = System(root=tmp_path, env={}, calls=RecordedCalls(answers={"hostname": "mac"}))
    assert read_identity(mac).machine == "mac//"
