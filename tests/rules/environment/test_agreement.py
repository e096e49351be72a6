"""DD234 and DD235: healthy, each failing form, missing facts, near misses."""

from dataclasses import replace

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.node import ConfFile, Launcher
from tests.rules.environment.build import ask, failed, fleet, node, process
from tests.rules.environment.launches import changed, lookup, names, torchrun_fleet

FOUR = torchrun_fleet()


def test_one_process_has_nobody_to_agree_with():
    assert ask("ws-same", fleet(node(processes=[process(0, WORLD_SIZE="2")])))[0].outcome is Outcome.SKIPPED
    single = fleet(node(processes=[process(0)]), launcher=Launcher.SLURM, world_size=2, missing=(1,))
    assert ask("ws-same", single)[0].outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    "facts",
    [
        FOUR,
        torchrun_fleet(NCCL_ALGO="Ring"),
        changed(FOUR, 3, NCCL_SOCKET_IFNAME="eth1"),
        changed(FOUR, 3, CUDA_VISIBLE_DEVICES="3"),
        changed(FOUR, 3, NCCL_DEBUG="INFO"),
        changed(FOUR, 3, NCCL_DEBUG_FILE="/tmp/3"),
        changed(FOUR, 3, LOCAL_WORLD_SIZE="1"),
        changed(FOUR, 3, NCCL_IB_HCA="mlx5_3"),
    ],
)
def test_agreement(facts):
    check, findings = ask("ws-same", facts)
    assert (check.outcome, findings) == (Outcome.PASSED, ())
    assert "WORLD_SIZE=4, MASTER_ADDR=node0, MASTER_PORT=40123" in check.seen


@pytest.mark.parametrize(
    ("facts", "severity", "summary", "fix"),
    [
        (changed(FOUR, 3, WORLD_SIZE="3"), Severity.ERROR,
         "WORLD_SIZE is 3 on rank 3, 4 on 3 others: the ranks wait for different numbers of ranks", "WORLD_SIZE=4"),
        (changed(FOUR, 2, MASTER_PORT="1"), Severity.ERROR, "MASTER_PORT is 1 on rank 2, 40123 on 3", "=40123"),
        (changed(FOUR, 2, MASTER_ADDR=None), Severity.ERROR, "MASTER_ADDR is unset on rank 2, node0 on", "=node0"),
        (changed(FOUR, 3, NCCL_ALGO="Ring"), Severity.ERROR, "NCCL_ALGO is Ring on rank 3, unset on 3 others",
         "unset NCCL_ALGO on all ranks"),
        (changed(FOUR, 1, NCCL_BUFFSIZE="1048576"), Severity.WARNING, "NCCL_BUFFSIZE is 1048576 on rank 1", "unset"),
        (changed(FOUR, 1, TORCH_DISTRIBUTED_DEBUG="DETAIL"), Severity.ERROR, "DEBUG is DETAIL on rank 1", "unset"),
        (changed(FOUR, 1, TORCH_DISTRIBUTED_DEBUG="INFO"), Severity.INFO, "TORCH_DISTRIBUTED_DEBUG is INFO", "unset"),
    ],
)  # fmt: skip
def test_disagreement(facts, severity, summary, fix):
    check, (finding,) = ask("ws-same", facts)
    assert (check.outcome, finding.severity, finding.confidence) == (failed(severity), severity, Confidence.HIGH)
    assert summary in finding.summary
    assert fix in finding.fix


def test_without_a_majority_nobody_is_to_blame():
    halves = changed(changed(FOUR, 2, WORLD_SIZE="2"), 3, WORLD_SIZE="2")
    _, (finding,) = ask("ws-same", halves)
    assert finding.confidence is Confidence.LOW
    assert finding.ranks == (0, 1, 2, 3)


def with_names(facts, *sections):
    nodes = tuple(replace(each, names=section) for each, section in zip(facts.nodes, sections, strict=True))
    return replace(facts, nodes=nodes)


OTHER_NAME = changed(changed(FOUR, 2, MASTER_ADDR="node0.cluster"), 3, MASTER_ADDR="node0.cluster")


def test_two_spellings_of_one_host_agree():
    first = names("node0", "10.0.0.1", master=lookup("node0", "10.0.0.1"))
    second = names("node1", "10.0.0.2", master=lookup("node0.cluster", "10.0.0.1"))
    assert ask("ws-same", with_names(OTHER_NAME, first, second))[1] == ()


