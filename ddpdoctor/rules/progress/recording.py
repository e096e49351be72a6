"""DD901: a rank that could not be recorded in full, and what is lost without each hook."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ddpdoctor.model.facts import Life, Presence, Rank
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import grouped, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.progress import words as say
from ddpdoctor.rules.progress.job_state import Cause, JobState
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Mapping


_STEPS = "the parts of a step are not timed, and stragglers are not detected"
_BUFFERS = "waits for rank 0's buffers are not recorded, and buffers are not compared between ranks"
_GRADIENTS = "NaN and inf in gradients are not detected"
_GROUPS = "the process groups of a rank and their progress are not recorded"
_SHARDS = "ranks of a device mesh are not compared"
_ENDS = "ranks and their exit statuses are not recorded"
_DATA = "the ranks' shares of the data are not checked"
_DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL may crash a job on Gloo (`--debug-level OFF` helps)"

_LOSSES: Mapping[str, tuple[str, ...]] = {
    "joining a process group is not recorded": (
        "distributed_c10d.init_process_group",
        "distributed_c10d.new_group",
    ),
    "leaving a process group is not recorded": ("distributed_c10d.destroy_process_group",),
    "waits for asynchronous collectives are not recorded": ("Work.wait",),
    _GROUPS: (
        "distributed_c10d._world",
        "_World.default_pg",
        "_World.pg_group_ranks",
        "_World.pg_map",
    ),
    "collectives started by C++, such as those of DDP, are not counted": (
        "ProcessGroup._get_sequence_number_for_group",
    ),
    "the timeouts of process groups are unknown": (
        "ProcessGroup._get_backend",
        "ProcessGroup._device_types",
    ),
    "collectives that wait on a GPU are not recorded": ("flight recorder",),
    "collectives of DTensor, FSDP and compiled code are not recorded": (
        "functional collectives",
        "torch.distributed._functional_collectives",
    ),
    _DETAIL: ("distributed_c10d._create_process_group_wrapper", "Logger.set_construction_data_and_log"),
    "DDP's constructor and forward are not recorded": (
        "DistributedDataParallel.__init__",
        "DistributedDataParallel.forward",
        "torch.nn.parallel.distributed",
    ),
    "DDP replicas are not compared after forward": ("DistributedDataParallel._post_forward",),
    _BUFFERS: ("DistributedDataParallel._sync_buffers",),
    _STEPS: (
        "DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
        "Logger._get_ddp_logging_data",
        "Logger.set_runtime_stats_and_log",
    ),
    "parameters without a gradient are not named": ("Reducer._check_reducer_finalized",),
    "the time when each gradient is ready is not recorded": ("Reducer.get_backward_stats", "Reducer._ddp_graph_static"),
    "backward is not recorded": ("autograd.backward", "torch.autograd"),
    _GRADIENTS: (
        "_C._current_graph_task_id",
        "autograd engine.queue_callback",
        "Tensor.register_post_accumulate_grad_hook",
    ),
    "steps that a gradient scaler skips are not recorded": ("grad_scaler.GradScaler", "GradScaler.scale"),
    "optimizer steps are not counted, and replicas are not compared after them": (
        "optimizer.register_optimizer_step_pre_hook",
        "optimizer.register_optimizer_step_post_hook",
        "torch.optim.optimizer",
    ),
    "the step at which a checkpoint was saved is not known": ("serialization.save", "torch.serialization"),
    "parameters that no optimizer has are not detected": (
        "Optimizer.__init__",
        "module.register_module_parameter_registration_hook",
    ),
    "waits for batches are not recorded": (
        "dataloader._BaseDataLoaderIter",
        "_BaseDataLoaderIter.__next__",
        "torch.utils.data.dataloader",
    ),
    _DATA: ("_BaseDataLoaderIter._next_index", "DataLoader.__iter__"),
    "slow loader workers are not detected": (
        "fetch._MapDatasetFetcher",
        "fetch._IterableDatasetFetcher",
    ),
    "samplers that no DataLoader uses are not detected": (
        "DistributedSampler.set_epoch",
        "torch.utils.data.distributed",
    ),
    "errors of ranks started by mp.spawn are not recorded": ("spawn._wrap", "torch.multiprocessing.spawn"),
    "torch.compile may break graphs at frames of the recorder": (
        "trace_rules.SKIP_DIRS",
        "trace_rules._recompile_re",
        "torch._dynamo.trace_rules",
    ),
    "reading the state of a rank may break a CUDA graph capture in another thread": (
        "graphs.CUDAGraph",
        "CUDAGraph.capture_begin",
        "CUDAGraph.capture_end",
        "torch.cuda.graphs",
    ),
    _SHARDS: (
        "_fully_shard.fully_shard",
        "fully_sharded_data_parallel.FullyShardedDataParallel",
        "FullyShardedDataParallel.__init__",
        "Module.to_empty",
        "api.parallelize_module",
        "_api.distribute_module",
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch.distributed.tensor.parallel.api",
        "torch.distributed.tensor._api",
    ),
    _ENDS: (
        "api.SubprocessContext",
        "SubprocessContext._start",
        "SubprocessContext._poll",
        "SubprocessContext._close",
        "api.MultiprocessContext",
        "MultiprocessContext._start",
        "MultiprocessContext._poll",
        "MultiprocessContext._close",
        "torch.distributed.elastic.multiprocessing.api",
    ),
    "the attempts of the nodes cannot be matched": (
        "api.SimpleElasticAgent",
        "SimpleElasticAgent._rendezvous",
        "torch.distributed.elastic.agent.server.api",
    ),
    "only the processes themselves are observed": (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
    ),
}
UNKNOWN = "its purpose is unknown"
"""Used for a hook that only a newer recorder knows."""


_PARTS: Mapping[str, str] = {
    "steps": _STEPS,
    "gradients": _GRADIENTS,
    "loaders": _DATA,
    "fetches": "slow loader workers are not detected",
    "reducer": "parameters without a gradient are not named",
    "replica": "DDP replicas are not compared",
    "replicas": "DDP replicas are not compared",
    "mesh": _SHARDS,
    "optimizer": "optimizer steps are not counted",
    "epoch": "samplers that no DataLoader uses are not detected",
    "detail": _DETAIL,
    "wait": "waits for asynchronous collectives are not recorded",
    "wait_tensor": "waits for functional collectives are not recorded",
    "flight": "collectives that wait on a GPU may not be recorded",
    "evidence": "the evidence about hung ranks is incomplete",
    "patch": "hooks in this module are missing",
}
"""By the first word of the failure text."""
LOSSES: Mapping[str, str] = MappingProxyType({hook: loss for loss, hooks in _LOSSES.items() for hook in hooks})
"""By hook: what is lost without it."""
UPDATE = "update ddpdoctor; if that does not help, open an issue with your torch version"


def losses_of(failures: str) -> tuple[str, ...]:
    """Return what the recorder's failures lose, one sentence each; ``failures`` is the text from a rank."""
    hooks = dict.fromkeys(failure.partition(":")[0] for failure in failures.split("; "))
    return tuple(f"{hook} failed, so {loss}" for hook in hooks if (loss := _PARTS.get(hook.partition(" ")[0])))


