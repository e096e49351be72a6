"""DD324 and DD325: the paths between GPUs, network cards and processors: ACS, IOMMU, NUMA."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import first_names, name_list, rank_list
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.visible_devices import VARIABLE, read_visible
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment.gpus import wrong_copies
from ddpdoctor.rules.environment.pci import by_bus_id, describe, gpus_of, is_gpu, is_nic
from ddpdoctor.rules.environment.processes import ranks_of
from ddpdoctor.rules.rdma_ports import network_ports
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.links import Pci, PciDevice
    from ddpdoctor.model.node import Node, NodeProcess

SHOWN = 4
"""How many bridges or ranks are named. If there are more, their number follows."""


@rule(
    "DD324",
    "acs-iommu",
    Severity.WARNING,
    "ACS or the IOMMU blocks direct PCIe transfers between GPUs",
    group=CheckGroup.LINKS,
    needs=("pci", "rdma", "gpu_trial", "conf_files"),
    reads="PCI configuration of the bridges above GPUs (root only), /sys/class/iommu, iommu_group/type, /proc/cmdline",
)
def check_acs_iommu(node: Node) -> Answer:
    """Report ACS or an IOMMU that slows traffic between GPUs, or between a GPU and its network card."""
    pci = need(node.pci)
    gpus = gpus_of(pci)
    if not gpus:
        return skipped("there is no NVIDIA or AMD GPU on the PCI bus")
    if pci.virtual_machine:
        return skipped("a virtual machine: its host needs ACS and the IOMMU to isolate guests")
    if not _has_peers(node, pci):
        return passed("no GPU here has a PCIe peer: GeForce cards have no peer access")
    wrong = tuple(f"{copy.source} to {copy.target}" for copy in wrong_copies(node))
    problems = [*_redirecting(pci, wrong), *_translating(pci, wrong)]
    bridges = [by_bus_id(pci).get(bus_id) for gpu in gpus for bus_id in gpu.upstream]
    unread = any(bridge is not None and bridge.acs_redirect is None for bridge in bridges)
    state = "passes addresses through" if pci.iommu_passthrough else "translates"
    seen = f"the IOMMU {state}" if pci.iommu else "no IOMMU is active"
    if unread and not problems:
        return skipped(f"only root can read the ACS of bridges; {seen}")
    return judged(problems, f"{seen}; ACS {'redirects' if problems else 'does not redirect'} between peers")


def _has_peers(node: Node, pci: Pci) -> bool:
    """Say whether there are two GPUs, or a GPU and an RDMA network, that could bypass the processor."""
    able = [gpu for gpu in gpus_of(pci) if "GeForce" not in pci.models.get(gpu.bus_id, "")]
    rdma = known(node.rdma)
    return len(able) > 1 or (bool(able) and rdma is not None and bool(network_ports(node, rdma)))


def _redirecting(pci: Pci, wrong: tuple[str, ...]) -> list[Problem]:
    """Report bridges with ACS below the nearest bridge that a GPU shares with a peer."""
    bridges = by_bus_id(pci)
    peers = [device for device in pci.devices if is_gpu(device) or is_nic(device)]
    guilty: dict[str, PciDevice] = {}
    for device in peers:
        others = peers if is_gpu(device) else list(gpus_of(pci))
        for bus_id in _own_bridges(device, others):
            if bus_id in bridges and bridges[bus_id].acs_redirect:
                guilty[bus_id] = device
    if not guilty:
        return []
    some = list(guilty)
    return [
        Problem(
            summary=(
                f"Access Control Services of {len(guilty)} PCIe bridge{'s' * (len(guilty) > 1)} send GPU peer "
                "traffic through the CPU: GPUDirect is slow or hangs"
            ),
            evidence=(
                f"ACS redirects at {first_names(some)}, above {describe(pci, guilty[some[0]])}",
                *_copy_words(wrong),
            ),
            fix=f"for b in {' '.join(guilty)}; do setpci -s $b ECAP_ACS+6.w=0000; done (until the next boot; "
            "permanently: disable ACS in the BIOS)",
            severity=Severity.ERROR if wrong else None,
        )
    ]


def _own_bridges(device: PciDevice, peers: list[PciDevice]) -> tuple[str, ...]:
    """Return the bridges below the nearest one that a device shares with a peer, or () if it shares none."""
    shared = {bus_id for peer in peers if peer is not device for bus_id in peer.upstream}
    below: list[str] = []
    for bus_id in device.upstream:
        if bus_id in shared:
            return tuple(below)
        below.append(bus_id)
    return ()


def _translating(pci: Pci, wrong: tuple[str, ...]) -> list[Problem]:
    if not pci.iommu or pci.iommu_passthrough:
        return []
    return [
        Problem(
            summary="The IOMMU translates all GPU addresses: copies between GPUs and to RDMA cards are slow, and "
            "NVIDIA does not support this over PCIe",
            evidence=("/sys/class/iommu is not empty, and the GPUs are not in passthrough mode", *_copy_words(wrong)),
            fix="add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub; update-grub (or grub2-mkconfig); reboot",
            severity=Severity.ERROR if wrong else None,
        )
    ]


def _copy_words(wrong: tuple[str, ...]) -> tuple[str, ...]:
    return (f"copies between GPUs failed or came out wrong: {', '.join(wrong[:SHOWN])}",) if wrong else ()


@rule(
    "DD325",
    "numa",
    Severity.WARNING,
    "A rank runs on CPUs far from its GPU, or the NUMA nodes of the GPUs are unknown",
    group=CheckGroup.LINKS,
    needs=("pci", "gpus"),
    reads="/sys/bus/pci/devices/*/{numa_node,local_cpulist} of GPUs, sched_getaffinity of each rank",
)
def check_numa(node: Node) -> Answer:
    """Report ranks that can only run on CPUs of a different NUMA node than their GPU."""
    pci = need(node.pci)
    gpus = gpus_of(pci)
    if not gpus:
        return skipped("there is no NVIDIA or AMD GPU on the PCI bus")
    if pci.numa_nodes < 2:
        return skipped("there is only one NUMA node")
    placed = [(process, gpu) for process in node.processes if (gpu := _gpu_of(node, pci, process)) is not None]
    far = [(process, gpu) for process, gpu in placed if _is_far(process, gpu)]
    lost = [] if pci.virtual_machine else [gpu for gpu in gpus if gpu.numa_node is None]
    problems = [*([_far(far)] if far else []), *([_lost(pci, lost)] if lost else [])]
    nodes = ", ".join(f"{gpu.bus_id} on {'none' if gpu.numa_node is None else gpu.numa_node}" for gpu in gpus[:SHOWN])
    ranks = f"{len(placed) - len(far)} of {len(placed)} ranks may run near their GPU; " if placed else ""
    return judged(problems, f"{ranks}NUMA nodes of GPUs: {nodes}{', …' if len(gpus) > SHOWN else ''}")


def _gpu_of(node: Node, pci: Pci, process: NodeProcess) -> PciDevice | None:
    """Return the GPU that cuda:LOCAL_RANK means, or None if it is not known."""
    if process.local_rank is None:
        return None
    gpus = known(node.gpus)
    if gpus is not None and gpus.devices:
        bus_ids = {gpu.uuid: gpu.bus_id for gpu in gpus.devices}
    else:
        bus_ids = {bus_id: bus_id for bus_id in pci.nvidia_proc_gpus}
    seen = read_visible(process.variables.get(VARIABLE), tuple(bus_ids)).devices
    # A task that sees one GPU finds it at 0, whatever its local rank is.
    index = 0 if len(seen) == 1 else process.local_rank
    if index >= len(seen) or seen[index] not in bus_ids:
        return None
    return by_bus_id(pci).get(bus_ids[seen[index]])


def _is_far(process: NodeProcess, gpu: PciDevice) -> bool:
    return bool(gpu.local_cpus and process.cpus) and not set(process.cpus) & set(gpu.local_cpus)


def _far(far: list[tuple[NodeProcess, PciDevice]]) -> Problem:
    ranks = ranks_of(process for process, _ in far)
    one, near = len(far) == 1, far[0][1].numa_node or 0
    who = name_list([*([rank_list(ranks)] if ranks else []), *(_name(p) for p, _ in far if p.rank is None)])
    return Problem(
        summary=(
            f"{who[0].upper()}{who[1:]} can only run on CPUs of another NUMA node than "
            f"{'its GPU' if one else 'their GPUs'}"
        ),
        evidence=tuple(
            f"{_name(process)}: CPUs {_cpu_words(process.cpus)}; GPU {gpu.bus_id} is near CPUs "
            f"{_cpu_words(gpu.local_cpus)}"
            for process, gpu in far[:SHOWN]
        ),
        fix=f"torchrun --numa-binding=node …, or: numactl --cpunodebind={near} --membind={near} in front of "
        f"{_name(far[0][0])}",
        ranks=ranks,
    )


def _name(process: NodeProcess) -> str:
    return f"process {process.pid}" if process.rank is None else f"rank {process.rank}"


def _lost(pci: Pci, lost: list[PciDevice]) -> Problem:
    many = len(lost) > 1
    return Problem(
        summary=f"The machine does not report on which of its {pci.numa_nodes} NUMA nodes "
        f"{f'{len(lost)} GPUs are' if many else f'{describe(pci, lost[0])} is'}: ranks cannot be placed near them",
        evidence=(f"numa_node is -1 of {', '.join(gpu.bus_id for gpu in lost[:SHOWN])}",),
        fix="check the NUMA settings in the BIOS (SNC, NPS), and update the BIOS",
    )


def _cpu_words(cpus: tuple[int, ...]) -> str:
    """Return "0-55,112-167"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
