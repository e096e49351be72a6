"""DD816: NCCL uses a slower transport than the machines offer; and the connections in its log."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.log_facts import DataWay, MachineSeen, NcclPaths
from ddpdoctor.model.reading import known
from ddpdoctor.model.words import count_of, grouped, name_list, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpdoctor.model.log_facts import NcclEdge, Who
    from ddpdoctor.model.node import Gpu, Node
    from ddpdoctor.rules.logs.state import RunState

SLOW_START_S = 30.0  # from here on the set-up of a communicator is worth a word: the facts' figure
MOST_PAIRS = 4
MOST_ALGORITHMS = 4
# Variables that switch something off when they are set, and what.
DISABLING = {
    "NCCL_P2P_DISABLE": "no direct data exchange between the GPUs of a host",
    "NCCL_SHM_DISABLE": "no shared memory between the processes of a host",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_IGNORE_NET_MISMATCH": "hosts with different networks are accepted, but may hang",
}
# Variables that switch something off when they are 0.
ENABLING = {
    "NCCL_NVLS_ENABLE": "NVLink SHARP is off",
    "NCCL_DMABUF_ENABLE": "adapters do not use DMA-BUF for GPU memory",
    "NCCL_CUMEM_ENABLE": "cuMem does not allocate the buffers",
}
OFF = {"", "0"}
_NUMBER = re.compile(r"/\d+(?:\(\d+\))?(?=/|$)")
# GPUs whose NVSwitches reduce in the switch: Hopper and later (NCCL's NVLS, since 2.17).
NVLS_GPU = re.compile(r"\b(?:H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300)\b")
MOST_SAID = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLink:
    """A connection between two ranks."""

    process: NcclPaths
    edge: NcclEdge
    own: int  # The global rank, as far as it is known; else the one in the communicator. So is ``peer``.
    peer: int
    inside: bool | None  # both ranks are on one host; None: that cannot be told

    @property
    def pair(self) -> tuple[int, int]:
        return min(self.own, self.peer), max(self.own, self.peer)

    @property
    def host(self) -> str:
        return self.process.who.host


class NcclJob:
    """All of a job's connections in NCCL's log."""

    def __init__(self, state: RunState) -> None:
        self.processes = state.all[NcclPaths]
        self.machines: dict[str, Node] = {_short(machine.node.host): machine.node for machine in state.all[MachineSeen]}
        self._members: dict[tuple[str, int], list[Who]] = {}
        for process in self.processes:
            for member in process.members:
                self._members.setdefault((member.communicator, member.rank), []).append(process.who)

    @property
    def hosts(self) -> list[str]:
        return sorted({process.who.host for process in self.processes})

    @cached_property
    def links(self) -> tuple[RankLink, ...]:
        found = []
        for process in self.processes:
            for edge in process.edges:
                # The line does not name its communicator. What it says counts where all that fit say the same.
                fitting = [m for m in process.members if m.rank == edge.own and edge.peer < m.ranks]
                peers = [self._members.get((member.communicator, edge.peer), []) for member in fitting]
                known = [peer[0] for peer in peers if len(peer) == 1]
                ranks, here = {who.rank for who in known}, process.who
                # Containers on several machines may have one name, so addresses must not differ.
                inside = {
                    who.host == here.host != "" and ("" in {who.address, here.address} or who.address == here.address)
                    for who in known
                    if len(known) == len(peers)
                }
                rank, own = next(iter(ranks), None), here.rank
                named = len(ranks) == 1 and rank is not None and own is not None
                found.append(RankLink(
                    process=process, edge=edge,
                    own=own if named and own is not None else edge.own,
                    peer=rank if named and rank is not None else edge.peer,
                    inside=inside.pop() if len(inside) == 1 else None,
                ))  # fmt: skip
        return tuple(found)

    def machine(self, host: str) -> Node | None:
        return self.machines.get(_short(host))

    def gpus(self, host: str) -> Sequence[Gpu]:
        node = self.machine(host)
        gpus = known(node.gpus) if node is not None else None
        return gpus.devices if gpus is not None else ()

    def setting(self, name: str, hosts: tuple[str, ...] = ()) -> str | None:
        """Return the value of a variable in the environment of a process on these hosts, by default on any."""
        values = (process.settings.get(name) for process in self.processes if not hosts or process.who.host in hosts)
        return next((value for value in values if value is not None), None)


def _short(host: str) -> str:
    """Return a host's name as NCCL writes it: without its domain."""
    return host.partition(".")[0]


