"""A launcher is seen by what it alone sets; variables that anybody may set are no launch."""

import pytest

from ddpdoctor.collect.launch import ByHand, seen_launch, seen_ranks
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher

ENV = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}
TORCHRUN = {
    **ENV, "TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_WORLD_SIZE": "2",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "1000", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[4-5]",
    "SLURM_JOB_NODELIST": "n[1-8]", "SLURM_NTASKS": "64",
}  # fmt: skip
SALLOC_SHELL = {
    "SLURM_JOB_ID": "3",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
}
BATCH_SHELL = {**SALLOC_SHELL, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}


def seen(env, **options):
    return seen_launch(env, ByHand(**options))


def test_torchrun():
    assert seen(TORCHRUN) == Launch(
        launcher=Launcher.TORCHRUN, rank=3, world_size=4, local_rank=1, nnodes=2, hosts=("n0",), port=29500,
        run="job7/2", agent_store=True,
    )  # fmt: skip
    assert not seen({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_a_slurm_step():
    assert seen(STEP) == Launch(
        launcher=Launcher.SLURM, rank=5, world_size=8, local_rank=1, nnodes=2, hosts=("n4",),
        port=16384 + (31 * 1000 + 2) % 12288, run="slurm 1000.2",
    )  # fmt: skip


def test_the_port_of_a_step_is_below_those_that_linux_hands_out():
    ports = {seen({**STEP, "SLURM_JOB_ID": str(job)}).port for job in range(0, 10**6, 997)}
    assert min(ports) >= 16384
    assert max(ports) < 32768
    assert seen(STEP).port != seen({**STEP, "SLURM_STEP_ID": "3"}).port


def test_of_a_step_the_masters_address_is_tried_first_and_the_first_host_too():
    assert seen({**STEP, "MASTER_ADDR": "localhost"}).hosts == ("localhost", "n4")
    assert seen({**STEP, "MASTER_ADDR": "n4"}).hosts == ("n4",)
    assert seen({**STEP, "SLURM_STEP_NODELIST": "n[4-"}).hosts == ("127.0.0.1",)


def test_a_step_on_one_host_needs_no_network():
    assert seen({**STEP, "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "n4"}).hosts == ("127.0.0.1",)


def test_torchrun_wins_within_a_step_and_over_the_options():
    assert seen({**STEP, **TORCHRUN}).launcher is Launcher.TORCHRUN
    assert seen(TORCHRUN, nnodes=2, node_rank=0, master_addr="x").launcher is Launcher.TORCHRUN


@pytest.mark.parametrize(
    "env",
    [
        {},
        ENV,
        SALLOC_SHELL,
        BATCH_SHELL,
        {**BATCH_SHELL, "SLURM_STEP_ID": "4294967291"},
        {**STEP, "SLURM_STEP_ID": "4294967290"},
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {**STEP, "SLURM_PROCID": "8"},
        {**TORCHRUN, "RANK": "-1"},
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "WORLD_SIZE": "four"},
        {**TORCHRUN, "MASTER_ADDR": ""},
    ],
)
def test_no_launcher(env):
    assert seen(env) == Launch()
    assert not seen(env).gathers


def test_one_process_alone_gathers_nothing():
    alone = seen({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"})
    assert alone.launcher is Launcher.TORCHRUN
    assert not alone.gathers


def test_by_hand():
    assert seen({}, nnodes=2, node_rank=1, master_addr="n0", master_port=1234) == Launch(
        launcher=Launcher.NNODES, rank=1, world_size=2, local_rank=0, nnodes=2, hosts=("n0",), port=1234, run="nnodes 2"
    )
    assert seen({}, nnodes=2, node_rank=1, master_addr="n0").port == 29500
    assert seen(ENV, nnodes=2, node_rank=1).hosts == ("n0",)
    assert seen(ENV, nnodes=1) == Launch()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 2}, "--nnodes needs --node-rank and --master-addr"),
        ({"nnodes": 2, "node_rank": 0}, "--nnodes needs --node-rank and --master-addr"),
        ({"nnodes": 2, "master_addr": "x"}, "--nnodes needs --node-rank and --master-addr"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "x"}, "--node-rank 2 is not below --nnodes 2"),
        ({"node_rank": 0}, "--node-rank needs --nnodes"),
    ],
)
def test_options_that_do_not_go_together(options, words):
    with pytest.raises(UserError, match=words) as error:
        seen({}, **options)
    assert error.value.status == 2


OWN = {**ENV, "MASTER_ADDR": "127.0.0.1", "DDPDOCTOR_RANKS": "4711"}


def test_a_program_that_the_job_runs_takes_its_rank_from_whoever_set_it():
    assert seen_ranks(ENV) == Launch(
        launcher=Launcher.ENVIRONMENT, rank=3, world_size=4, local_rank=1, nnodes=None, hosts=("n0",), port=29500,
        run="n0:29500",
    )  # fmt: skip
    assert seen_ranks(OWN) == Launch(
        launcher=Launcher.OWN, rank=3, world_size=4, local_rank=1, nnodes=1, hosts=("127.0.0.1",), port=29500,
        run="4711", agent_store=True,
    )  # fmt: skip
    assert seen_ranks(TORCHRUN) == seen(TORCHRUN)
    assert seen_ranks(STEP) == seen(STEP)
    assert seen_ranks({**STEP, **ENV}).launcher is Launcher.ENVIRONMENT
    assert seen_ranks({}) == seen_ranks(BATCH_SHELL) == Launch(nnodes=1, hosts=("127.0.0.1",))


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_rank_that_does_not_know_all_is_none(missing):
    env = {name: value for name, value in OWN.items() if name != missing}
    assert seen_ranks(env).launcher is Launcher.NONE


@pytest.mark.parametrize(
    ("more", "local_rank"),
    [
        ({}, 3),
        ({"LOCAL_RANK": "1"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({**BATCH_SHELL}, 3),
        ({**STEP}, 1),
        ({"MASTER_ADDR": "n0"}, None),
    ],
)
def test_on_one_host_the_rank_is_the_number_on_the_host_unless_it_is_given(more, local_rank):
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **more}
    assert seen_ranks(env).local_rank == local_rank
