"""Whose a word of the command line is, and where a wrap stands in its job by it."""

from dataclasses import replace

import pytest

from ddpdoctor.collect.launch import EXCHANGE_PORTS, seen_launch
from ddpdoctor.exchange.wire import job_token
from ddpdoctor.launch.command_line import TORCHRUN_OPTIONS, ask_torchrun, split_command
from ddpdoctor.launch.placement import is_own_host, place
from tests.golden import words

# Splitting a command line: whose is which word.


OWN = {"--hang-timeout": True, "--on-hang": True, "--quiet": False, "--help": False}
NEWER = {"--brand-new": True, "--new-flag": False}


def refuse_to_ask():
    raise AssertionError("torchrun was asked about an option that is in the table")


def split(line, ask=refuse_to_ask):
    return split_command(line.split(), OWN, ask)


@pytest.mark.full
def test_the_table_agrees_with_the_installed_torchrun():
    pytest.importorskip("torch")
    asked = {name: takes for name, takes in ask_torchrun().items() if name not in {"-h", "--help"}}
    assert {name: TORCHRUN_OPTIONS.get(name) for name in asked} == asked


# Where a ``wrap`` stands in its job, by torchrun's options, a Slurm step, or an operator's variables.


OPERATOR = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
PET = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": "n2",
}  # fmt: skip
"""Variables of task 1 of a step with one task on each of two nodes, as Slurm 22.05 sets them."""
RANKS = STEP | {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}  # fmt: skip
"""Variables of task 9 of 16 on two nodes."""
ENVIRONMENTS = {"OPERATOR": OPERATOR, "PET": PET, "STEP": STEP, "RANKS": RANKS}


def placed(row):
    """A row has the command line and its environment: names of those above, values, and what is not set ("-NAME")."""
    line, _, variables = row.partition(" | ")
    env = {}
    for word in variables.split():
        name, has_value, value = word.partition("=")
        env |= {name: value} if has_value else ENVIRONMENTS.get(name, {})
        env.pop(name.removeprefix("-") if name.startswith("-") else "", None)
    port = env.pop("EXCHANGE_PORT", None)
    return place(split_command(line.split(), {}), env, port and int(port))


def without_token(row):
    found = placed(row)
    assert found.token is None or repr(found.token) not in repr(found)
    return [replace(found, token=None), f"a token: {found.token is not None}"]


test_words = words(__name__, split=split, split_newer=lambda line: split(line, lambda: NEWER), placed=without_token)


def test_a_node_where_the_store_is_to_be_is_the_first() -> None:
    line = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {}:29400 t.py"
    # 192.0.2.0/24 is for documentation: no host has an address in it.
    assert placed(line.format("192.0.2.1")).number is None
    assert not is_own_host("192.0.2.1", 29400)
    assert not is_own_host("no-such-host.invalid", 29400)
    assert is_own_host("127.0.0.1", 29400)
    here = placed(line.format("127.0.0.1"))
    assert here.one_host
    assert here.number is None


def test_a_step_meets_where_all_verbs_of_it_do_with_one_token() -> None:
    found, launch = placed("t.py | STEP"), seen_launch(STEP)
    assert (found.port, found.hosts) == (launch.port, launch.hosts)
    assert found.token == job_token(launch, {})
    first, count = EXCHANGE_PORTS
    assert first <= found.port < first + count