def explain_nccl(state: RunState) -> Iterator[str]:
    """Yield the network, connections, algorithms, settings and startup in NCCL's log."""
    job = NcclJob(state)
    if not job.processes:
        return
    for network, hosts in grouped(
        (process.network, process.who.host) for process in job.processes if process.network
    ).items():
        named = "TCP (Socket)" if network == "Socket" else network
        adapters = sorted(
            {name for process in job.processes if process.network == network for name in process.adapters}
        )
        found = f"; it found the adapters {name_list(adapters)}" if adapters else ""
        yield f"NCCL uses the network {named} on {name_list(list(dict.fromkeys(hosts)))}{found}"
    for way, links in grouped((link.edge.way, link) for link in job.links).items():
        pairs = sorted({link.pair for link in links})
        texts = list(dict.fromkeys(_NUMBER.sub("", link.edge.text) for link in links))
        counts = sorted({link.edge.channels for link in links})
        each = f"{counts[0]} to {counts[-1]} channels" if len(counts) > 1 else count_of(counts[0], "channel")
        shown = name_list([f"{a}-{b}" for a, b in pairs], MOST_PAIRS)
        joined = f"{count_of(len(pairs), 'pair')} of ranks {way.value} ({name_list(texts)})"
        yield f"{joined}: {shown}, {each} each way"
    channels = sorted({process.channels for process in job.processes if process.channels is not None})
    if channels:
        yield f"NCCL uses {' or '.join(map(str, channels))} channels for collectives"
    chosen: Counter[str] = Counter()
    for process in job.processes:
        chosen.update(process.algorithms)
    if chosen:
        most = [f"{name} ({count_of(count, 'call')})" for name, count in chosen.most_common(MOST_ALGORITHMS)]
        yield f"NCCL's algorithms and protocols: {', '.join(most)}"
    nvls = {process.nvls for process in job.processes if process.nvls is not None}
    if len(nvls) == 1:
        yield f"NVLS (reductions in the NVSwitch) is {'available' if True in nvls else 'not available'}"
    for name, meaning in (DISABLING | ENABLING).items():
        value = job.setting(name)
        if value is not None and (value in OFF) is (name in ENABLING):
            yield f"{name}={value}: {meaning}"
    slowest_s = max(process.init_s or 0.0 for process in job.processes)
    if slowest_s:
        late = ", which delays only the start" if slowest_s > SLOW_START_S else ""
        yield f"setting up a communicator took up to {slowest_s:.1f} s{late}"


@rule("DD816", "nccl-path", Severity.WARNING, "NCCL uses a slower connection than the machines support")
def check_nccl_path(state: RunState) -> Answer:
    """Report connections of NCCL that are slower than they could be."""
    job = NcclJob(state)
    if not any(process.edges or process.network for process in job.processes):
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
        problem = _slow_links(
            job, host, those, off,
            f"{rank_list(ranks)} on {host} exchange data over TCP, although they are on one host: neither P2P nor "
            "shared memory is used",
            "run `ddpdoctor check-env shm p2p` on that host; share memory between containers (docker run --ipc=host, "
            "or a larger /dev/shm)",
        )  # fmt: skip
        yield replace(problem, confidence=Confidence.HIGH)


def _despite_adapters(job: NcclJob) -> Iterator[Problem]:
    between = [link for link in job.links if link.edge.way is DataWay.TCP and link.inside is not True]
    for host, those in grouped((link.host, link) for link in between).items():
        found = {name for process in job.processes if process.who.host == host for name in process.adapters}
        node = job.machine(host)
        rdma = known(node.rdma) if node is not None else None
        devices = rdma.devices if rdma is not None else ()
        adapters = sorted(
            found | {device.name for device in devices if any(port.state == "ACTIVE" for port in device.ports)}
        )
        if not adapters:
            continue
        off = [name for name in ("NCCL_IB_DISABLE",) if _is_on(job, name, host)]
        off += [name for name in ("NCCL_NET", "NCCL_IB_HCA") if job.setting(name, (host,))]
        problem = _slow_links(
            job, host, those, off,
            f"NCCL uses TCP to other hosts, although {host} has active InfiniBand or RoCE adapters "
            f"({name_list(adapters)})",
            "run `ddpdoctor check-env uverbs memlock ib-hca-env` on that host to find out why NCCL cannot use them",
        )  # fmt: skip
        yield replace(problem, ranks=tuple(sorted({link.own for link in those})))


