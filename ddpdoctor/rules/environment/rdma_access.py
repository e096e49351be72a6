"""DD336, DD337 and DD338: what a process needs to use an existing RDMA network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.amounts import format_about
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.rendezvous import read_node_count
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.rdma_ports import hca_filter, is_efa, need_rdma, network_ports, words
from ddpdoctor.rules.registry import CheckGroup, rule
from ddpdoctor.rules.settings import find_setting

if TYPE_CHECKING:
    from ddpdoctor.model.limits import Limit
    from ddpdoctor.model.links import Rdma, RdmaDevice
    from ddpdoctor.model.node import Node

GIB = 2**30
LITTLE_BYTES = GIB
"""Our choice: NCCL registers megabytes for every connection; below this a job on several nodes fails while it
connects."""
ENOUGH_BYTES = 64 * GIB
"""Our choice: this is enough. GPU memory does not count, and NCCL keeps far less in host memory."""
NO_NETWORK = "no RDMA network is up here"


@rule(
    "DD336",
    "peermem",
    Severity.WARNING,
    "RDMA cards cannot access GPU memory directly",
    group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"),
    reads="/proc/modules, /sys/kernel/mm/memory_peers, /proc/driver/nvidia/version, the kernel's release",
)
def check_peermem(node: Node) -> Answer:
    """Report GPUs and RDMA cards that can exchange data only through host memory."""
    rdma = need_rdma(node)
    ports = network_ports(node, rdma)
    if not ports:
        return skipped(NO_NETWORK)
    gpus = known(node.gpus)
    if gpus is not None and gpus.devices and all("GeForce" in gpu.name for gpu in gpus.devices):
        return skipped("GeForce GPUs have no GPUDirect RDMA")
    if rdma.peermem or rdma.dmabuf:
        return passed("nvidia-peermem is loaded" if rdma.peermem else "kernel and driver support DMA-BUF")
    if rdma.dmabuf is None:
        return unknown("nvidia-peermem is not loaded, and it is unknown whether the driver supports DMA-BUF")
    problem = Problem(
        summary="RDMA cards cannot access GPU memory: nvidia-peermem is not loaded and DMA-BUF is not possible, so "
        "data between nodes goes through host memory",
        evidence=(
            f"RDMA network: {words([device.name for device, _ in ports])}",
            "DMA-BUF needs kernel 5.12 or later and NVIDIA's open kernel modules",
        ),
        fix="modprobe nvidia-peermem (on the host)",
    )
    return judged([problem], "neither nvidia-peermem nor DMA-BUF")


@rule(
    "DD337",
    "memlock",
    Severity.ERROR,
    "The limit on locked memory is too low for RDMA",
    group=CheckGroup.LINKS,
    needs=("limits", "rdma", "gpus", "conf_files"),
    reads="RLIMIT_MEMLOCK, CAP_IPC_LOCK of this process, whether an RDMA network is up",
)
def check_memlock(node: Node) -> Answer:
    """Report a limit on locked memory that keeps NCCL from registering its buffers."""
    rdma = need_rdma(node)
    if not _devices(node, rdma):
        return skipped(NO_NETWORK)
    if not rdma.uverbs:
        return skipped("no RDMA device can be opened here; fix that first")
    return _judge_limit(node, need(node.limits).memlock, may_lock=bool(rdma.ipc_lock))


def _judge_limit(node: Node, limit: Limit | None, *, may_lock: bool) -> Answer:
    if limit is None:
        return unknown("RLIMIT_MEMLOCK could not be read")
    if limit.soft is None or limit.soft >= ENOUGH_BYTES:
        return passed(f"limit {_size(limit.soft)}")
    if may_lock:
        return passed(f"limit {_size(limit.soft)}, which does not apply: the process has CAP_IPC_LOCK")
    return judged([_locked(node, limit, limit.soft)], f"limit {_size(limit.soft)}, hard limit {_size(limit.hard)}")


def _locked(node: Node, limit: Limit, soft: int) -> Problem:
    return Problem(
        summary=f"RDMA can lock only {_size(soft)} of memory: NCCL fails if it registers more",
        evidence=(f"RLIMIT_MEMLOCK: soft limit {_size(soft)}, hard limit {_size(limit.hard)}",),
        fix=_unlock(node, limit),
        severity=Severity.ERROR if soft < LITTLE_BYTES else Severity.WARNING,
    )


def _unlock(node: Node, limit: Limit) -> str:
    if limit.hard is None:
        return "ulimit -l unlimited"
    if "SLURM_JOB_ID" in node.first.variables:
        return (
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf and LimitMEMLOCK=infinity for slurmd "
            "(systemctl edit slurmd)"
        )
    return (
        "in a container, docker run --ulimit memlock=-1 …; otherwise: "
        "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf, and log in again"
    )


def _size(number: int | None) -> str:
    return "unlimited" if number is None else format_about(number)


def _devices(node: Node, rdma: Rdma) -> tuple[RdmaDevice, ...]:
    """Return the devices of the RDMA network, including AWS's EFA, each once."""
    found = {device.name: device for device, _ in network_ports(node, rdma)}
    found |= {device.name: device for device in rdma.devices if is_efa(device)}
    return tuple(found.values())


