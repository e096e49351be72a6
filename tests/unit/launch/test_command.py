"""Whose a word of the command line is, and where a wrap stands in its job by it."""

from typing import Any

import pytest

from ddpdoctor.collect.launch import EXCHANGE_PORTS, ByHand, seen_launch
from ddpdoctor.exchange.wire import job_token
from ddpdoctor.launch.command_line import TORCHRUN_OPTIONS, SplitCommand, ask_torchrun, split_command
from ddpdoctor.launch.placement import Placement, Style, is_own_host, number_first, place
from ddpdoctor.model.errors import UserError

# Splitting a command line: whose is which word.


OWN = {"--hang-timeout": True, "--on-hang": True, "--quiet": False, "--help": False}


def refuse_to_ask():
    raise AssertionError("torchrun was asked about an option that is in the table")


def split(line, ask=refuse_to_ask):
    return split_command(line.split(), OWN, ask)


def expect(script, *, own="", torchrun="", args="", is_module=False, no_python=False, is_command=False):
    return SplitCommand(
        own=tuple(own.split()),
        torchrun=tuple(torchrun.split()),
        script=script,
        is_module=is_module,
        no_python=no_python,
        script_args=tuple(args.split()),
        is_command=is_command,
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train.py", expect("train.py")),
        ("train.py --epochs 10 pos", expect("train.py", args="--epochs 10 pos")),
        ("train.py --help", expect("train.py", args="--help")),
        ("train.py --quiet --tee 3", expect("train.py", args="--quiet --tee 3")),
        ("train.py -- --x", expect("train.py", args="-- --x")),
        ("--quiet train.py", expect("train.py", own="--quiet")),
        ("--hang-timeout 8 train.py", expect("train.py", own="--hang-timeout 8")),
        ("--hang-timeout=8 train.py", expect("train.py", own="--hang-timeout=8")),
        ("--hang_timeout 8 train.py", expect("train.py", own="--hang-timeout 8")),
        ("--hang_timeout=a_b train.py", expect("train.py", own="--hang-timeout=a_b")),
        ("--nproc-per-node 4 train.py", expect("train.py", torchrun="--nproc-per-node 4")),
        ("--nproc_per_node 4 train.py", expect("train.py", torchrun="--nproc_per_node 4")),
        ("--nproc_per_node=4 train.py", expect("train.py", torchrun="--nproc_per_node=4")),
        ("--standalone train.py --standalone", expect("train.py", torchrun="--standalone", args="--standalone")),
        ("-r 3 -t 0:1,1:2 train.py", expect("train.py", torchrun="-r 3 -t 0:1,1:2")),
        ("-r3 -t=3 train.py", expect("train.py", torchrun="-r3 -t=3")),
        ("--role -x train.py", expect("train.py", torchrun="--role -x")),
        ("-m pkg.train --lr 0.1", expect("pkg.train", is_module=True, args="--lr 0.1")),
        ("--module pkg.train -m", expect("pkg.train", is_module=True, args="-m")),
        (
            "--nnodes 2 -m --quiet --tee 3 pkg",
            expect("pkg", is_module=True, own="--quiet", torchrun="--nnodes 2 --tee 3"),
        ),
        ("--no_python ./run.sh a", expect("./run.sh", no_python=True, args="a")),
        ("-- torchrun --tee 3 t.py", expect("torchrun", args="--tee 3 t.py", is_command=True)),
        ("--quiet -- -odd --x", expect("-odd", own="--quiet", args="--x", is_command=True)),
        ("--hang-timeout 8 -- make -- x", expect("make", own="--hang-timeout 8", args="-- x", is_command=True)),
        ("--nproc 4 t.py", expect("t.py", torchrun="--nproc-per-node 4")),
        ("--nproc_per=4 t.py", expect("t.py", torchrun="--nproc-per-node=4")),
        ("--max-rest 1 --mod pkg", expect("pkg", torchrun="--max-restarts 1", is_module=True)),
        ("--hang 8 t.py", expect("t.py", own="--hang-timeout 8")),
        ("- x", expect("-", args="x")),
        ("--help", expect("", own="--help")),
        ("--tee 3 -h train.py", expect("", own="--help", torchrun="--tee 3")),
        ("--rdzv-conf a=1,b=2 t.py", expect("t.py", torchrun="--rdzv-conf a=1,b=2")),
    ],
)
def test_every_word_goes_to_its_owner(line, expected):
    assert split(line) == expected


