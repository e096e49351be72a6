"""DD321 to DD323: the connections between GPUs: NVLink, the NVSwitch fabric, peer access."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.reading import known
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.environment.gpus import (
    gpu_list,
    gpu_problem,
    in_use,
    is_board,
    is_data_center,
    listed,
    wrong_copies,
)
from ddpdoctor.rules.environment.pci import NVIDIA
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.gpus import Gpu, GpuPair
    from ddpdoctor.model.node import Node

NVSWITCH_CLASS = 0x0680
NEAR = frozenset({"internal", "single", "multiple", "hostbridge"})
"""What `nvidia-smi topo -m` shows as PIX, PXB and PHB: peer traffic stays within one socket."""
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
    gpus = [gpu for gpu in listed(node).devices if gpu.nvlinks]
    if not gpus:
        return skipped("no GPU here has NVLink")
    problems: list[Problem] = []
    for name in dict.fromkeys(gpu.name for gpu in gpus):
        problems += _judge_links(node, [gpu for gpu in gpus if gpu.name == name])
    counts = ", ".join(sorted({f"{_active(gpu)} of {len(gpu.nvlinks or ())}" for gpu in gpus}))
    errors = sum(link.errors or 0 for gpu in gpus for link in gpu.nvlinks or ())
    return judged(problems, f"{counts} links active, {errors} link errors")


def _judge_links(node: Node, gpus: list[Gpu]) -> Iterator[Problem]:
    most = max(_active(gpu) for gpu in gpus)
    board = is_board(gpus[0])
    fewer = [gpu for gpu in gpus if _active(gpu) < most and (board or _active(gpu))]
    yield from gpu_problem(
        node,
        fewer,
        "{has/have} NVLinks that are down, which slows all ranks on the node",
        detail=_links,
        fix="nvidia-smi nvlink -s -i {ids}; sudo dmesg | grep 'Xid.*: 74'; reset all GPUs together: nvidia-smi -r",
        severity=None if board else Severity.WARNING,
    )
    everywhere = [gpu for gpu in gpus if _active(gpu) == most and most < len(gpu.nvlinks or ())]
    if board and len(gpus) > 1 and len(everywhere) == len(gpus):
        yield from gpu_problem(
            node,
            gpus,
            f"have only {most} active NVLinks" if most else "have no active NVLink: NCCL uses PCIe",
            detail=_links,
            fix=f"nvidia-smi nvlink -s; {MANAGER}",
            severity=Severity.WARNING if most or _is_virtual(node) else None,
        )


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
    gpus = listed(node)
    pci = known(node.pci)
    devices = pci.devices if pci is not None else ()
    switches = sum(1 for one in devices if one.vendor == NVIDIA and one.device_class >> 8 == NVSWITCH_CLASS)
    members = [gpu for gpu in gpus.devices if gpu.fabric_state not in {None, "not-supported"}]
    if not members and not (switches and any(is_data_center(gpu) for gpu in gpus.devices)):
        return skipped("there are no NVSwitches and no GPU fabric")
    torch = known(node.torch)
    works = torch is not None and torch.device_count > 0
    problems = _unfinished(node, members, works=works)
    if switches and gpus.fabric_manager is False and not problems and not _is_virtual(node):
        problems.append(_no_manager(set_up=works or bool(members)))
    manager = {True: "runs", False: "is not running", None: "cannot be seen"}[gpus.fabric_manager]
    states = ", ".join(sorted({gpu.fabric_state or "" for gpu in members})) or "state not reported"
    return judged(problems, f"fabric {states}, {switches} NVSwitches, nv-fabricmanager {manager}")


def _unfinished(node: Node, members: list[Gpu], *, works: bool) -> list[Problem]:
    return gpu_problem(
        node,
        [gpu for gpu in members if gpu.fabric_state != "completed" or gpu.fabric_status != "success"],
        '{is/are} not part of the NVSwitch fabric yet: CUDA says "system not yet initialized"',
        detail=lambda gpu: f"fabric state {gpu.fabric_state}, status {gpu.fabric_status}",
        fix=f"{MANAGER}; then /var/log/fabricmanager.log",
        severity=Severity.WARNING if works else None,
    )


def _no_manager(*, set_up: bool) -> Problem:
    if set_up:
        return Problem(
            summary="nv-fabricmanager is not running anymore: the NVSwitch fabric works until something fails",
            fix=MANAGER,
            severity=Severity.WARNING,
        )
    return Problem(
        summary="The node has NVSwitches, but nv-fabricmanager is not running: CUDA cannot start",
        evidence=("no process nv-fabricmanager",),
        fix="sudo systemctl enable --now nvidia-fabricmanager; its version must match the driver",
    )


@rule(
    "DD323", "p2p", Severity.WARNING, "GPUs cannot access each other's memory, or their copies arrive wrong",
    group=CheckGroup.LINKS, needs=("gpus", "torch", "gpu_trial", "pci"),
    reads="NVML: P2P status and topology; torch.cuda.can_device_access_peer; copies with --deep",
)  # fmt: skip
def check_p2p(node: Node) -> Answer:
    """Report pairs of near GPUs without peer access, and copies between GPUs that arrive wrong (`--deep`)."""
    copied = list(_wrong_copies(node))
    gpus = {gpu.index: gpu for gpu in in_use(node)}
    pairs = [pair for pair in listed(node).pairs if {pair.first, pair.second} <= gpus.keys()]
    if not pairs and not copied:
        return skipped("there is only one GPU" if len(gpus) < 2 else "NVML does not report pairs")
    linked = [pair for pair in pairs if gpus[pair.first].nvlinks and _both_linked(pair, gpus)]
    near = [pair for pair in pairs if pair.ancestor in NEAR or pair in linked]
    refused = [pair for pair in near if _refusal(node, pair, gpus) is not None]
    if not near and not copied:
        return skipped("no two GPUs share a host bridge or an NVLink")
    problems = [*copied, *_refusals(node, refused, linked, gpus)]
    return judged(problems, f"{len(near) - len(refused)} of {len(near)} near pairs have peer access")


def _both_linked(pair: GpuPair, gpus: dict[int, Gpu]) -> bool:
    """Say whether NVLink joins a pair. On a board all are joined; for bridges only NVML's status shows it."""
    return all(is_board(gpus[index]) and _active(gpus[index]) > 0 for index in (pair.first, pair.second))


