"""Paths between ranks that could explain a low bandwidth, from NCCL's own log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.bandwidth.reasons import Effect, Weighed, weigh
from ddpdoctor.rules.environment.gpus import is_board, is_data_center
from ddpdoctor.rules.rdma_ports import label, network_ports, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.model.bandwidth import NcclLog
    from ddpdoctor.model.node import Gpu
    from ddpdoctor.rules.bandwidth.reasons import BenchNode, BenchView

SOURCE = "NCCL's log"
SOCKETS = "NET/Socket"
NVLS_RANKS = 3
"""NCCL uses NVLink SHARP only from three GPUs per host on (src/transport/nvls.cc: gpuCount <= 2 returns)."""
NVLS_PARTS = ("H20", "H100", "H200", "H800", "B100", "B200", "B300", "GB200", "GB300")
"""NVLink SHARP needs the third generation of NVSwitch or later, which came with Hopper."""


def nccl_reasons(view: BenchView) -> Iterator[Weighed]:
    """Yield reasons in NCCL's choices, or nothing if NCCL was not measured or its log was not captured."""
    if not view.nccl:
        return
    for place in view.places:
        logs = view.logs(place)
        if view.between_hosts:
            yield from _sockets(place, logs)
            yield from _no_gdr(place, logs)
        if len(place.members) > 1:
            yield from _host_memory(place, logs)
        if len(place.members) >= NVLS_RANKS and Collective.ALL_REDUCE in view.bench.settings.collectives:
            yield from _no_nvls(place, logs)


def joined_by_nvlink(place: BenchNode) -> bool:
    """Return whether every GPU of the machine has an NVLink that is up."""
    gpus = _gpus(place)
    return bool(gpus) and all(any(link.active for link in gpu.nvlinks or ()) for gpu in gpus)


def _gpus(place: BenchNode) -> tuple[Gpu, ...]:
    gpus = known(place.node.gpus)
    return gpus.devices if gpus is not None else ()


def _sockets(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks that send over TCP, and say whether something better is available."""
    those = [log for log in logs if log.network == "Socket" and (SOCKETS in log.transports or not log.transports)]
    if not those:
        return
    names = words([name for log in those for name in log.interfaces] or ["its log names no interface"])
    rdma = known(place.node.rdma)
    ports = network_ports(place.node, rdma) if rdma is not None else ()
    if ports:
        better = words([label(device, port) for device, port in ports])
        rate = ports[0][1].rate_text or ports[0][1].link_layer
        text = f"NCCL uses TCP to other hosts ({names}), although RDMA is up on {better} ({rate})"
        fix = "check NCCL_IB_DISABLE, NCCL_NET, NCCL_IB_HCA and, in a container, /dev/infiniband: ddpdoctor check-env"
        yield _weigh(Effect.OTHER_WAY, place, text, those, fix=fix)
    else:
        text = f"NCCL uses TCP to other hosts ({names}): no RDMA network is up here"
        yield _weigh(Effect.LIMIT, place, text, those)


def _no_gdr(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks whose data goes through host memory to an RDMA card although the GPUs could avoid that."""
    those = [log for log in logs if any(_goes_through_memory(way) for way in log.transports)]
    if those and all(is_data_center(gpu) for gpu in _gpus(place)):
        way = next(way for way in those[0].transports if _goes_through_memory(way))
        text = f"NCCL does not use GPUDirect RDMA to other hosts ({way}): data goes through host memory"
        fix = "modprobe nvidia-peermem, or a kernel and driver with DMA-BUF; see peermem and acs-iommu of check-env"
        yield _weigh(Effect.LIMIT, place, text, those, fix=fix)


def _goes_through_memory(way: str) -> bool:
    return way.startswith("NET/") and way != SOCKETS and not way.endswith("/GDRDMA")


def _host_memory(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    """Yield ranks that reach other ranks of their host through host memory."""
    those = [log for log in logs if "SHM" in log.transports]
    if not those:
        return
    if joined_by_nvlink(place):
        text = "NCCL uses host memory (SHM) between GPUs of this host, although they have NVLink"
        fix = "check nvidia-smi topo -p2p n, and unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL"
        yield _weigh(Effect.OTHER_WAY, place, text, those, fix=fix)
    else:
        text = "NCCL uses host memory (SHM) between GPUs of this host, because they have no usable peer access"
        yield _weigh(Effect.LIMIT, place, text, those, fix="nvidia-smi topo -p2p r; see p2p and acs-iommu of check-env")


def _no_nvls(place: BenchNode, logs: Iterable[NcclLog]) -> Iterator[Weighed]:
    those = [log for log in logs if log.nvls is False]
    gpus = _gpus(place)
    if not those or not gpus or not all(_has_nvls(gpu) for gpu in gpus):
        return
    text = "NCCL does not use NVLink SHARP (NVLS), although these GPUs and switches support it: all-reduce uses a ring"
    fix = "systemctl status nvidia-fabricmanager; it needs a driver of CUDA 12.1 or later, and a virtual machine's host"
    yield _weigh(Effect.SMALL, place, text, those, fix=fix)


def _has_nvls(gpu: Gpu) -> bool:
    """Return whether a GPU supports NVLink SHARP and is behind switches that are set up."""
    part = any(part in gpu.name.replace("-", " ").split() for part in NVLS_PARTS)
    return part and is_board(gpu) and gpu.fabric_state == "completed"


def _weigh(effect: Effect, place: BenchNode, text: str, logs: Iterable[NcclLog], *, fix: str = "") -> Weighed:
    ranks = tuple(sorted(log.rank for log in logs))
    whole = "" if set(ranks) == set(place.ranks) else f"{rank_list(ranks)}: "
    return weigh(effect, place, whole + text, SOURCE, fix=fix, ranks=ranks)
