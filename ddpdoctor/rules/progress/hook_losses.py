"""What is lost if the recorder cannot find the place in torch for one of its hooks."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = "it is not known how long each part of a step takes, and stragglers cannot be found"
_BUFFERS = "waits for rank 0's buffers are not seen, nor whether buffers differ between ranks"
_GRADIENTS = "gradients that hold NaN or inf are not found"
_GROUPS = "it is not known which groups a rank is in, and how far each has come"
_SHARDS = "ranks of a device mesh are not compared"
_ENDS = "it is not known which processes are ranks, and how each one ended"
_DATA = "it is not checked how loaders share data out to ranks"
_DETAIL = "TORCH_DISTRIBUTED_DEBUG=DETAIL may crash a job on Gloo (`--debug-level OFF` helps)"

_LOSSES: Mapping[str, tuple[str, ...]] = {
    "it is not known when a rank joins a process group": (
        "distributed_c10d.init_process_group",
        "distributed_c10d.new_group",
    ),
    "it is not known whether a rank has left its process groups": ("distributed_c10d.destroy_process_group",),
    "waits for asynchronous collectives are not recorded": ("Work.wait",),
    _GROUPS: (
        "distributed_c10d._world",
        "_World.default_pg",
        "_World.pg_group_ranks",
        "_World.pg_map",
    ),
    "collectives that C++ starts, such as those of DDP, are not counted": (
        "ProcessGroup._get_sequence_number_for_group",
    ),
    "the time limits of process groups are not known": (
        "ProcessGroup._get_backend",
        "ProcessGroup._device_types",
    ),
    "collectives that wait on a GPU are not seen": ("flight recorder",),
    "collectives of DTensor, FSDP and compiled code are not recorded": (
        "functional collectives",
        "torch.distributed._functional_collectives",
    ),
    _DETAIL: ("distributed_c10d._create_process_group_wrapper", "Logger.set_construction_data_and_log"),
    "it is not seen that a rank is in DDP's constructor or forward": (
        "DistributedDataParallel.__init__",
        "DistributedDataParallel.forward",
        "torch.nn.parallel.distributed",
    ),
    "replicas of DDP are not compared after a forward": ("DistributedDataParallel._post_forward",),
    _BUFFERS: ("DistributedDataParallel._sync_buffers",),
    _STEPS: (
        "DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
        "Logger._get_ddp_logging_data",
        "Logger.set_runtime_stats_and_log",
    ),
    "parameters that a backward leaves without a gradient are not named": ("Reducer._check_reducer_finalized",),
    "it is not known when each gradient was ready": ("Reducer.get_backward_stats", "Reducer._ddp_graph_static"),
    "it is not seen that a rank is in backward": ("autograd.backward", "torch.autograd"),
    _GRADIENTS: (
        "_C._current_graph_task_id",
        "autograd engine.queue_callback",
        "Tensor.register_post_accumulate_grad_hook",
    ),
    "it is not known whether a gradient scaler skips a step": ("grad_scaler.GradScaler", "GradScaler.scale"),
    "steps of optimizers are not counted, and replicas not compared after them": (
        "optimizer.register_optimizer_step_pre_hook",
        "optimizer.register_optimizer_step_post_hook",
        "torch.optim.optimizer",
    ),
    "it is not known at which step a checkpoint was saved": ("serialization.save", "torch.serialization"),
    "parameters that no optimizer holds are not found": (
        "Optimizer.__init__",
        "module.register_module_parameter_registration_hook",
    ),
    "waits for batches are not recorded": (
        "dataloader._BaseDataLoaderIter",
        "_BaseDataLoaderIter.__next__",
        "torch.utils.data.dataloader",
    ),
    _DATA: ("_BaseDataLoaderIter._next_index", "DataLoader.__iter__"),
    "it is not known whether loader workers are too slow": (
        "fetch._MapDatasetFetcher",
        "fetch._IterableDatasetFetcher",
    ),
    "samplers that no loader uses are not found": (
        "DistributedSampler.set_epoch",
        "torch.utils.data.distributed",
    ),
    "errors of ranks that mp.spawn starts are not recorded": ("spawn._wrap", "torch.multiprocessing.spawn"),
    "torch.compile may break a graph at frames of the recorder": (
        "trace_rules.SKIP_DIRS",
        "trace_rules._recompile_re",
        "torch._dynamo.trace_rules",
    ),
    "a look may break the capture of a CUDA graph that another thread makes": (
        "graphs.CUDAGraph",
        "CUDAGraph.capture_begin",
        "CUDAGraph.capture_end",
        "torch.cuda.graphs",
    ),
    _SHARDS: (
        "_fully_shard.fully_shard",
        "api.parallelize_module",
        "_api.distribute_module",
        "torch.distributed.fsdp._fully_shard._fully_shard",
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
    "it is not known which attempts of the nodes belong together": (
        "api.SimpleElasticAgent",
        "SimpleElasticAgent._rendezvous",
        "torch.distributed.elastic.agent.server.api",
    ),
    "only the processes themselves are seen": (
        "torch.distributed",
        "torch.distributed.distributed_c10d",
    ),
}
UNKNOWN = "what it reports is not known"
"""Used for a hook that only a newer recorder knows."""


_PARTS: Mapping[str, str] = {
    "steps": _STEPS,
    "gradients": _GRADIENTS,
    "loaders": _DATA,
    "fetches": "it is not known whether loader workers are too slow",
    "reducer": "parameters that a backward leaves without a gradient are not named",
    "replica": "replicas of DDP are not compared",
    "replicas": "replicas of DDP are not compared",
    "mesh": _SHARDS,
    "optimizer": "steps of optimizers are not counted",
    "epoch": "samplers that no loader uses are not found",
    "detail": _DETAIL,
    "wait": "waits for asynchronous collectives are not recorded",
    "wait_tensor": "waits for functional collectives are not recorded",
    "evidence": "evidence of ranks that hang is incomplete",
    "patch": "hooks in this module are missing",
}
"""By the first word of the failure text."""


def losses_of(failures: str) -> tuple[str, ...]:
    """Return what the recorder's failures lose, one sentence each; ``failures`` is the text from a rank."""
    hooks = dict.fromkeys(failure.partition(":")[0] for failure in failures.split("; "))
    return tuple(f"{hook} failed, so {loss}" for hook in hooks if (loss := _PARTS.get(hook.partition(" ")[0])))


LOSSES: Mapping[str, str] = MappingProxyType({hook: loss for loss, hooks in _LOSSES.items() for hook in hooks})
"""By hook: what is lost without it."""