@rule(
    "DD338",
    "uverbs",
    Severity.ERROR,
    "This process cannot open the RDMA devices",
    group=CheckGroup.LINKS,
    needs=("rdma", "gpus", "conf_files"),
    reads="/dev/infiniband/uverbs*, /sys/class/infiniband_verbs",
)
def check_uverbs(node: Node) -> Answer:
    """Report RDMA devices whose device file is missing or cannot be opened by this process."""
    rdma = need_rdma(node)
    devices = _devices(node, rdma)
    if not devices:
        return skipped(NO_NETWORK)
    shut = [device for device in devices if device.uverbs not in rdma.uverbs]
    wanted = hca_filter(node)
    asked = [device for device in shut if wanted.names(device.name) or device.uverbs in rdma.uverbs_denied]
    seen = f"{len(devices) - len(shut)} of {len(devices)} devices can be opened"
    if not shut or (len(shut) < len(devices) and not asked):
        return passed(seen)
    return judged([_shut(node, rdma, asked if len(shut) < len(devices) else shut)], seen)


def _shut(node: Node, rdma: Rdma, shut: list[RdmaDevice]) -> Problem:
    denied = [device for device in shut if device.uverbs in rdma.uverbs_denied]
    names = words([device.name for device in shut])
    files = words([f"/dev/infiniband/{device.uverbs}" for device in shut if device.uverbs] or ["/dev/infiniband"])
    what = "cannot be opened" if denied else ("are missing" if len(shut) > 1 else "is missing")
    return Problem(
        summary=f"This process cannot use RDMA: {files} {what}, so NCCL falls back to TCP sockets",
        evidence=(f"RDMA devices in /sys/class/infiniband that are up: {names}",),
        fix=_open(shut, denied),
        severity=Severity.ERROR if _over_nodes(node) else Severity.WARNING,
    )


def _open(shut: list[RdmaDevice], denied: list[RdmaDevice]) -> str:
    if all(device.uverbs is None for device in shut):
        return "modprobe ib_uverbs (on the host)"
    if denied:
        return (
            "ls -l /dev/infiniband; a container needs --device=/dev/infiniband, and a user needs a udev rule (mode "
            "0666)"
        )
    return (
        "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 …; "
        "in Kubernetes request the resource of the RDMA device plugin"
    )


def _over_nodes(node: Node) -> bool:
    """Say whether the job is known to need RDMA: it runs on several nodes, or a variable asks for it."""
    asked = find_setting(node, node.first, "NCCL_IB_HCA")
    network = find_setting(node, node.first, "NCCL_NET")
    count = read_node_count(node.first)
    spread = count is not None and count.nodes > 1
    return spread or asked is not None or (network is not None and network.value.lower() == "ib")