def test_two_names_of_two_hosts_do_not():
    first = names("node0", "10.0.0.1", master=lookup("node0", "10.0.0.1"))
    second = names("node1", "10.0.0.2", master=lookup("node0.cluster", "10.0.0.9"))
    _, (finding,) = ask("ws-same", with_names(OTHER_NAME, first, second))
    assert "MASTER_ADDR is" in finding.summary


def test_localhost_on_the_first_node_means_the_same():
    facts = changed(changed(FOUR, 0, MASTER_ADDR="localhost"), 1, MASTER_ADDR="localhost")
    assert ask("ws-same", facts)[1] == ()


def test_localhost_on_another_node_does_not():
    facts = changed(changed(FOUR, 2, MASTER_ADDR="localhost"), 3, MASTER_ADDR="localhost")
    assert len(ask("ws-same", facts)[1]) == 1


def conf(path, **variables):
    return ConfFile(path=path, variables=variables, hidden_by_env=(), hidden_by_file=(), bad_lines=())


def test_a_file_of_one_host_counts():
    nodes = (replace(FOUR.nodes[0], conf_files=(conf("/etc/nccl.conf", NCCL_ALGO="Tree"),)), FOUR.nodes[1])
    _, (finding,) = ask("ws-same", replace(FOUR, nodes=nodes))
    assert "NCCL_ALGO is Tree on ranks 0 and 1" in finding.summary
    assert finding.evidence == ("/etc/nccl.conf of node0 sets NCCL_ALGO",)


def test_the_environment_wins_over_files():
    facts = torchrun_fleet(NCCL_ALGO="Ring")
    nodes = (replace(facts.nodes[0], conf_files=(conf("/etc/nccl.conf", NCCL_ALGO="Tree"),)), facts.nodes[1])
    assert ask("ws-same", replace(facts, nodes=nodes))[1] == ()


def by_node(*variables):
    return fleet(
        *(node(f"node{i}", index=i, processes=[process(i, **given)]) for i, given in enumerate(variables)),
        launcher=Launcher.SLURM, world_size=len(variables),
    )  # fmt: skip


GIVEN = {"PET_RDZV_ID": "7", "PET_NNODES": "3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:29400"}


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (fleet(node(processes=[process(None, **GIVEN)])), Outcome.SKIPPED),
        (by_node({}, {}), Outcome.SKIPPED),
        (by_node(GIVEN, GIVEN), Outcome.PASSED),
        (FOUR, Outcome.PASSED),
        (changed(FOUR, 2, PET_NNODES="5"), Outcome.PASSED),
        (by_node(GIVEN | {"PET_NODE_RANK": "0"}, GIVEN | {"PET_NODE_RANK": "1"}), Outcome.PASSED),
    ],
)
def test_one_rendezvous(facts, outcome):
    check, findings = ask("rdzv-id-same", facts)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("PET_RDZV_ID", "9", "export PET_RDZV_ID=7 on all nodes"),
        ("PET_NNODES", "2", "export PET_NNODES=3 on all nodes"),
        ("PET_RDZV_ENDPOINT", "node2:29400", "export PET_RDZV_ENDPOINT=node0:29400 on all nodes"),
        ("PET_RDZV_BACKEND", "static", "export PET_RDZV_BACKEND=c10d on all nodes"),
    ],
)
def test_another_rendezvous(name, value, fix):
    check, (finding,) = ask("rdzv-id-same", by_node(GIVEN, GIVEN, GIVEN | {name: value}))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert finding.summary.startswith(f"{name} is {value} on node2, {GIVEN[name]} on 2 others: these nodes never meet")
    assert finding.fix == fix
    assert (finding.hosts, finding.ranks) == (("node2",), (2,))


def test_two_nodes_without_a_majority():
    _, (finding,) = ask("rdzv-id-same", by_node(GIVEN, GIVEN | {"PET_RDZV_ID": "8"}))
    assert finding.confidence is Confidence.LOW
    assert finding.hosts == ("node0", "node1")


def test_many_different_values_are_counted():
    each = by_node(*(GIVEN | {"PET_RDZV_ID": str(number)} for number in range(100)))
    _, (finding,) = ask("rdzv-id-same", each)
    start = "PET_RDZV_ID has 100 different values, such as 0 on node0, 1 on node1: these nodes never meet"
    assert finding.summary.startswith(start)