@rule("DD901", "not-recorded", Severity.INFO, "A rank was not recorded completely")
def check_recorded(job: JobState) -> Answer:
    """Report ranks that ran without a recorder, with a damaged one, or on a torch that lacks one of its hooks."""
    unseen = grouped((why, number) for number in sorted(job.states) if (why := _why(job.rank(number))))
    found = [_finding(job, why, tuple(ranks)) for why, ranks in unseen.items()]
    lacking = grouped((lacks, number) for number in sorted(job.states) if (lacks := job.rank(number).lacks))
    for hooks, ranks in lacking.items():
        lost = [LOSSES.get(hook, UNKNOWN) for hook in hooks]
        what = f"{hooks[0]}, so {lost[0]}" if len(hooks) == 1 else ", ".join(hooks)
        summary = f"{rank_list(ranks)} could not be recorded completely: this torch has no {what}"
        evidence = tuple(map(": ".join, zip(hooks, lost, strict=True))) if len(hooks) > 1 else ()
        found.append(replace(_finding(job, "", tuple(ranks)), summary=summary, evidence=evidence, fix=UPDATE))
    # Ranks that have no process here; if the user announced other nodes, only if it matters: not if each was heard
    # from, so that a ``wrap`` was started on it, whatever became of it.
    there = tuple(sorted(set(range(job.world)) - set(job.states)))
    members = job.facts.members
    heard = members is not None and all(node.presence is not Presence.ABSENT for node in members.nodes)
    expected = job.facts.nnodes > 1 and (job.cause is Cause.NONE or heard)
    if job.sees_all or expected or not job.states or not there:
        return judged(found)
    they = verb(there, "it", "them")
    where = (
        f"{verb(there, 'was', 'were')} not seen here; {verb(there, 'it', 'they')} may run on another host or in "
        "another container"
    )
    if any(state.rank.initialized for state in job.states.values()):
        where = (
            f"{verb(there, 'runs', 'run')} on another host or in another container, where ddpdoctor cannot see {they}"
        )
    fix = "start `ddpdoctor wrap` there too"
    summary = f"{rank_list(there)} of {job.world} {where}: {fix}"
    return judged([*found, replace(_finding(job, "", there), hosts=(), summary=summary, fix=fix)])


def _why(rank: Rank) -> str:
    if rank.lost:
        return rank.lost
    if rank.life is Life.NEVER_STARTED or rank.recorded:
        return ""
    return "the recorder was not loaded"


def _finding(job: JobState, why: str, ranks: tuple[int, ...]) -> Problem:
    losses = losses_of(why)
    return say.problem_of(
        job,
        ranks,
        summary=f"{rank_list(ranks)} could not be recorded completely: {why}",
        evidence=losses,
        fix=UPDATE if losses else "free disk space for the run folder, and start Python without -I, -E and -S",
        step=None,
    )