def _refusal(node: Node, pair: GpuPair, gpus: dict[int, Gpu]) -> str | None:
    """Return why a pair has no peer access, or None if it has access or nothing is known."""
    if pair.p2p not in {None, "ok"}:
        return f"NVML: {pair.p2p}"
    torch = known(node.torch)
    if torch is None:
        return None
    uuids = {gpus[pair.first].uuid, gpus[pair.second].uuid}
    here = {device.index for device in torch.devices if device.uuid in uuids}
    denied = any({peer.source, peer.target} == here and not peer.possible for peer in torch.peers)
    return "torch: cannot access peer" if denied and len(here) == 2 else None


def _refusals(node: Node, refused: list[GpuPair], linked: list[GpuPair], gpus: dict[int, Gpu]) -> Iterator[Problem]:
    by_nvlink = [pair for pair in refused if pair in linked]
    if by_nvlink:
        fix = f"nvidia-smi topo -p2p n; {MANAGER}"
        yield _refused(node, by_nvlink, gpus, "although they are connected by NVLink", fix, Severity.ERROR)
    by_pcie = [pair for pair in refused if pair not in linked]
    servers = [pair for pair in by_pcie if is_data_center(gpus[pair.first]) and is_data_center(gpus[pair.second])]
    if servers:
        fix = "nvidia-smi topo -p2p r; disable ACS and IOMMU translation: see acs-iommu"
        severity = Severity.INFO if _is_virtual(node) else Severity.WARNING
        yield _refused(node, servers, gpus, "although they share a host bridge", fix, severity)
    cards = [pair for pair in by_pcie if pair not in servers]
    if cards:
        words = "as usual for this model: NCCL uses host memory"
        yield _refused(node, cards, gpus, words, "nothing to fix: NCCL detects this", Severity.INFO)


def _refused(
    node: Node, pairs: list[GpuPair], gpus: dict[int, Gpu], words: str, fix: str, severity: Severity
) -> Problem:
    members = sorted({index for pair in pairs for index in (pair.first, pair.second)})
    whys = dict.fromkeys(_refusal(node, pair, gpus) or "" for pair in pairs)
    return Problem(
        summary=f"{gpu_list(members)} cannot access each other's memory directly, {words}",
        evidence=(f"{len(pairs)} pairs, such as {pairs[0].first} and {pairs[0].second}: {'; '.join(whys)}",),
        fix=fix,
        severity=severity,
    )


def _wrong_copies(node: Node) -> Iterator[Problem]:
    wrong = wrong_copies(node)
    if wrong:
        members = sorted({index for copy in wrong for index in (copy.source, copy.target)})
        yield Problem(
            summary=f"Copies between {gpu_list(members)} arrive wrong or not at all",
            evidence=tuple(f"GPU {copy.source} to {copy.target}: {copy.error}" for copy in wrong[:8]),
            fix="export NCCL_P2P_DISABLE=1 until ACS or the IOMMU is disabled between them: see acs-iommu",
            severity=Severity.ERROR,
            confidence=Confidence.HIGH,
        )
