"""Launches that are as they should be, many claims, and every row of the table of variables."""

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.launch import read_variables
from ddpdoctor.model.node import Launcher
from ddpdoctor.rules.registry import rules_of
from tests.golden import table
from tests.rules.environment.build import NO_RDMA, ask, fleet, judge_fleet, node, process, software

# No launch that is as it should be, and no plain shell, trips a rule on launching.


KINDS = (
    "env-complete", "env-range", "rank-set", "ws-same", "rdzv-id-same", "slurm-shape", "srun-cpus", "gpus-per-task",
    "k8s", "master-numeric", "master-loopback", "rdzv-host", "port-range",
)  # fmt: skip


def judge(facts):
    judged = judge_fleet(facts, [rule for rule in rules_of("environment") if rule.kind in KINDS])
    assert not [check for check in judged.checks if check.outcome is Outcome.CRASHED]
    assert len(judged.checks) == len(KINDS)
    return judged


test_rows = table("launches", "tests.rules.environment.launches", globals())


# Many, of which some are shown.


def test_many_claims_are_not_all_listed():
    processes = [process(0, pid=rank) for rank in range(1000)]
    (finding,) = ask(
        "rank-set", fleet(node("a", processes=processes), launcher=Launcher.SLURM, world_size=1000)
    ).findings
    assert finding.evidence[0] == "rank 0: process 0 on a, process 1 on a, process 2 on a, process 3 on a and 996 more"
    assert finding.evidence[1] == "no process has ranks 1-999"


def test_many_different_values_are_counted():
    given = {"PET_NNODES": "3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "node0:29400"}
    nodes = [node(f"node{n}", index=n, processes=[process(n, PET_RDZV_ID=str(n), **given)]) for n in range(100)]
    (finding,) = ask("rdzv-id-same", fleet(*nodes, launcher=Launcher.SLURM, world_size=100)).findings
    start = "PET_RDZV_ID has 100 different values, such as 0 on node0, 1 on node1: these nodes never connect"
    assert finding.summary.startswith(start)


# The table of variables.


def test_every_name_out_of_use_is_found_where_the_newest_versions_are_installed():
    names = [row.name for row in read_variables().values() if row.kind in {"deprecated", "removed", "bogus"}]
    newest = software(torch_version="2.13.0", nccl_wheel="2.32.3")
    found = ask("env-deprecated", node(processes=[process(**dict.fromkeys(names, "1"))], software=newest))
    assert len(found.findings) == len(names)


def test_every_dangerous_row_can_be_found():
    tries = ("0", "1", "True", "LOC", "TRACE", "DETAIL", "Ring", "/tmp/nccl.log")
    for row in read_variables().values():
        seen = (node(processes=[process(**{row.name: value})], rdma=NO_RDMA) for value in tries)
        assert row.kind != "danger" or any(ask("env-danger", one).findings for one in seen), row.name
