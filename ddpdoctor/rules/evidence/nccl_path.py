"""DD816: NCCL connects ranks by a slower way than the machines have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import DataWay
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import grouped, name_list, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.evidence.connection_words import OFF
from ddpdoctor.rules.evidence.connections import NcclJob
from ddpdoctor.rules.evidence.state import RunState  # noqa: TC001 - the registry reads the annotation's name
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.node import Node
    from ddpdoctor.rules.evidence.connections import RankLink

NVLS_GPU = re.compile(r"\b(?:H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300)\b")
"""GPUs whose NVSwitches reduce in the switch: Hopper and later (NCCL's NVLS, since 2.17)."""
MOST_SAID = 2


@rule("DD816", "nccl-path", Severity.WARNING, "NCCL uses a slower connection than the machines support")
def check_nccl_path(state: RunState) -> Answer:
    """Report connections of NCCL that are slower than they could be."""
    job = NcclJob(state)
    if not any(one.edges or one.network for one in job.processes):
        return skipped("no NCCL_DEBUG=INFO lines show the connections")
    inside = list(_inside_host(job))
    problems = [
        *inside, *_despite_adapters(job), *_without_gdr(job), *_indirect(job), *_despite_nvlink(job),
        *_without_nvls(job), *_unequal_channels(job),
    ]  # fmt: skip
    return judged(problems, f"{len(job.links)} connections of {len(job.processes)} processes")


def _inside_host(job: NcclJob) -> Iterator[Problem]:
    if job.setting("NCCL_HOSTID") is not None:
        return  # NCCL was told that the processes are on several hosts
    links = [link for link in job.links if link.inside and link.edge.way is DataWay.TCP]
    for host, those in grouped((link.host, link) for link in links).items():
        ranks = _ranks(those)
        off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if _is_on(job, name, host)]
        yield Problem(
            summary=f"{rank_list(ranks)} on {host} exchange data over TCP, although they are on one host: neither P2P "
            "nor shared memory is used",
            ranks=ranks,
            hosts=(host,),
            evidence=(*_said(those), *_set(job, off, host)),
            fix=_unset(off)
            or "run `ddpdoctor check-env shm p2p` on that host; share memory between containers (docker run "
            "--ipc=host, or a "
            "larger /dev/shm)",
        )


def _despite_adapters(job: NcclJob) -> Iterator[Problem]:
    between = [link for link in job.links if link.edge.way is DataWay.TCP and link.inside is not True]
    for host, those in grouped((link.host, link) for link in between).items():
        found = {name for one in job.of_host(host) for name in one.adapters}
        adapters = sorted(found | _active_ports(job.machine(host)))
        if not adapters:
            continue
        off = [name for name in ("NCCL_IB_DISABLE",) if _is_on(job, name, host)]
        off += [name for name in ("NCCL_NET", "NCCL_IB_HCA") if job.setting(name, (host,))]
        yield Problem(
            summary=f"NCCL uses TCP to other hosts, although {host} has active InfiniBand or RoCE adapters "
            f"({name_list(adapters)})",
            ranks=tuple(sorted({link.own for link in those})),
            hosts=(host,),
            confidence=Confidence.MEDIUM,
            evidence=(*_said(those), *_set(job, off, host)),
            fix=_unset(off)
            or "run `ddpdoctor check-env uverbs memlock ib-hca-env` on that host to find out why NCCL cannot use them",
        )


def _active_ports(node: Node | None) -> set[str]:
    rdma = known(node.rdma) if node is not None else None
    devices = rdma.devices if rdma is not None else ()
    return {device.name for device in devices if any(port.state == "ACTIVE" for port in device.ports)}