def _without_gdr(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        over = [link for link in job.links if link.host == host and link.edge.text.startswith("NET/IB")]
        if not over or any(link.edge.way is DataWay.GDRDMA for link in over):
            continue
        from ddpdoctor.rules.environment.gpus import is_data_center

        node = job.machine(host)
        rdma, gpus = (known(node.rdma), known(node.gpus)) if node is not None else (None, None)
        if rdma is None or (gpus is not None and not any(map(is_data_center, gpus.devices))):
            continue
        # What lets adapters reach the memory of this node's GPUs.
        modules = [*(["nvidia_peermem"] if rdma.peermem else []), *(["DMA-BUF"] if rdma.dmabuf else [])]
        if not modules:
            continue
        off = [name for name in ("NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_DISABLE") if job.setting(name, (host,))]
        yield _slow_links(
            job, host, over, off,
            f"the adapters of {host} do not access GPU memory (no GDRDMA), although {' and '.join(modules)} "
            f"{'are' if len(modules) > 1 else 'is'} loaded: all data go through host memory",
            "run `ddpdoctor check-env peermem acs-iommu` on that host; check the distance of GPUs and adapters with "
            "nvidia-smi topo -m: beyond PHB, NCCL does not use GDRDMA",
        )  # fmt: skip


def _indirect(job: NcclJob) -> Iterator[Problem]:
    links = [link for link in job.links if link.edge.way is DataWay.INDIRECT]
    for host, those in grouped((link.host, link) for link in links).items():
        problem = _slow_links(
            job, host, those, (),
            f"{rank_list(_ranks(those))} on {host} communicate through a third GPU (P2P/indirect)",
            "choose directly linked GPUs (CUDA_VISIBLE_DEVICES; nvidia-smi topo -m); `ddpdoctor check-env nvlink` "
            "finds links that are down",
        )  # fmt: skip
        yield replace(problem, confidence=Confidence.HIGH)


def _despite_nvlink(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        links = [link for link in job.links if link.host == host]
        shared = [link for link in links if link.edge.way is DataWay.SHM]
        linked = [gpu for gpu in job.gpus(host) if any(link.active for link in gpu.nvlinks or ())]
        if not shared or len(linked) < 2 or any(link.edge.way in {DataWay.P2P, DataWay.INDIRECT} for link in links):
            continue
        off = [name for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL") if job.setting(name, (host,))]
        yield _slow_links(
            job, host, shared, off,
            f"{rank_list(_ranks(shared))} on {host} exchange data through host memory, although their GPUs have NVLink",
            "run `ddpdoctor check-env p2p nvlink` on that host",
        )  # fmt: skip


def _without_nvls(job: NcclJob) -> Iterator[Problem]:
    for host in job.hosts:
        behind = [gpu for gpu in job.gpus(host) if gpu.fabric_state == "completed" and NVLS_GPU.search(gpu.name)]
        if behind and {process.nvls for process in job.processes if process.who.host == host} == {False}:
            although = f"although its {behind[0].name} GPUs are behind NVSwitches: the switches do not reduce data"
            summary = f"NVLS is not available on {host}, {although}"
            fix = (
                "run `ddpdoctor check-env fabric` on that host; NVLS needs driver 530 or later, a fabric manager "
                "of the driver's version, and all GPUs of a partition in a virtual machine"
            )
            yield Problem(summary=summary, hosts=(host,), confidence=Confidence.MEDIUM, fix=fix)


def _unequal_channels(job: NcclJob) -> Iterator[Problem]:
    """Compare processes that have only one communicator, since the line does not name it."""
    single = [process for process in job.processes if len(process.members) == 1 and process.channels is not None]
    for communicator, those in grouped((paths.members[0].communicator, paths) for paths in single).items():
        counts = {paths.members[0].rank: paths.channels or 0 for paths in those}
        if len(set(counts.values())) > 1 and not communicator.startswith("of "):
            few = min(counts.values())
            behind = tuple(sorted(rank for rank, count in counts.items() if count == few))
            hosts = tuple(sorted({paths.who.host for paths in those if paths.members[0].rank in behind}))
            summary = f"{rank_list(behind)} set up {few} channels for collectives, but others {max(counts.values())}"
            fix = "set the same NCCL_MIN_NCHANNELS, NCCL_MAX_NCHANNELS and NCCL_TOPO_FILE on all ranks, or unset them"
            yield Problem(summary=summary, ranks=behind, hosts=hosts, fix=fix)


def _is_on(job: NcclJob, name: str, host: str) -> bool:
    value = job.setting(name, (host,))
    return value is not None and value not in OFF


def _slow_links(
    job: NcclJob, host: str, links: Sequence[RankLink], off: Sequence[str], summary: str, fix: str
) -> Problem:  # fmt: skip
    """Return the problem of a host's connections, which variables that are set (``off``) explain, if there are any."""
    said = list(dict.fromkeys(link.edge.said for link in links))[:MOST_SAID]
    said += [f"{name}={job.setting(name, (host,))}" for name in off]
    return Problem(
        summary=summary, ranks=_ranks(links), hosts=(host,), confidence=Confidence.MEDIUM, evidence=tuple(said),
        fix=f"unset {' '.join(off)}" if off else fix,
    )  # fmt: skip


def _ranks(links: Sequence[RankLink]) -> tuple[int, ...]:
    return tuple(sorted({rank for link in links for rank in link.pair}))