@pytest.mark.parametrize("line", ["", "--quiet", "--tee 3", "-m"])
def test_a_missing_script_is_an_error(line):
    with pytest.raises(UserError, match="no script"):
        split(line)


def test_a_missing_command_is_an_error():
    with pytest.raises(UserError, match="no command"):
        split("--quiet --")


@pytest.mark.parametrize("line", ["--tee 3 -- torchrun t.py", "-m -- pkg", "--no-python -- ./run.sh"])
def test_torchruns_options_before_a_command_are_an_error(line):
    with pytest.raises(UserError, match="is an option of torchrun") as error:
        split(line)
    assert error.value.status == 2


@pytest.mark.parametrize(("line", "meant"), [("--r 3 t.py", "--rdzv-backend"), ("--on t.py", "--on-hang needs")])
def test_an_abbreviation_that_could_be_two_options_names_them(line, meant):
    with pytest.raises(UserError, match=meant):
        split_command(line.split()[:1], OWN, refuse_to_ask)


@pytest.mark.parametrize("line", ["--hang-timeout", "--nnodes", "-r"])
def test_a_missing_value_is_an_error_that_names_the_option(line):
    with pytest.raises(UserError, match=f"{line} needs a value"):
        split(line)


@pytest.mark.parametrize("line", ["--quiet=1 t.py", "--standalone=1 t.py", "-mpkg"])
def test_a_value_for_a_flag_is_an_error(line):
    with pytest.raises(UserError, match="takes no value"):
        split(line)


def test_an_option_of_a_newer_torchrun_is_asked_for_its_arity():
    newer = {"--brand-new": True, "--new-flag": False}
    found = split("--brand_new 1 --new-flag train.py x", ask=lambda: newer)
    assert found == expect("train.py", torchrun="--brand_new 1 --new-flag", args="x")


def test_an_option_that_nobody_knows_is_named_as_it_was_typed():
    with pytest.raises(UserError, match="--bogus_thing") as error:
        split("--bogus_thing=2 train.py", ask=dict)
    assert error.value.status == 2


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


def step(**more: str) -> dict[str, str]:
    """Return the variables of task 1 of a step with one task on each of two nodes, as Slurm 22.05 sets them."""
    return {
        "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURMD_NODENAME": "n2", **more,
    }  # fmt: skip