def _without_gdr(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        over = [link for link in job.links if link.host == host and link.edge.text.startswith("NET/IB")]
        if not over or any(link.edge.way is DataWay.GDRDMA for link in over):
            continue
        node = job.machine(host)
        modules = _gdr_modules(node) if node is not None else []
        if not modules:
            continue
        off = [name for name in ("NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_DISABLE") if job.setting(name, (host,))]
        yield Problem(
            summary=f"the adapters of {host} do not access GPU memory (no GDRDMA), although {' and '.join(modules)} "
            f"{'are' if len(modules) > 1 else 'is'} loaded: all data go through host memory",
            ranks=_ranks(over),
            hosts=(host,),
            confidence=Confidence.MEDIUM,
            evidence=(*_said(over), *_set(job, off, host)),
            fix=_unset(off)
            or "run `ddpdoctor check-env peermem acs-iommu` on that host; check the distance of GPUs and "
            "adapters with nvidia-smi topo -m: beyond PHB, NCCL does not use GDRDMA",
        )


def _gdr_modules(node: Node) -> list[str]:
    """Return what lets adapters reach the memory of this node's GPUs."""
    from ddpdoctor.rules.environment.gpus import is_data_center

    rdma, gpus = known(node.rdma), known(node.gpus)
    if rdma is None or (gpus is not None and not any(map(is_data_center, gpus.devices))):
        return []
    return [*(["nvidia_peermem"] if rdma.peermem else []), *(["DMA-BUF"] if rdma.dmabuf else [])]


def _indirect(job: NcclJob) -> Iterator[Problem]:
    links = [link for link in job.links if link.edge.way is DataWay.INDIRECT]
    for host, those in grouped((link.host, link) for link in links).items():
        yield Problem(
            summary=f"{rank_list(_ranks(those))} on {host} communicate through a third GPU (P2P/indirect)",
            ranks=_ranks(those),
            hosts=(host,),
            evidence=_said(those),
            fix="choose directly linked GPUs (CUDA_VISIBLE_DEVICES; nvidia-smi topo -m); "
            "`ddpdoctor check-env nvlink` finds links that are down",
        )


def _despite_nvlink(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        links = [link for link in job.links if link.host == host]
        shared = [link for link in links if link.edge.way is DataWay.SHM]
        node = job.machine(host)
        gpus = known(node.gpus) if node is not None else None
        linked = [gpu for gpu in (gpus.devices if gpus else ()) if any(link.active for link in gpu.nvlinks or ())]
        if not shared or len(linked) < 2 or any(link.edge.way in {DataWay.P2P, DataWay.INDIRECT} for link in links):
            continue
        off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") if job.setting(name, (host,))]
        yield Problem(
            summary=f"{rank_list(_ranks(shared))} on {host} exchange data through host memory, although their "
            "GPUs have NVLink",
            ranks=_ranks(shared),
            hosts=(host,),
            confidence=Confidence.MEDIUM,
            evidence=(*_said(shared), *_set(job, off, host)),
            fix=_unset(off) or "run `ddpdoctor check-env p2p nvlink` on that host",
        )


def _without_nvls(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        node = job.machine(host)
        gpus = known(node.gpus) if node is not None else None
        behind = [
            gpu
            for gpu in (gpus.devices if gpus else ())
            if gpu.fabric_state == "completed" and NVLS_GPU.search(gpu.name)
        ]
        if behind and {one.nvls for one in job.of_host(host)} == {False}:
            yield Problem(
                summary=f"NVLS is not available on {host}, although its {behind[0].name} are behind NVSwitches: "
                "the switches do no reductions",
                hosts=(host,),
                confidence=Confidence.MEDIUM,
                fix="run `ddpdoctor check-env fabric` on that host; NVLS needs driver 530 or later, a fabric manager "
                "of the driver's version, and all GPUs of a partition in a virtual machine",
            )


def _unequal_channels(job: NcclJob) -> Iterator[Problem]:
    """Compare processes that have only one communicator, since the line does not name it."""
    single = [one for one in job.processes if len(one.members) == 1 and one.channels is not None]
    for communicator, those in grouped((one.members[0].communicator, one) for one in single).items():
        counts = {one.members[0].rank: one.channels or 0 for one in those}
        if len(set(counts.values())) > 1 and not communicator.startswith("of "):
            few = min(counts.values())
            behind = tuple(sorted(rank for rank, count in counts.items() if count == few))
            yield Problem(
                summary=f"{rank_list(behind)} set up {few} channels for collectives, but others {max(counts.values())}",
                ranks=behind,
                hosts=tuple(sorted({one.who.host for one in those if one.members[0].rank in behind})),
                fix=(
                    "set the same NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS and NCCL_TOPO_FILE on all ranks, or unset them"
                ),
            )


def _is_on(job: NcclJob, name: str, host: str) -> bool:
    value = job.setting(name, (host,))
    return value is not None and value not in OFF


def _set(job: NcclJob, names: Sequence[str], host: str) -> tuple[str, ...]:
    return tuple(f"{name}={job.setting(name, (host,))}" for name in names)


def _unset(names: Sequence[str]) -> str:
    return f"unset {' '.join(names)}" if names else ""


def _ranks(links: Sequence[RankLink]) -> tuple[int, ...]:
    return tuple(sorted({rank for link in links for rank in link.pair}))


def _said(links: Sequence[RankLink]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(link.edge.said for link in links))[:MOST_SAID]
