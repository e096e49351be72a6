"""Tells from the stack of a rank's main thread whether it waits for other ranks, and in which operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Doing, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.stacks import Frame

_INIT = frozenset({
    "init_process_group", "_create_c10d_store", "_store_based_barrier", "_new_process_group_helper", "next_rendezvous",
    "_torchelastic_worker_rendezvous_handler", "_env_rendezvous_handler", "_tcp_rendezvous_handler",
})  # fmt: skip
_EXIT = frozenset({"_shutdown", "_exit_function", "destroy_process_group", "_run_exitfuncs", "_finalize_join"})
_LOADER = frozenset({"_try_get_data", "_get_data", "_next_data"})
_DEVICE = ("_local_scalar_dense", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_COLLECTIVE_NAMES = ("_engine_run_backward", "c10d::", "Work::wait", "ncclAllReduce", "ncclKernel", "gloo::")
_COLLECTIVE_FILES = (
    "torch/distributed/", "torch/nn/parallel/distributed.py", "deepspeed/comm/", "horovod/", "libnccl", "libgloo",
)  # fmt: skip
_WORKER = "_worker_loop"
_AGENT_FILES = ("torch/distributed/elastic/agent/", "torch/distributed/run.py", "torch/distributed/launcher/api.py")
_BACKWARD = "_engine_run_backward"
_C10D = "torch/distributed/distributed_c10d.py"


def is_agent(stack: Sequence[Frame]) -> bool:
    """Return whether it is the stack of torchrun's agent, which is no rank."""
    return any(_is_in(frame, _AGENT_FILES) for frame in stack)


def is_worker(stack: Sequence[Frame]) -> bool:
    """Return whether it is a DataLoader worker. A forked one has the frames of its rank below its own."""
    return any(frame.function.endswith(_WORKER) for frame in stack)


def doing_of(stack: Sequence[Frame]) -> Doing:
    """Return what a rank does, by its frames from the innermost to the innermost of the user's code."""
    found = Doing.UNKNOWN if not stack else Doing.OWN
    for frame in reversed(stack):
        if frame.user:
            break
        meaning = _meaning(frame)
        if meaning in {Doing.INIT, Doing.EXIT}:
            return meaning
        if found is Doing.OWN and meaning is not None:
            found = meaning
    return found


def _meaning(frame: Frame) -> Doing | None:
    name = frame.function.rsplit(".", 1)[-1]
    if name in _INIT:
        return Doing.INIT
    if name in _EXIT and _is_in(frame, ("threading.py", "multiprocessing/", "torch/distributed/", "concurrent/")):
        return Doing.EXIT
    if name in _LOADER and "dataloader" in frame.file:
        return Doing.DATA
    if any(words in frame.function for words in _DEVICE) or (name == "synchronize" and "torch/cuda" in frame.file):
        return Doing.DEVICE
    waits = any(words in frame.function for words in _COLLECTIVE_NAMES) or _is_in(frame, _COLLECTIVE_FILES)
    return Doing.COLLECTIVE if waits else None


def operation_of(stack: Sequence[Frame]) -> Operation | None:
    """Return the operation that the frames name: the function of torch.distributed that the user called."""
    for frame in stack:
        name = frame.function.rsplit(".", 1)[-1]
        if _C10D in frame.file.replace("\\", "/") and name not in {"wrapper", "_wait"} and not name.startswith("_"):
            return Operation(op=name)
    if any(frame.function.rsplit(".", 1)[-1] == _BACKWARD for frame in stack):
        return Operation(op="backward")
    return None


def _is_in(frame: Frame, parts: Sequence[str]) -> bool:
    path = frame.file.replace("\\", "/")
    return any(part in path for part in parts)