def ranks_step(**more: str) -> dict[str, str]:
    """Return the variables of task 9 of 16 on two nodes."""
    many = {
        "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    }  # fmt: skip
    return step(**many | more)


def placed(line: str, env: dict[str, str], port: int | None = None) -> Placement:
    return place(split_command(line.split(), {}), env, port)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("train.py", {}),
        ("--nproc-per-node 8 train.py", {}),
        ("-- python train.py", {}),
        ("--standalone train.py", step()),
        ("--nnodes 1 --nproc-per-node 8 train.py", step()),
        ("--nnodes=1:1 train.py", step()),
        ("train.py", step() | {"PET_STANDALONE": "1"}),
        ("train.py", OPERATOR | {"WORLD_SIZE": "1", "RANK": "0"}),
        ("train.py", OPERATOR | {"RANK": "4"}),
        ("train.py", {name: value for name, value in OPERATOR.items() if name != "MASTER_PORT"}),
        ("--nproc-per-node 2 train.py", OPERATOR),
        ("train.py", OPERATOR | {"PET_NPROC_PER_NODE": "2"}),
        ("-- torchrun --standalone train.py", PET),
        ("-- torchrun --no-such-option train.py", {}),
        ("train.py", step(SLURM_NTASKS="1", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")),
        ("train.py", step(SLURM_STEP_ID="4294967291")),
        ("--nnodes two train.py", {}),
    ],
)
def test_a_job_of_one_node_is_alone(line: str, env: dict[str, str]) -> None:
    found = placed(line, env, 4321)
    assert found.alone
    assert (found.torchrun_args, found.variables, found.hosts, found.port) == ((), (), (), 0)


@pytest.mark.parametrize(
    ("line", "env", "seen"),
    [
        ("--nnodes 2 --node-rank 1 --master-addr a t.py", {}, (1, 2, 2, ("a",), 29501)),
        ("--nnodes=2 --node_rank=0 --master_addr=a --master_port=500 t.py", {}, (0, 2, 2, ("a",), 501)),
        ("--nnodes 2 --master-addr a t.py", {}, (0, 2, 2, ("a",), 29501)),
        ("--nnodes 2 --node-rank 1 --rdzv-endpoint a:600 t.py", {}, (1, 2, 2, ("a",), 601)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:600 t.py", {}, (None, 2, 2, ("a",), 601)),
        ("--nnodes 1:3 --rdzv-backend c10d --rdzv-endpoint a t.py", {}, (None, 1, 3, ("a",), 29401)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint [fe::1]:600 t.py", {}, (None, 2, 2, ("fe::1",), 601)),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:65535 t.py", {}, (None, 2, 2, ("a",), 65534)),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint etcd:2379 t.py", {}, (None, 2, 2, (), 0)),
        ("t.py", PET, (1, 2, 2, ("job-master-0",), 23457)),
        ("--node-rank 0 t.py", PET, (0, 2, 2, ("job-master-0",), 23457)),
        ("t.py", PET | OPERATOR, (1, 2, 2, ("job-master-0",), 23457)),
        ("-- torchrun --nnodes 2 --node-rank 1 --master-addr a t.py", {}, (1, 2, 2, ("a",), 29501)),
        ("-- python3 -m torch.distributed.run --nnodes 2 --master-addr a t.py", {}, (0, 2, 2, ("a",), 29501)),
        ("-- accelerate launch t.py", PET, (1, 2, 2, ("job-master-0",), 23457)),
    ],
)
def test_a_node_of_torchruns(line: str, env: dict[str, str], seen: tuple[Any, ...]) -> None:
    found = placed(line, env)
    assert (found.number, found.expected, found.most, found.hosts, found.port) == seen
    assert found.style is (Style.COMMAND if line.startswith("-- ") else Style.TORCHRUN)
    assert not found.alone
    assert not found.of_ranks
    assert (found.torchrun_args, found.variables, found.token) == ((), (), None)


def test_an_exchange_port_of_the_users_holds_and_a_token_of_theirs_too() -> None:
    env = {"DDPDOCTOR_TOKEN": "secret"}
    found = placed("--nnodes 2 --master-addr a t.py", env, 4321)
    assert found.port == 4321
    assert found.token is not None
    assert repr(found.token) not in repr(found)


def test_a_node_where_the_store_is_to_be_is_the_first() -> None:
    line = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {}:29400 t.py"
    # 192.0.2.0/24 is for documentation: no host has an address in it.
    assert number_first(placed(line.format("192.0.2.1"), {})).number is None
    assert not is_own_host("192.0.2.1", 29400)
    assert not is_own_host("no-such-host.invalid", 29400)
    assert is_own_host("127.0.0.1", 29400)
    here = placed(line.format("127.0.0.1"), {})
    assert here.one_host
    assert number_first(here).number is None


@pytest.mark.parametrize("line", ["train.py", "--nproc-per-node 8 train.py", "--nproc-per-node=8 -m pkg.train"])
def test_one_task_a_node_starts_torchrun_with_what_slurm_knows(line: str) -> None:
    found = placed(line, step())
    assert (found.style, found.number, found.expected, found.most) == (Style.TORCHRUN, 1, 2, 2)
    assert found.torchrun_args == (
        "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=slurm-12.0-0", "--rdzv-endpoint=n1:29044",
        "--rdzv-conf=is_host=0",
    )  # fmt: skip
    assert found.store == ("n1", 29044)
    assert (found.hosts, found.names, found.one_host) == (("n1",), ("n1", "n2"), False)
    assert found.port != 29044
    assert (found.batch_job, found.of_ranks, found.variables) == ("12.0", False, ())


def test_the_first_task_serves_the_store() -> None:
    assert "--rdzv-conf=is_host=1" in placed("t.py", step(SLURM_PROCID="0")).torchrun_args


@pytest.mark.parametrize(
    ("line", "env", "added"),
    [
        ("--nnodes 2 t.py", {}, ("c10d", "slurm-12.0-0", "n1:29044", "is_host=0")),
        ("--nnodes 1:2 --rdzv-id x t.py", {}, ("c10d", "n1:29044", "is_host=0")),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint b:1 t.py", {}, ("slurm-12.0-0",)),
        ("--nnodes 2 --rdzv-backend c10d t.py", {}, ("slurm-12.0-0", "n1:29044", "is_host=0")),
        ("--nnodes 2 --rdzv-conf timeout=9 t.py", {}, ("c10d", "slurm-12.0-0", "n1:29044")),
        ("--nnodes 2 --master-addr b t.py", {}, ("1", "29044")),
        ("--nnodes 2 --rdzv-backend static t.py", {}, ("1", "n1", "29044")),
        ("--nnodes 2 --rdzv-endpoint b:1 t.py", {}, ("1",)),
        ("--nnodes 2 --node-rank 0 --master-addr b --master-port 5 t.py", {}, ()),
        ("--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint e:1 t.py", {}, ()),
        # Where the job's script says where the store is to be, torch finds out by itself who serves it.
        ("--nnodes 2 t.py", {"MASTER_ADDR": "ib1", "MASTER_PORT": "7"}, ("c10d", "slurm-12.0-0", "ib1:7")),
        ("--nnodes 2 t.py", {"MASTER_ADDR": "localhost"}, ("c10d", "slurm-12.0-0", "n1:29044", "is_host=0")),
        ("--nnodes 2 t.py", {"SLURM_RESTART_COUNT": "3"}, ("c10d", "slurm-12.0-3", "n1:29044", "is_host=0")),
    ],
)
def test_what_the_user_set_for_torchrun_is_left_alone(line: str, env: dict[str, str], added: tuple[str, ...]) -> None:
    found = placed(line, step(**env))
    assert tuple(one.partition("=")[2] for one in found.torchrun_args) == added
    assert found.number == 1


def test_several_tasks_a_node_become_ranks() -> None:
    found = placed("train.py --lr 1", ranks_step())
    assert (found.style, found.number, found.expected, found.of_ranks) == (Style.RANK, 9, 16, True)
    assert dict(found.variables) == {
        "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "NODE_RANK": "1",
        "MASTER_ADDR": "n1", "MASTER_PORT": "29044",
    }  # fmt: skip
    assert found.names == ("n1",) * 8 + ("n2",) * 8
    assert found.note is None
    reported = placed("train.py", ranks_step(SLURM_PROCID="0", SLURM_NODEID="0", SLURMD_NODENAME="n1")).note
    assert reported is not None
    assert "16 Slurm tasks on 2 nodes" in reported


def test_tasks_that_are_dealt_out_in_turn_have_no_known_hosts() -> None:
    assert placed("t.py", ranks_step(SLURM_DISTRIBUTION="cyclic")).names == ()
    assert placed("t.py", ranks_step(SLURMD_NODENAME="n1")).names == ()
    assert placed("t.py", ranks_step(SLURM_STEP_NODELIST="n[1-")).names == ()


def test_uneven_tasks_know_how_many_are_beside_them() -> None:
    env = ranks_step(SLURM_NTASKS="11", SLURM_STEP_NUM_TASKS="11", SLURM_STEP_TASKS_PER_NODE="8,3")
    assert dict(placed("t.py", env).variables)["LOCAL_WORLD_SIZE"] == "3"


def test_a_rank_that_the_jobs_script_has_chosen_stays() -> None:
    own = {"RANK": "4", "WORLD_SIZE": "16", "MASTER_ADDR": "b", "MASTER_PORT": "5"}
    variables = dict(placed("t.py", ranks_step(**own)).variables)
    assert {name: variables[name] for name in own} == own
    stale = dict(placed("t.py", ranks_step(RANK="0", WORLD_SIZE="1")).variables)
    assert (stale["RANK"], stale["WORLD_SIZE"]) == ("9", "16")


def test_tasks_of_one_node_meet_there() -> None:
    env = ranks_step(SLURM_NNODES="1", SLURM_STEP_NUM_NODES="1", SLURM_STEP_NODELIST="n1",
                     SLURM_STEP_TASKS_PER_NODE="16", SLURM_NODEID="0", SLURMD_NODENAME="n1")  # fmt: skip
    found = placed("t.py", env)
    assert (found.hosts, found.one_host, dict(found.variables)["MASTER_ADDR"]) == (("127.0.0.1",), True, "127.0.0.1")


@pytest.mark.parametrize(
    ("line", "env", "named"),
    [
        ("--nproc-per-node 8 t.py", {}, "--nproc-per-node"),
        ("--max-restarts=3 t.py", {}, "--max-restarts"),
        ("--nnodes 2 --nproc-per-node 8 t.py", {}, "--nnodes"),
        ("t.py", {"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE"),
    ],
)
def test_a_torchrun_in_each_of_several_tasks_a_node_is_refused(line: str, env: dict[str, str], named: str) -> None:
    with pytest.raises(UserError) as reported:
        placed(line, ranks_step(**env))
    assert f"16 tasks on 2 nodes, and {named} makes each" in reported.value.message
    assert "--ntasks-per-node=1" in str(reported.value.help)


def test_a_torchrun_a_task_where_the_user_counts_them_so() -> None:
    found = placed("--nnodes 16 --nproc-per-node 1 t.py", ranks_step())
    assert (found.style, found.expected, found.of_ranks) == (Style.TORCHRUN, 16, False)


def test_a_command_in_a_step_is_run_as_it_stands() -> None:
    found = placed("-- python train.py", ranks_step(**OPERATOR))
    assert (found.style, found.number, found.expected, found.of_ranks) == (Style.COMMAND, 9, 16, True)
    assert (found.variables, found.torchrun_args, found.note) == ((), (), None)


def test_nodes_that_the_step_does_not_have_are_reported() -> None:
    note = placed("--nnodes 3 t.py", step(SLURM_PROCID="0")).note
    assert note is not None
    assert "--nnodes is 3, but this Slurm step has 2 tasks" in note
    assert placed("--nnodes 2:4 t.py", step(SLURM_PROCID="0")).note is None


def test_a_batch_script_that_leaves_nodes_idle_is_reported() -> None:
    shell = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    found = placed("train.py", shell)
    assert found.alone
    assert found.note is not None
    assert "the other 3 nodes are idle" in found.note
    assert placed("train.py", shell | {"SLURM_NNODES": "1"}).note is None


def test_a_step_meets_where_all_verbs_of_it_do_with_one_token() -> None:
    found, launch = placed("t.py", step()), seen_launch(step(), ByHand())
    assert (found.port, found.hosts) == (launch.port, launch.hosts)
    assert found.token == job_token(launch, {})
    first, count = EXCHANGE_PORTS
    assert first <= found.port < first + count


@pytest.mark.parametrize("line", ["train.py", "-- python train.py"])
def test_a_pod_with_a_rank_becomes_it(line: str) -> None:
    found = placed(line, OPERATOR)
    assert found.style is (Style.COMMAND if "--" in line else Style.RANK)
    assert (found.number, found.expected, found.hosts, found.port) == (1, 4, ("job-master-0",), 23457)
    assert (found.of_ranks, found.one_host, found.variables) == (True, False, ())
    assert found.note is None
    told = placed(line, OPERATOR | {"RANK": "0"}).note
    assert told is None if "--" in line else "becoming rank 0 of 4" in str(told)


def test_ranks_on_one_host_by_hand() -> None:
    found = placed("train.py", OPERATOR | {"MASTER_ADDR": "localhost"})
    assert (found.hosts, found.one_host) == (("127.0.0.1",), True)
