"""Common errors: what each means, whose fault it is, what to do, and where that is documented."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddpdoctor.model.findings import FaultOrigin
from ddpdoctor.model.reducer import Fault

from .clues import Clue
from .reducer_causes import FIXES

SCRIPT = "the script"
SETTINGS = "how the job is started or installed"
MACHINE = "the machine or its limits"
HARDWARE = "the GPU itself"
PEER = "another rank"
EITHER = "the script or the machine"
_ORIGINS = {
    SCRIPT: FaultOrigin.SCRIPT,
    SETTINGS: FaultOrigin.SETTINGS,
    MACHINE: FaultOrigin.SETTINGS,
    HARDWARE: FaultOrigin.MACHINE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownError:
    """An error that torch, NCCL or Python raises for one well-known reason."""

    pattern: str
    """A regular expression for "Type: message"."""
    shown: str
    """The error as users search for it."""
    means: str
    fault: str
    fix: str
    source: str
    """Where the cause is explained: a file of torch 2.13, an issue, or a page of documentation."""


def find_known(text: str) -> KnownError | None:
    """Return the first known error that matches a text ("ValueError: ..."), or None."""
    return next((known for known in KNOWN_ERRORS if re.search(known.pattern, text, re.DOTALL)), None)


def origin_of_error(text: str) -> FaultOrigin | None:
    """Return where the fault of a known error lies; None if the error is not known or may have several origins."""
    known = find_known(text)
    return None if known is None else _ORIGINS.get(known.fault)


def known_clues(text: str) -> tuple[Clue, ...]:
    """Return the meaning of a known error, as a clue of the rank that raised it."""
    known = find_known(text)
    return () if known is None else (Clue(said=f"{known.means} (at fault: {known.fault})", fix=known.fix),)


_ISSUE = "https://github.com/pytorch/pytorch/issues/"
_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"
_TORCHRUN = "https://docs.pytorch.org/docs/stable/elastic/run.html"
_MULTIPROCESSING = "https://docs.pytorch.org/docs/stable/notes/multiprocessing.html"
_CUDA = "https://docs.pytorch.org/docs/stable/notes/cuda.html"

KNOWN_ERRORS = (
    # DDP and autograd
    KnownError(
        pattern=r"Expected to have finished reduction in the prior iteration",
        shown="Expected to have finished reduction in the prior iteration",
        means="some parameters got no gradient in the previous step, and DDP waits for one from each parameter",
        fault=SCRIPT,
        fix=FIXES[Fault.UNFINISHED],
        source=f"{_ISSUE}43259",
    ),
    KnownError(
        pattern=r"Expected to mark a variable ready only once",
        shown="Expected to mark a variable ready only once",
        means="DDP got two gradients for one parameter in one backward",
        fault=SCRIPT,
        fix=FIXES[Fault.TWICE],
        source=_DDP,
    ),
    KnownError(
        pattern=r"variables? needed for gradient computation (?:has|have) been modified by an inplace operation",
        shown="one of the variables needed for gradient computation has been modified by an inplace operation",
        means="a tensor changed after forward had saved it: by an in-place operation (x += y), by optimizer.step() "
        "before backward, or, in older torch, by a second forward of DDP, which overwrote the buffers",
        fault=SCRIPT,
        fix="call backward for every loss before optimizer.step(), replace the in-place operation "
        "(torch.autograd.set_detect_anomaly(True) names it), and in older torch pass broadcast_buffers=False",
        source=f"{_ISSUE}22095",
    ),
    KnownError(
        pattern=r"'DistributedDataParallel' object has no attribute",
        shown="'DistributedDataParallel' object has no attribute '…'",
        means="the attribute belongs to the model, which DDP keeps in .module",
        fault=SCRIPT,
        fix="write model.module.NAME, but call model(...) for every training forward",
        source=_DDP,
    ),
    KnownError(
        pattern=r"not needed when a module doesn't have any parameters that require a gradient",
        shown="DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient",
        means="all parameters are frozen, or the model has none",
        fault=SCRIPT,
        fix="wrap the model after you unfreeze its parameters, and do not wrap a model that is not trained",
        source="torch/nn/parallel/distributed.py",
    ),
    KnownError(
        pattern=r"device_ids and output_device arguments only work with single-device",
        shown="DistributedDataParallel device_ids and output_device arguments only work with "
        "single-device/multiple-device GPU modules or CPU modules",
        means="the model is on the CPU but device_ids names a GPU, or the model is on several devices",
        fault=SCRIPT,
        fix="move the model first (model.to(local_rank)), or omit device_ids for a model on the CPU",
        source="torch/nn/parallel/distributed.py",
    ),
    KnownError(
        pattern=r"Expected more than 1 value per channel when training",
        shown="Expected more than 1 value per channel when training",
        means="BatchNorm got a batch of one sample, often the last batch of this rank",
        fault=SCRIPT,
        fix="pass drop_last=True to the training DataLoader, or call model.eval() before a forward that does not train",
        source="torch/nn/functional.py, batch_norm",
    ),
    KnownError(
        pattern=r"SyncBatchNorm expected input tensor to be on",
        shown="SyncBatchNorm expected input tensor to be on GPU",
        means="SyncBatchNorm has no implementation for tensors on the CPU",
        fault=SCRIPT,
        fix="move the model and the input to the GPU, or use SyncBatchNorm only on GPUs",
        source="torch/nn/modules/batchnorm.py",
    ),
    KnownError(
        pattern=r"Error\(s\) in loading state_dict.*(?:module\.|_orig_mod\.)",
        shown="Error(s) in loading state_dict … Missing key(s) … module.…",
        means="the names in the checkpoint have the prefix of DDP (module.) or torch.compile (_orig_mod.) and those "
        "of the model do not, or vice versa",
        fault=SCRIPT,
        fix="save model.module.state_dict(); `ddpdoctor check-checkpoint FILE --model train:build_model` shows "
        "what matches",
        source="https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html",
    ),
    KnownError(
        pattern=r"Weights only load failed",
        shown="Weights only load failed",
        means="since torch 2.6, torch.load loads only tensors and plain values, and the file contains other objects",
        fault=SCRIPT,
        fix="save state_dict() and plain values; if you trust the file, use torch.load(..., weights_only=False)",
        source="https://docs.pytorch.org/docs/stable/notes/serialization.html",
    ),
    # starting the process group
    KnownError(
        pattern=r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
        r"|LOCAL_RANK) expected, but not set|KeyError: '(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR"
        r"|MASTER_PORT)'",
        shown="environment variable RANK expected, but not set",
        means="the script was started without a launcher that sets the ranks",
        fault=SETTINGS,
        fix="start it with torchrun (`torchrun --nproc-per-node 2 train.py`) or `ddpdoctor wrap train.py`; "
        "under srun set RANK, WORLD_SIZE and MASTER_ADDR from Slurm's variables",
        source="torch/distributed/rendezvous.py, _env_rendezvous_handler",
    ),
    KnownError(
        pattern=r"Default process group has not been initialized",
        shown="Default process group has not been initialized, please make sure to call init_process_group",
        means="torch.distributed or DDP was used before init_process_group or after destroy_process_group",
        fault=SCRIPT,
        fix="call torch.distributed.init_process_group first on every rank; guard code that also runs in a single "
        "process with torch.distributed.is_initialized()",
        source="torch/distributed/distributed_c10d.py",
    ),
    KnownError(
        pattern=r"trying to initialize the default process group twice",
        shown="trying to initialize the default process group twice!",
        means="init_process_group is called twice, often by the script and by a framework",
        fault=SCRIPT,
        fix="let the framework call it, or guard your call: if not torch.distributed.is_initialized()",
        source="torch/distributed/distributed_c10d.py",
    ),
    KnownError(
        pattern=r"EADDRINUSE|server socket has failed to (?:listen|bind)|^RuntimeError: Address already in use",
        shown="The server socket has failed to listen on any local network address … EADDRINUSE",
        means="another process uses the port: another job on this host with the same --master-port, or a leftover rank "
        "of an earlier job",
        fault=SETTINGS,
        fix="give each job its own port (--master-port, or --standalone on one host); `ddpdoctor check-env "
        "port-free` names the process that uses it",
        source=f"{_ISSUE}72816",
    ),
    KnownError(
        pattern=r"Address family not supported|network addresses of \(.*\) cannot be retrieved|\(gai error",
        shown="The IPv6 network addresses of (…) cannot be retrieved (gai error: …); Address family not "
        "supported by protocol",
        means="the master's host name does not resolve on this host, or resolves to an address family that is disabled",
        fault=MACHINE,
        fix="use the master's IP address instead of its name, or fix /etc/hosts; `ddpdoctor "
        "check-rendezvous` shows the hosts on which the name fails",
        source="torch/csrc/distributed/c10d/socket.cpp",
    ),
    KnownError(
        pattern=r"Timed out after \d+ seconds waiting for clients|client socket has (?:timed out"
        r"|failed to connect)|^Dist\w+Error.*(?:Connection refused|No route to host|unreachable)",
        shown="The client socket has timed out …; Timed out after … seconds waiting for clients. 1/2 clients joined",
        means="a rank could not reach the store on rank 0 in time: a wrong address or port, a firewall, or ranks that "
        "never started",
        fault=SETTINGS,
        fix="run `ddpdoctor check-rendezvous` with the same address and port on every node: it names the host "
        "and the reason",
        source=f"{_ISSUE}105782",
    ),
    KnownError(
        pattern=r"unsupported gloo device|connectFullMesh failed",
        shown="Gloo connectFullMesh failed; makeDeviceForHostname(): unsupported gloo device",
        means="Gloo listens on an address that the other ranks cannot reach, such as 127.0.1.1 from /etc/hosts",
        fault=MACHINE,
        fix="export GLOO_SOCKET_IFNAME=INTERFACE on every node; `ddpdoctor check-env hostname-loopback "
        "ifname-exists` checks it",
        source="https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    KnownError(
        pattern=r"Distributed package doesn't have NCCL",
        shown="Distributed package doesn't have NCCL built in",
        means="this torch build has no NCCL, like all CPU builds",
        fault=SETTINGS,
        fix="install a CUDA build of torch, or use backend='gloo' on CPUs; `ddpdoctor check-env "
        "torch-cuda-build` shows the build",
        source="torch/distributed/distributed_c10d.py",
    ),
    KnownError(
        pattern=r"No backend type associated with device type|Tensors must be CUDA and dense",
        shown="No backend type associated with device type cpu; Tensors must be CUDA and dense",
        means="the process group has no backend for this tensor's device: NCCL takes only GPU tensors",
        fault=SCRIPT,
        fix='move the tensor to the GPU, or initialize both: init_process_group("cpu:gloo,cuda:nccl")',
        source="https://docs.pytorch.org/docs/stable/distributed.html",
    ),
    KnownError(
        pattern=r"invalid tensor (?:size|type) at index|op\.preamble\.length <= op\.nbytes",
        shown="invalid tensor size at index …; op.preamble.length <= op.nbytes",
        means=(
            "the ranks passed tensors of different sizes or dtypes to one collective, or called different collectives"
        ),
        fault=SCRIPT,
        fix="gather the sizes first and pad to the largest, or use all_gather_object; `ddpdoctor wrap` names "
        "the rank that differs",
        source=f"{_ISSUE}70037",
    ),
    KnownError(
        pattern=r"^(?:RuntimeError|Dist\w+Error).*(?:Connection (?:closed|reset) by peer|Broken pipe)"
        r"|Application timeout caused pair closure",
        shown="Connection closed by peer; Connection reset by peer",
        means="another rank exited or lost its connection while this rank was waiting for it",
        fault=PEER,
        fix="find the rank that ended first: its error caused this one",
        source="https://github.com/pytorch/gloo",
    ),
    KnownError(
        pattern=r"Watchdog caught collective operation timeout|failed to pass monitoredBarrier",
        shown="Watchdog caught collective operation timeout",
        means="a collective did not complete within the group's timeout: a rank did not call it, or a link failed",
        fault=PEER,
        fix="find the rank that did not call it: `ddpdoctor wrap` names it and its line; if a rank just needs longer, "
        "raise the timeout: init_process_group(timeout=...)",
        source="https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
    ),
    # GPUs and NCCL
    KnownError(
        pattern=r"(?:CUDA|HIP) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
        r"|CUDNN_STATUS_NOT_INITIALIZED",
        shown="CUDA out of memory",
        means=(
            "the GPU memory is full, often because several ranks use one GPU or all ranks load checkpoints onto GPU 0"
        ),
        fault=EITHER,
        fix="check that each rank uses its own GPU (torch.cuda.set_device(local_rank), "
        "torch.load(map_location='cpu')), then use smaller batches, or, for fragmentation, export "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        source=_CUDA,
    ),
    KnownError(
        pattern=r"uncorrectable ECC error encountered",
        shown="CUDA error: uncorrectable ECC error encountered",
        means="the GPU memory returned wrong data that ECC could not correct",
        fault=HARDWARE,
        fix="exclude the host from the job and run `ddpdoctor check-env ecc-unc row-remap xid` on it; a GPU reset "
        "(nvidia-smi -r) retires the faulty memory",
        source="https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
    ),
    KnownError(
        pattern=r"invalid device ordinal",
        shown="CUDA error: invalid device ordinal",
        means="the rank selects a GPU that it cannot see: there are more ranks than GPUs, the global rank is used as "
        "the GPU index, or CUDA_VISIBLE_DEVICES hides the GPU",
        fault=SETTINGS,
        fix="use LOCAL_RANK for torch.cuda.set_device, and start one rank per GPU; run `ddpdoctor "
        "check-env gpu-count cvd-valid`",
        source=_TORCHRUN,
    ),
    KnownError(
        pattern=r"Duplicate GPU detected|Multiple Ranks are using the same GPU/Partition",
        shown="Duplicate GPU detected : rank 1 and rank 0 both on CUDA device …",
        means="two ranks use the same GPU, and NCCL allows one rank per GPU",
        fault=SCRIPT,
        fix="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group; run "
        "`ddpdoctor check-env dup-gpu`",
        source=_NCCL,
    ),
    KnownError(
        pattern=r"device-side assert triggered",
        shown="CUDA error: device-side assert triggered",
        means="a kernel got an index out of range, usually a label or token id that is too large for the layer",
        fault=SCRIPT,
        fix="run this rank's batch with CUDA_LAUNCH_BLOCKING=1 or on the CPU; the error then names the line",
        source=_CUDA,
    ),
    KnownError(
        pattern=r"Expected all tensors to be on the same device",
        shown="Expected all tensors to be on the same device",
        means="the model and the input are on different devices; with DDP, a rank often uses another rank's GPU",
        fault=SCRIPT,
        fix="move both to the rank's device: device = torch.device('cuda', int(os.environ['LOCAL_RANK']))",
        source=_CUDA,
    ),
    KnownError(
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
        shown="Cannot re-initialize CUDA in forked subprocess",
        means="a process that had used CUDA was forked: by a DataLoader whose dataset uses the GPU, or by "
        "multiprocessing",
        fault=SCRIPT,
        fix="keep CUDA out of the dataset, or use multiprocessing_context='spawn'; start ranks with torchrun "
        "or mp.spawn",
        source=_MULTIPROCESSING,
    ),
    KnownError(
        pattern=r"[Mm]ismatched NCCL version|NCCL version mismatch|undefined symbol: nccl",
        shown="Mismatched NCCL version detected",
        means="ranks or libraries use different versions of NCCL: another libnccl is loaded before torch's, or the "
        "nodes differ",
        fault=SETTINGS,
        fix="remove libnccl from LD_LIBRARY_PATH and LD_PRELOAD, and install the same torch version on all nodes; "
        "run `ddpdoctor check-env nccl-loaded version-same`",
        source=f"{_ISSUE}122571",
    ),
    KnownError(
        pattern=r"ncclSystemError|unhandled system error",
        shown="NCCL error: unhandled system error",
        means="a system call in NCCL failed: shared memory, sockets, the interface, or locked memory for InfiniBand",
        fault=MACHINE,
        fix="run again with NCCL_DEBUG=WARN, which names the call; run `ddpdoctor check-env shm nofile memlock "
        "ifname-exists`",
        source="https://github.com/NVIDIA/nccl/issues/1657",
    ),
    KnownError(
        pattern=r"ncclRemoteError|remote process exited",
        shown="ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
        means="another rank ended, or the network between them failed",
        fault=PEER,
        fix="find the rank that ended first; if all are alive, test the links with `ddpdoctor check-rendezvous` and "
        "`ddpdoctor allreduce-bench --pairs`",
        source=_NCCL,
    ),
    KnownError(
        pattern=r"ncclUnhandledCudaError|unhandled cuda error|ncclInvalidUsage|ncclInternalError",
        shown="NCCL error: unhandled cuda error, invalid usage, internal error",
        means="a CUDA call in NCCL failed, or NCCL was used incorrectly: an earlier CUDA error, a wrong device, or "
        "an old driver",
        fault=EITHER,
        fix="run again with NCCL_DEBUG=WARN, which names the call; run `ddpdoctor check-env driver-min dup-gpu`",
        source=_NCCL,
    ),
    # loaders and processes
    KnownError(
        pattern=r"DataLoader worker .* killed by signal: Bus error|out of shared memory"
        r"|unable to allocate shared memory",
        shown="DataLoader worker (pid …) is killed by signal: Bus error",
        means="the shared memory (/dev/shm) is full; containers have 64 MB by default",
        fault=MACHINE,
        fix="start the container with --ipc=host or --shm-size=16g (Kubernetes: an emptyDir of medium Memory "
        "at /dev/shm), or use fewer workers; `ddpdoctor check-env shm`",
        source=f"{_ISSUE}5040",
    ),
    KnownError(
        pattern=r"DataLoader worker .*(?:exited unexpectedly|is killed by signal)",
        shown="DataLoader worker (pid(s) …) exited unexpectedly",
        means="a loader worker died without an exception: the OOM killer ended it, or it crashed in native code",
        fault=EITHER,
        fix="check `dmesg` for the OOM killer, and use fewer workers; num_workers=0 shows an exception in the dataset",
        source="torch/utils/data/_utils/signal_handling.py",
    ),
    KnownError(
        pattern=r"items of ancdata|Too many open files",
        shown="Too many open files; received 0 items of ancdata",
        means="the process reached its limit of open files: each tensor from a worker needs one, and stored batches "
        "keep theirs open",
        fault=EITHER,
        fix="raise the limit (ulimit -n 65536), call "
        "torch.multiprocessing.set_sharing_strategy('file_system'), and copy what you keep of a batch",
        source=f"{_ISSUE}11201",
    ),
    KnownError(
        pattern=r"[Cc]an't pickle|[Cc]annot pickle|Can't get local object",
        shown="Can't pickle local object; cannot pickle '…' object",
        means="a spawned process gets its function, dataset and collate_fn as pickles, and one of them is a lambda, a "
        "local function, or has an open file or lock",
        fault=SCRIPT,
        fix="define it at module level, and open files in the worker; or start the ranks with torchrun instead of "
        "mp.spawn",
        source=_MULTIPROCESSING,
    ),
    KnownError(
        pattern=r"before the\s+current process has finished its bootstrapping phase",
        shown="An attempt has been made to start a new process before the current process has finished its "
        "bootstrapping phase",
        means="the script spawns processes when it is imported, so each child would spawn its own",
        fault=SCRIPT,
        fix='move that code into a function, and call it below if __name__ == "__main__":',
        source=_MULTIPROCESSING,
    ),
    KnownError(
        pattern=r"size mismatch for",
        shown="size mismatch for …: copying a param with shape … from checkpoint",
        means="the checkpoint is from a model with other sizes",
        fault=SCRIPT,
        fix="build the model with the sizes in the checkpoint; `ddpdoctor check-checkpoint FILE --model "
        "train:build_model` lists the differences",
        source="torch/nn/modules/module.py, load_state_dict",
    ),
)
"""The order matters: if two match, the first one is used."""
