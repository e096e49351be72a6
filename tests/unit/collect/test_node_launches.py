"""Who a node is among others, by options, torchrun, Slurm and operators."""

import pytest

from ddpdoctor.collect.launch import effective_environment, read_node_launch
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import NodeOptions
from ddpdoctor.model.node import Launcher

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "5", "WORLD_SIZE": "8",
    "LOCAL_RANK": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500",
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[4-5]",
}  # fmt: skip


def read(env=None, **options):
    return read_node_launch(effective_environment(env or {}, NodeOptions(**options)))


def test_options():
    launch = read(nnodes="2", node_rank=1, master_addr="n0", master_port=29600)

    assert launch.launch.launcher is Launcher.NNODES
    assert (launch.settings.node_rank, launch.fewest, launch.most, launch.settings.endpoint) == (1, 2, 2, "n0:29600")
    assert (launch.host, launch.port, launch.launch.hosts, launch.launch.port) == ("n0", 29600, ("n0",), 29601)
    assert launch.by_number
    assert launch.own_screen


def test_options_overrule_what_they_stand_for():
    env = {"MASTER_ADDR": "old", "MASTER_PORT": "1", "PET_RDZV_ENDPOINT": "old:2", "NCCL_DEBUG": "INFO"}
    effective = effective_environment(env, NodeOptions(nnodes="2", node_rank=0, master_addr="n0"))
    assert effective == {"NCCL_DEBUG": "INFO", "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "n0"}


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("n0", "n0", 29400), ("n0:1234", "n0", 1234), ("[fd00::2]:1234", "fd00::2", 1234)],
)
def test_an_endpoint_needs_no_node_rank(endpoint, host, port):
    launch = read(nnodes="1:4", rdzv_endpoint=endpoint, rdzv_id="job")
    assert (launch.host, launch.port, launch.by_number, launch.settings.node_rank) == (host, port, False, None)
    assert (launch.fewest, launch.most, launch.settings.run_id) == (1, 4, "job")


@pytest.mark.parametrize(
    ("conf", "is_host"),
    [("is_host=1", True), ("timeout=9,is_host=False", False), ("timeout=9", None), ("is_host=perhaps", None)],
)
def test_a_setting_may_say_who_hosts(conf, is_host):
    assert read(nnodes="2", rdzv_endpoint="n0:1234", rdzv_conf=conf).is_host is is_host


def test_torchrun_has_started_us():
    launch = read(TORCHRUN)
    assert (launch.settings.node_rank, launch.most, launch.settings.world_size) == (1, 2, 8)
    assert (launch.launch.rank, launch.launch.world_size, launch.launch.reads_node) == (5, 8, False)
    assert (launch.launch.agent_store, launch.own_screen) == (True, False)


def test_a_slurm_step():
    launch = read(STEP)
    place = 31 * 7 + 2
    assert launch.hosts == ("n4", "n5")
    assert (launch.settings.node_rank, launch.most, launch.launch.world_size) == (1, 2, 4)
    assert (launch.host, launch.launch.port, launch.port) == ("n4", 16_384 + place, 28_672 + place)
    assert not launch.own_screen


def test_a_slurm_step_with_a_master_of_its_own():
    launch = read({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert (launch.host, launch.port) == ("head", 29500)
    # Where the master is wrong the first node of the step can be reached all the same.
    assert launch.launch.hosts == ("head", "n4")


def test_options_within_a_slurm_step_are_completed_by_it():
    launch = read({**STEP, "SLURM_LOCALID": "0"}, nnodes="2", master_port=29600)
    assert (launch.settings.node_rank, launch.host, launch.port, launch.own_screen) == (1, "n4", 29600, False)


def test_the_shell_of_a_batch_job_is_no_step():
    with pytest.raises(UserError, match="nothing says which nodes"):
        read({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB)})


def test_an_operator_that_numbers_pods():
    launch = read({"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"})
    assert launch.launch.launcher is Launcher.ENVIRONMENT
    assert (launch.settings.node_rank, launch.most, launch.port) == (2, 3, 23456)


def test_an_operator_that_speaks_to_torchrun():
    launch = read({
        "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_NNODES": "2", "PET_RDZV_ID": "j",
        "PET_NPROC_PER_NODE": "4",
    })  # fmt: skip
    assert (launch.host, launch.by_number, launch.settings.world_size) == ("job-worker-0", False, 8)


def test_ranks_of_one_host_are_one_node():
    env = {"MASTER_ADDR": "n0", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    launch = read(env)
    assert (launch.settings.node_rank, launch.most, launch.launch.reads_node) == (1, 2, False)


def test_the_port_of_our_own_can_be_chosen():
    assert read(nnodes="2", node_rank=0, master_addr="n0", exchange_port=4000).launch.port == 4000
    by_variable = read({"DDPDOCTOR_EXCHANGE_PORT": "4001"}, nnodes="2", node_rank=0, master_addr="n0")
    assert by_variable.launch.port == 4001
    highest = read(nnodes="2", node_rank=0, master_addr="n0", master_port=65535)
    assert highest.launch.port == 65534


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing says which nodes"),
        ({"node_rank": 1}, "--node-rank needs --nnodes"),
        ({"nnodes": "2"}, "needs --master-addr or --rdzv-endpoint"),
        ({"nnodes": "2", "master_addr": "n0"}, "needs --node-rank"),
        ({"nnodes": "two", "rdzv_endpoint": "n0"}, "not a number of nodes"),
        ({"nnodes": "4:2", "rdzv_endpoint": "n0"}, "not a number of nodes"),
        ({"nnodes": "2", "rdzv_endpoint": "n0:99999"}, "99999 is not a port"),
    ],
)
def test_what_is_not_enough(options, words):
    with pytest.raises(UserError, match=words):
        read(**options)
