"""DD320 to DD325: links between GPUs, network cards and processors: PCIe, NVLink, NVSwitches, peer access, NUMA."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.launch import VARIABLE, read_visible
from ddpdoctor.model.reading import known, need
from ddpdoctor.model.words import first_names, grouped, name_list, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.environment import gpus as nvidia
from ddpdoctor.rules.environment.launch import ranks_of
from ddpdoctor.rules.network import network_ports
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.node import Gpu, GpuPair, Node, NodeProcess, Pci, PciDevice

    # The GPU or card, the lower end of a link above it, which reports width and speed, its upper end, and the lanes
    # that both ends have.
    PcieLink = tuple[PciDevice, PciDevice, PciDevice | None, int]


NVIDIA, AMD = 0x10DE, 0x1002
VGA = 0x0300
GPU_CLASSES = frozenset({VGA, 0x0302, 0x0380, 0x1200})
NIC_CLASSES = frozenset({0x0200, 0x0207})


def is_gpu(device: PciDevice) -> bool:
    """Return whether it is a GPU from NVIDIA or AMD."""
    return device.vendor in {NVIDIA, AMD} and device.device_class >> 8 in GPU_CLASSES


def gpus_of(pci: Pci) -> tuple[PciDevice, ...]:
    """Return the GPUs, by bus id."""
    return tuple(device for device in pci.devices if is_gpu(device))


def by_bus_id(pci: Pci) -> dict[str, PciDevice]:
    """Return all devices by bus id."""
    return {device.bus_id: device for device in pci.devices}


def describe(pci: Pci, device: PciDevice) -> str:
    """Return "GPU 0000:1b:00.0 (NVIDIA H100 80GB HBM3)" or "network card 0000:18:00.0"."""
    if not is_gpu(device):
        return f"network card {device.bus_id}"
    model = pci.models.get(device.bus_id)
    return f"GPU {device.bus_id} ({model})" if model else f"GPU {device.bus_id}"


@rule(
    "DD320", "pcie", Severity.ERROR, "A PCIe link has fewer lanes or a lower speed than both ends support",
    group=CheckGroup.LINKS, needs=("pci", "rdma"),
    reads="/sys/bus/pci/devices/*/{current,max}_link_{width,speed} of GPUs, RDMA cards and the bridges above them",
)  # fmt: skip
def check_pcie(node: Node) -> Answer:
    """Report PCIe links of GPUs and RDMA cards with fewer lanes or a lower speed than both ends support."""
    pci = need(node.pci)
    rdma = known(node.rdma)
    cards = {device.bus_id for device in rdma.devices} if rdma is not None else set()
    devices = [device for device in pci.devices if is_gpu(device) or device.bus_id in cards]
    # In a chain, downstream and upstream ports of switches alternate.
    known_ids = by_bus_id(pci)
    links: dict[str, PcieLink] = {}
    for device in devices:
        chain = [known_ids[bus_id] for bus_id in device.upstream if bus_id in known_ids]
        ends = [device, *chain]
        for lower, upper in zip(ends[::2], [*ends[1::2], None], strict=False):
            # A slot with fewer lanes than the card is the limit.
            widest = min((end.max_width for end in (lower, upper) if end and end.max_width), default=None)
            if (upper is not None or lower is device) and widest is not None:
                links.setdefault(lower.bus_id, (device, lower, upper, widest))
    judgeable = [link for link in links.values() if link[1].width is not None]
    if not judgeable:
        return skipped("no GPU or RDMA card shows its PCIe link" if devices else "no GPU and no RDMA card")
    problems = [problem for link in judgeable for problem in _judge_link(pci, link, devices)]
    widths = Counter(f"x{lower.width}" for device, lower, _, _ in judgeable if lower is device)
    seen = ", ".join(f"{count} at {width}" for width, count in widths.most_common())
    return judged(problems, f"links of GPUs and RDMA cards: {seen}; speed of idle GPUs is not judged")


def _judge_link(pci: Pci, link: PcieLink, devices: list[PciDevice]) -> Iterator[Problem]:
    mine, lower, upper, widest = link
    width, speed = lower.width or 0, lower.speed_gt_s
    fastest = min((end.max_speed_gt_s for end in (lower, upper) if end and end.max_speed_gt_s), default=None)
    where = f"The PCIe link of {'' if lower is mine else f'bridge {lower.bus_id} above '}{describe(pci, mine)}"
    if not pci.virtual_machine and upper is not None and width < widest:
        model = pci.models.get(mine.bus_id)  # without a name, a VGA card is one for desktops and laptops
        is_consumer = "GeForce" in model if model else mine.device_class >> 8 == VGA
        summary = f"{where} has only {width} of {widest} lanes: transfers take {widest // width} times as long"
        own = f"{lower.bus_id}: current_link_width {width}, max_link_width {lower.max_width}"
        above = f"the port above it: max_link_width {upper.max_width}"
        fix = f"reseat the card and its riser, then check again: lspci -vvs {lower.bus_id} | grep Lnk"
        severity = Severity.WARNING if is_consumer else Severity.ERROR
        yield Problem(summary=summary, evidence=(own, above), fix=fix, severity=severity)
    elif pci.virtual_machine or upper is None or (lower is mine and is_gpu(mine)):
        if lower is mine:
            yield from _beside_peers(pci, mine, devices)
    elif speed is not None and fastest is not None and speed < fastest:
        if is_gpu(mine) and mine.speed_gt_s is not None and mine.speed_gt_s < fastest:
            return  # bridges above an idle consumer GPU slow down with it
        summary = f"{where} runs at {speed:g} of {fastest:g} GT/s"
        evidence = (f"{lower.bus_id}: current_link_speed {speed:g} GT/s, both ends support {fastest:g} GT/s",)
        fix = "check the slot's PCIe generation in the BIOS, and reseat the card and its riser"
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.WARNING)


def _beside_peers(pci: Pci, mine: PciDevice, devices: list[PciDevice]) -> Iterator[Problem]:
    """Compare a link with those of other GPUs of the model. Without a view of the slot, nothing else can be done."""
    model = (mine.vendor, mine.device)
    peers = [device for device in devices if (device.vendor, device.device) == model and device is not mine]
    wider = [peer for peer in peers if (peer.width or 0) > (mine.width or 0)]
    faster = [peer for peer in peers if (peer.speed_gt_s or 0) > (mine.speed_gt_s or 0)]
    if wider:
        most_lanes, virtual = max(device.width or 0 for device in wider), pci.virtual_machine
        has = f"{describe(pci, mine)} has a PCIe link with {mine.width} lanes"
        summary = f"{has}, but others of its model have {most_lanes}"
        evidence = (f"wider: {', '.join(device.bus_id for device in wider[:4])}",)
        fix, severity = "use a slot with more lanes if there is one", Severity.INFO
        if virtual:
            fix, severity = "ask your provider for another machine", Severity.WARNING
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity)
    elif mine in gpus_of(pci) and len(faster) * 2 > len(peers) + 1 and mine.speed_gt_s:
        highest = max(device.speed_gt_s or 0 for device in faster)
        yield Problem(
            summary=f"{describe(pci, mine)} runs its PCIe link at {mine.speed_gt_s:g} GT/s, but others of its model "
            f"run at {highest:g} GT/s",
            evidence=("idle GPUs lower the speed: this matters only under load",),
            fix="under load: nvidia-smi --query-gpu=pci.bus_id,pcie.link.gen.current,pcie.link.gen.max --format=csv",
            severity=Severity.INFO,
        )


NVSWITCH_CLASS = 0x0680
# What `nvidia-smi topo -m` shows as PIX, PXB and PHB: peer traffic stays within one socket.
NEAR = frozenset({"internal", "single", "multiple", "hostbridge"})
MANAGER = "sudo systemctl restart nvidia-fabricmanager; its version must match the driver"


def _is_virtual(node: Node) -> bool:
    """Say whether this is a virtual machine, where the host decides on links. Return False if it is not known."""
    pci = known(node.pci)
    return pci is not None and pci.virtual_machine


@rule(
    "DD321", "nvlink", Severity.ERROR, "An NVLink of a GPU is down",
    group=CheckGroup.LINKS, needs=("gpus", "pci"), reads="NVML: state and errors of each NVLink",
)  # fmt: skip
def check_nvlink(node: Node) -> Answer:
    """Report GPUs with fewer active NVLinks than their peers, or boards whose NVLinks are down on all GPUs."""
    gpus = [gpu for gpu in nvidia.listed(node).devices if gpu.nvlinks]
    if not gpus:
        return skipped("no GPU here has NVLink")
    problems: list[Problem] = []
    for alike in grouped((gpu.name, gpu) for gpu in gpus).values():
        most, board = max(map(_active, alike)), nvidia.is_board(alike[0])
        fewer = [gpu for gpu in alike if _active(gpu) < most and (board or _active(gpu))]
        what = "{has/have} NVLinks that are down, which slows all ranks on the node"
        fix = "nvidia-smi nvlink -s -i {ids}; sudo dmesg | grep 'Xid.*: 74'; reset all GPUs together: nvidia-smi -r"
        severity = None if board else Severity.WARNING
        problems += nvidia.gpu_problem(node, fewer, what, detail=_links, fix=fix, severity=severity)
        if board and len(alike) > 1 and all(_active(gpu) == most < len(gpu.nvlinks or ()) for gpu in alike):
            what = f"have only {most} active NVLinks" if most else "have no active NVLink: NCCL uses PCIe"
            fix = f"nvidia-smi nvlink -s; {MANAGER}"
            severity = Severity.WARNING if most or _is_virtual(node) else None
            problems += nvidia.gpu_problem(node, alike, what, detail=_links, fix=fix, severity=severity)
    counts = ", ".join(sorted({f"{_active(gpu)} of {len(gpu.nvlinks or ())}" for gpu in gpus}))
    errors = sum(link.errors or 0 for gpu in gpus for link in gpu.nvlinks or ())
    return judged(problems, f"{counts} links active, {errors} link errors")


def _active(gpu: Gpu) -> int:
    return sum(link.active for link in gpu.nvlinks or ())


def _links(gpu: Gpu) -> str:
    down = [str(link.index) for link in gpu.nvlinks or () if not link.active]
    return f"{_active(gpu)} of {len(gpu.nvlinks or ())} links active, down: {', '.join(down) or 'none'}"


@rule(
    "DD322", "fabric", Severity.ERROR, "The NVSwitch fabric is not set up",
    group=CheckGroup.LINKS, needs=("gpus", "pci", "torch"), reads="NVML: fabric state; nv-fabricmanager in /proc",
)  # fmt: skip
def check_fabric(node: Node) -> Answer:
    """Report GPUs behind NVSwitches that the fabric manager has not set up."""
    gpus = nvidia.listed(node)
    pci = known(node.pci)
    devices = pci.devices if pci is not None else ()
    switches = sum(1 for device in devices if device.vendor == NVIDIA and device.device_class >> 8 == NVSWITCH_CLASS)
    members = [gpu for gpu in gpus.devices if gpu.fabric_state not in {None, "not-supported"}]
    if not members and not (switches and any(nvidia.is_data_center(gpu) for gpu in gpus.devices)):
        return skipped("no NVSwitches and no GPU fabric")
    torch = known(node.torch)
    works = torch is not None and torch.device_count > 0
    problems = nvidia.gpu_problem(
        node,
        [gpu for gpu in members if gpu.fabric_state != "completed" or gpu.fabric_status != "success"],
        '{is/are} not part of the NVSwitch fabric yet: CUDA says "system not yet initialized"',
        detail=lambda gpu: f"fabric state {gpu.fabric_state}, status {gpu.fabric_status}",
        fix=f"{MANAGER}; then /var/log/fabricmanager.log",
        severity=Severity.WARNING if works else None,
    )
    if switches and gpus.fabric_manager is False and not problems and not _is_virtual(node):
        if works or members:
            summary = "nv-fabricmanager is not running anymore: the NVSwitch fabric works until something fails"
            problems.append(Problem(summary=summary, fix=MANAGER, severity=Severity.WARNING))
        else:
            summary = "The node has NVSwitches, but nv-fabricmanager is not running: CUDA cannot start"
            fix = "sudo systemctl enable --now nvidia-fabricmanager; its version must match the driver"
            problems.append(Problem(summary=summary, evidence=("no process nv-fabricmanager",), fix=fix))
    manager = {True: "runs", False: "is not running", None: "cannot be seen"}[gpus.fabric_manager]
    states = ", ".join(sorted({gpu.fabric_state or "" for gpu in members})) or "state not reported"
    return judged(problems, f"fabric {states}, {switches} NVSwitches, nv-fabricmanager {manager}")


@rule(
    "DD323", "p2p", Severity.WARNING, "GPUs cannot access each other's memory, or their copies arrive wrong",
    group=CheckGroup.LINKS, needs=("gpus", "torch", "gpu_trial", "pci"),
    reads="NVML: P2P status and topology; torch.cuda.can_device_access_peer; copies with --deep",
)  # fmt: skip
def check_p2p(node: Node) -> Answer:
    """Report pairs of near GPUs without peer access, and copies between GPUs that arrive wrong (`--deep`)."""
    wrong = nvidia.wrong_copies(node)
    gpus = {gpu.index: gpu for gpu in nvidia.in_use(node)}
    pairs = [pair for pair in nvidia.listed(node).pairs if {pair.first, pair.second} <= gpus.keys()]
    if not pairs and not wrong:
        return skipped("there is only one GPU" if len(gpus) < 2 else "NVML does not report pairs")
    # On a board NVLink joins all pairs; for bridges only NVML's status shows it.
    joined = {index for index, gpu in gpus.items() if nvidia.is_board(gpu) and _active(gpu) > 0}
    linked = [pair for pair in pairs if {pair.first, pair.second} <= joined]
    near = [pair for pair in pairs if pair.ancestor in NEAR or pair in linked]
    refused = {pair: why for pair in near if (why := _refusal(node, pair, gpus)) is not None}
    if not near and not wrong:
        return skipped("no two GPUs share a host bridge or an NVLink")
    problems = []
    if wrong:
        members = sorted({index for copy in wrong for index in (copy.source, copy.target)})
        summary = f"Copies between {nvidia.gpu_list(members)} arrive wrong or not at all"
        evidence = tuple(f"GPU {copy.source} to {copy.target}: {copy.error}" for copy in wrong[:8])
        fix = "export NCCL_P2P_DISABLE=1 until ACS or the IOMMU is disabled between them: see acs-iommu"
        problems.append(Problem(summary=summary, evidence=evidence, fix=fix, severity=Severity.ERROR))
    problems += _refusals(node, refused, linked, gpus)
    return judged(problems, f"{len(near) - len(refused)} of {len(near)} near pairs have peer access")


def _refusal(node: Node, pair: GpuPair, gpus: dict[int, Gpu]) -> str | None:
    if pair.p2p not in {None, "ok"}:
        return f"NVML: {pair.p2p}"
    torch = known(node.torch)
    if torch is None:
        return None
    uuids = {gpus[pair.first].uuid, gpus[pair.second].uuid}
    here = {device.index for device in torch.devices if device.uuid in uuids}
    denied = any({peer.source, peer.target} == here and not peer.possible for peer in torch.peers)
    return "torch: cannot access peer" if denied and len(here) == 2 else None


def _refusals(
    node: Node, refused: dict[GpuPair, str], linked: list[GpuPair], gpus: dict[int, Gpu]
) -> Iterator[Problem]:
    by_pcie = [pair for pair in refused if pair not in linked]
    servers = [
        pair for pair in by_pcie if nvidia.is_data_center(gpus[pair.first]) and nvidia.is_data_center(gpus[pair.second])
    ]
    for pairs, words, fix, severity in (
        ([pair for pair in refused if pair in linked], "although they are connected by NVLink",
         f"nvidia-smi topo -p2p n; {MANAGER}", Severity.ERROR),
        (servers, "although they share a host bridge",
         "nvidia-smi topo -p2p r; disable ACS and IOMMU translation: see acs-iommu",
         Severity.INFO if _is_virtual(node) else Severity.WARNING),
        ([pair for pair in by_pcie if pair not in servers], "as usual for this model: NCCL uses host memory",
         "nothing to fix: NCCL detects this", Severity.INFO),
    ):  # fmt: skip
        if not pairs:
            continue
        members = sorted({index for pair in pairs for index in (pair.first, pair.second)})
        whys = dict.fromkeys(refused[pair] for pair in pairs)
        summary = f"{nvidia.gpu_list(members)} cannot access each other's memory directly, {words}"
        evidence = (f"{len(pairs)} pairs, such as {pairs[0].first} and {pairs[0].second}: {'; '.join(whys)}",)
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity)


SHOWN = 4  # How many bridges or ranks are named. If there are more, their number follows.


@rule(
    "DD324", "acs-iommu", Severity.WARNING, "ACS or the IOMMU blocks direct PCIe transfers between GPUs",
    group=CheckGroup.LINKS, needs=("pci", "rdma", "gpu_trial", "conf_files"),
    reads="PCI configuration of the bridges above GPUs (root only), /sys/class/iommu, iommu_group/type, /proc/cmdline",
)  # fmt: skip
def check_acs_iommu(node: Node) -> Answer:
    """Report ACS or an IOMMU that slows traffic between GPUs, or between a GPU and its network card."""
    pci = need(node.pci)
    gpus = gpus_of(pci)
    if not gpus:
        return skipped("no NVIDIA or AMD GPU on the PCI bus")
    if pci.virtual_machine:
        return skipped("a virtual machine: its host needs ACS and the IOMMU to isolate guests")
    able = [gpu for gpu in gpus if "GeForce" not in pci.models.get(gpu.bus_id, "")]
    rdma = known(node.rdma)
    if not (len(able) > 1 or (able and rdma is not None and network_ports(node, rdma))):
        return passed("no GPU here has a PCIe peer: GeForce cards have no peer access")
    problems = list(_detours(pci, [f"{copy.source} to {copy.target}" for copy in nvidia.wrong_copies(node)]))
    above = {bus_id for gpu in gpus for bus_id in gpu.upstream}
    unread = any(device.bus_id in above and device.acs_redirect is None for device in pci.devices)
    state = "passes addresses through" if pci.iommu_passthrough else "translates"
    seen = f"the IOMMU {state}" if pci.iommu else "no IOMMU is active"
    if unread and not problems:
        return skipped(f"only root can read the ACS of bridges; {seen}")
    return judged(problems, f"{seen}; ACS {'redirects' if problems else 'does not redirect'} between peers")


def _detours(pci: Pci, wrong: list[str]) -> Iterator[Problem]:
    """Yield bridges with ACS below the nearest bridge that a GPU shares with a peer, and an IOMMU that translates."""
    failed = (f"copies between GPUs failed or came out wrong: {', '.join(wrong[:SHOWN])}",) if wrong else ()
    severity = Severity.ERROR if wrong else None
    bridges = by_bus_id(pci)
    peers = [device for device in pci.devices if is_gpu(device) or device.device_class >> 8 in NIC_CLASSES]
    guilty: dict[str, PciDevice] = {}
    for device in peers:
        others = peers if is_gpu(device) else gpus_of(pci)
        shared = {bus_id for peer in others if peer is not device for bus_id in peer.upstream}
        nearest = next((height for height, bus_id in enumerate(device.upstream) if bus_id in shared), 0)
        for bus_id in device.upstream[:nearest]:
            if bus_id in bridges and bridges[bus_id].acs_redirect:
                guilty[bus_id] = device
    if guilty:
        some = list(guilty)
        bridges_words = f"{len(guilty)} PCIe bridge{'s' * (len(guilty) > 1)}"
        sends = f"Access Control Services of {bridges_words} send GPU peer traffic through the CPU"
        evidence = (f"ACS redirects at {first_names(some)}, above {describe(pci, guilty[some[0]])}", *failed)
        now = f"for b in {' '.join(guilty)}; do setpci -s $b ECAP_ACS+6.w=0000; done"
        fix = f"{now} (until the next boot; permanently: disable ACS in the BIOS)"
        summary = f"{sends}: GPUDirect is slow or hangs"
        yield Problem(summary=summary, evidence=evidence, fix=fix, severity=severity)
    if pci.iommu and not pci.iommu_passthrough:
        yield Problem(
            summary="The IOMMU translates all GPU addresses: copies between GPUs and to RDMA cards are slow, and "
            "NVIDIA does not support this over PCIe",
            evidence=("/sys/class/iommu is not empty, and the GPUs are not in passthrough mode", *failed),
            fix="add iommu=pt to GRUB_CMDLINE_LINUX in /etc/default/grub; update-grub (or grub2-mkconfig); reboot",
            severity=severity,
        )


@rule(
    "DD325", "numa", Severity.WARNING,
    "A rank runs on CPUs far from its GPU, or the NUMA nodes of the GPUs are unknown", group=CheckGroup.LINKS,
    needs=("pci", "gpus"),
    reads="/sys/bus/pci/devices/*/{numa_node,local_cpulist} of GPUs, sched_getaffinity of each rank",
)  # fmt: skip
def check_numa(node: Node) -> Answer:
    """Report ranks that can only run on CPUs of a different NUMA node than their GPU."""
    pci = need(node.pci)
    gpus = gpus_of(pci)
    if not gpus:
        return skipped("no NVIDIA or AMD GPU on the PCI bus")
    if pci.numa_nodes < 2:
        return skipped("there is only one NUMA node")
    placed = [(process, gpu) for process in node.processes if (gpu := _gpu_of(node, pci, process)) is not None]
    far = [
        (process, gpu)
        for process, gpu in placed
        if gpu.local_cpus and process.cpus and not set(process.cpus) & set(gpu.local_cpus)
    ]
    problems = []
    if far:
        names = [f"process {process.pid}" if process.rank is None else f"rank {process.rank}" for process, _ in far]
        of_ranks = ranks_of(process for process, _ in far)
        unnumbered = [name for name, (process, _) in zip(names, far, strict=True) if process.rank is None]
        who = name_list([*([rank_list(of_ranks)] if of_ranks else []), *unnumbered])
        whose, near = "its GPU" if len(far) == 1 else "their GPUs", far[0][1].numa_node or 0
        problems.append(Problem(
            summary=f"{who[0].upper()}{who[1:]} can only run on CPUs of a different NUMA node than {whose}",
            evidence=tuple(
                f"{name}: CPUs {_cpu_words(process.cpus)}; GPU {gpu.bus_id} is near CPUs {_cpu_words(gpu.local_cpus)}"
                for name, (process, gpu) in zip(names[:SHOWN], far, strict=False)
            ),
            fix=f"torchrun --numa-binding=node …, or: numactl --cpunodebind={near} --membind={near} in front of "
            f"{names[0]}",
            ranks=of_ranks,
        ))  # fmt: skip
    lost = [] if pci.virtual_machine else [gpu for gpu in gpus if gpu.numa_node is None]
    if lost:
        which = f"{len(lost)} GPUs are on" if len(lost) > 1 else f"{describe(pci, lost[0])} is on"
        unreported = f"The machine does not report on which of its {pci.numa_nodes} NUMA nodes {which}"
        seen = (f"numa_node is -1 of {', '.join(gpu.bus_id for gpu in lost[:SHOWN])}",)
        fix = "check the NUMA settings in the BIOS (SNC, NPS), and update the BIOS"
        problems.append(Problem(summary=f"{unreported}: ranks cannot be placed near them", evidence=seen, fix=fix))
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


def _cpu_words(cpus: tuple[int, ...]) -> str:
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
