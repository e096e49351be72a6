"""DD236, DD237 and DD238: healthy, each failing form, missing facts, near misses."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.software import TorchBuild
from tests.rules.environment.build import ask, failed, node, process
from tests.rules.environment.launches import TORCHRUN, recorded

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
RANKS = JOB | {
    "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_LOCALID": "1",
}  # fmt: skip
"""A task of two on each of two nodes."""
NODES = RANKS | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
"""A task for each node."""
BATCH = JOB | {"SLURM_NNODES": "2", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0",
               "SLURM_NODEID": "0"}  # fmt: skip
TWO = TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}
ONE = TWO | {"GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"}


def ask_one(kind, variables, **more):
    sections = {name: more.pop(name) for name in ("torch",) if name in more}
    return ask(kind, node(processes=[process(1, **more, **variables)], **sections))


@pytest.mark.parametrize(
    ("variables", "outcome"),
    [
        ({}, Outcome.SKIPPED),
        ({"SLURM_JOB_ID": "7"}, Outcome.SKIPPED),
        (BATCH, Outcome.SKIPPED),
        (BATCH | {"WORLD_SIZE": "16", "MASTER_ADDR": "n1"}, Outcome.SKIPPED),
        (BATCH | {"SLURM_STEP_ID": "4294967291", "WORLD_SIZE": "16"}, Outcome.SKIPPED),
        (RANKS, Outcome.PASSED),
        (RANKS | {"WORLD_SIZE": "4", "RANK": "1"}, Outcome.PASSED),
        (RANKS | {"WORLD_SIZE": "4"}, Outcome.PASSED),
        (RANKS | {"SLURM_GPUS_ON_NODE": "2"}, Outcome.PASSED),
        (NODES | {"WORLD_SIZE": "16", "MASTER_ADDR": "n1"}, Outcome.PASSED),
        (NODES | TWO, Outcome.PASSED),
        (NODES | TWO | {"SLURM_GPUS_ON_NODE": "2"}, Outcome.PASSED),
        (RANKS | {"SLURM_STEP_TASKS_PER_NODE": "broken"}, Outcome.PASSED),
        (JOB | ONE | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"},
         Outcome.PASSED),
    ],
)  # fmt: skip
def test_shapes_that_fit(variables, outcome):
    check, findings = ask_one("slurm-shape", variables)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "severity", "summary"),
    [
        (RANKS | {"WORLD_SIZE": "8", "RANK": "1"}, Severity.ERROR,
         "WORLD_SIZE is 8, but srun started 4 tasks: they wait for 4 ranks that never start"),
        (RANKS | {"WORLD_SIZE": "2", "RANK": "1"}, Severity.ERROR, "there are more tasks than ranks"),
        (RANKS | {"WORLD_SIZE": "8"}, Severity.WARNING, "WORLD_SIZE is 8, but srun started 4 tasks"),
        (NODES | {"WORLD_SIZE": "16", "RANK": "1"}, Severity.ERROR, "WORLD_SIZE is 16, but srun started 2 tasks"),
        (RANKS | {"WORLD_SIZE": "4", "RANK": "0"}, Severity.WARNING, "RANK is not SLURM_PROCID"),
        (RANKS | TWO, Severity.WARNING, "srun starts torchrun 2 times per node"),
        (NODES | ONE, Severity.WARNING, "torchrun counts 1 node, but the step has 2"),
        (BATCH | ONE, Severity.WARNING,
         "the job has 2 nodes, but torchrun uses one: it was started without srun"),
        (NODES | ONE | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, Severity.WARNING,
         "the job has 2 nodes, but torchrun uses one: the step has one task"),
        (RANKS | {"SLURM_GPUS_ON_NODE": "1"}, Severity.WARNING, "2 ranks run on this node, but Slurm gave it 1 GPU"),
        (NODES | TWO | {"LOCAL_WORLD_SIZE": "8", "SLURM_GPUS_ON_NODE": "4"}, Severity.WARNING,
         "8 ranks run on this node, but Slurm gave it 4 GPUs"),
        (RANKS | {"SLURM_JOB_NUM_NODES": "4"}, Severity.INFO, "the step runs on 2 of the 4 nodes of the job"),
        ({name: value for name, value in RANKS.items() if name != "SLURM_JOB_NUM_NODES"}
         | {"SLURM_JOB_NODELIST": "n[1-3]"}, Severity.INFO, "the step runs on 2 of the 3 nodes of the job"),
    ],
)  # fmt: skip
def test_shapes_that_do_not(variables, severity, summary):
    check, (finding,) = ask_one("slurm-shape", variables)
    assert (check.outcome, finding.severity) == (failed(severity), severity)
    assert summary in finding.summary
    assert finding.ranks == (1,)
    assert "srun" in finding.fix or "--gpus-per-node" in finding.fix or "SLURM_PROCID" in finding.fix


def test_tasks_that_share_a_rank_are_one_finding():
    processes = [process(0, **RANKS, RANK="0", WORLD_SIZE="4", pid=pid) for pid in (1, 2)]
    assert len(ask("slurm-shape", node(processes=processes))[1]) == 1


CPUS = RANKS | {"SLURM_CPUS_PER_TASK": "8"}


@pytest.mark.parametrize(
    ("variables", "cpus", "outcome"),
    [
        ({}, (0,), Outcome.SKIPPED),
        (BATCH | {"SLURM_CPUS_PER_TASK": "8"}, (0,), Outcome.SKIPPED),
        (RANKS, (0,), Outcome.SKIPPED),
        (CPUS, tuple(range(8)), Outcome.PASSED),
        (CPUS, tuple(range(64)), Outcome.PASSED),
    ],
)
def test_enough_cpus(variables, cpus, outcome):
    check, findings = ask_one("srun-cpus", variables, cpus=cpus)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("more", "evidence"),
    [({}, "SRUN_CPUS_PER_TASK is not set"), ({"SRUN_CPUS_PER_TASK": "1"}, "SRUN_CPUS_PER_TASK is 1")],
)
def test_one_cpu_for_a_task(more, evidence):
    check, (finding,) = ask_one("srun-cpus", CPUS | more, cpus=(3,))
    assert (check.outcome, finding.severity) == (Outcome.FAILED, Severity.WARNING)
    assert "requested 8 CPUs per task, but srun lets a task use only 1" in finding.summary
    assert finding.evidence == (evidence,)
    assert finding.fix == "export SRUN_CPUS_PER_TASK=8 in the batch script, or srun --cpus-per-task=8"


def test_ranks_of_torchrun_share_the_cpus_of_their_task():
    halves = [process(rank, cpus=range(4 * rank, 4 * rank + 4), **(NODES | TWO | CPUS)) for rank in range(2)]
    assert ask("srun-cpus", node(processes=halves))[0].outcome is Outcome.PASSED
    quarters = [process(rank, cpus=(rank,), **(NODES | TWO | CPUS)) for rank in range(2)]
    assert "use only 2" in ask("srun-cpus", node(processes=quarters))[1][0].summary


def torch(count):
    return TorchBuild(
        version="2.9.0", import_error=None, cuda="12.8", hip=None, cuda_available=True, cuda_error=None,
        device_count=count, devices=(), arch_list=(), nccl=None, nccl_libraries=(), gloo=True, peers=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "more", "outcome"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "1"}, {}, Outcome.SKIPPED),
        (NODES | TWO | {"CUDA_VISIBLE_DEVICES": "0"}, {}, Outcome.SKIPPED),
        (RANKS, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": ""}, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "-1"}, {}, Outcome.SKIPPED),
        (RANKS, {"torch": torch(0)}, Outcome.SKIPPED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, Outcome.PASSED),
        (RANKS, {"torch": torch(2)}, Outcome.PASSED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_LOCALID": "0"}, {}, Outcome.PASSED),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "0"}, {}, Outcome.PASSED),
    ],
)
def test_enough_gpus(variables, more, outcome):
    check, findings = ask_one("gpus-per-task", variables, **more)
    assert (check.outcome, findings) == (outcome, ())


@pytest.mark.parametrize(
    ("variables", "more", "fix"),
    [
        (RANKS | {"CUDA_VISIBLE_DEVICES": "1"}, {}, "--gpus-per-node=N"),
        (RANKS | {"CUDA_VISIBLE_DEVICES": "GPU-1", "SLURM_GPUS_ON_NODE": "8"}, {}, "srun --gpus-per-node=8"),
        (RANKS, {"torch": torch(1)}, "--gpus-per-node=N"),
    ],
)
def test_one_gpu_for_a_task(variables, more, fix):
    check, (finding,) = ask_one("gpus-per-task", variables, **more)
    assert (check.outcome, finding.severity, finding.confidence) == (
        Outcome.FAILED, Severity.WARNING, Confidence.MEDIUM,
    )  # fmt: skip
    assert "each task sees only 1 GPU, so cuda:LOCAL_RANK does not exist" in finding.summary
    assert fix in finding.fix


def test_what_slurm_really_sets_for_gpus_per_task(tmp_path):
    facts = node(processes=[recorded("slurm-step", tmp_path, "gpus-per-task")])
    _, (finding,) = ask("gpus-per-task", facts)
    assert finding.evidence == ("SLURM_LOCALID=1, CUDA_VISIBLE_DEVICES=1",)


def test_what_slurm_really_sets_for_cpus_per_task(tmp_path):
    narrow = recorded("slurm-step", tmp_path, "batch-step")
    check, _ = ask("srun-cpus", node(processes=[narrow]))
    assert (check.outcome, check.seen) == (Outcome.PASSED, "2 CPUs requested per task, 4 usable")
