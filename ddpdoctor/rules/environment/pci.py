"""DD320: PCIe links that have fewer lanes, or run slower, than both of their ends support."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.reading import known, need
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import CheckGroup, rule

if TYPE_CHECKING:
    from ddpdoctor.model.links import Pci, PciDevice
    from ddpdoctor.model.node import Node

NVIDIA, AMD = 0x10DE, 0x1002
VGA = 0x0300
GPU_CLASSES = frozenset({VGA, 0x0302, 0x0380, 0x1200})
NIC_CLASSES = frozenset({0x0200, 0x0207})


def is_gpu(device: PciDevice) -> bool:
    """Say whether it is a GPU from NVIDIA or AMD."""
    return device.vendor in {NVIDIA, AMD} and device.device_class >> 8 in GPU_CLASSES


def is_nic(device: PciDevice) -> bool:
    """Say whether it is a network card."""
    return device.device_class >> 8 in NIC_CLASSES


def gpus_of(pci: Pci) -> tuple[PciDevice, ...]:
    """Return the GPUs, by bus id."""
    return tuple(device for device in pci.devices if is_gpu(device))


def by_bus_id(pci: Pci) -> dict[str, PciDevice]:
    """Return all devices by bus id."""
    return {device.bus_id: device for device in pci.devices}


def is_consumer(pci: Pci, device: PciDevice) -> bool:
    """Say whether it is made for desktops and laptops: by NVIDIA's name, else by whether it is a VGA card."""
    model = pci.models.get(device.bus_id)
    return "GeForce" in model if model else device.device_class >> 8 == VGA


def describe(pci: Pci, device: PciDevice) -> str:
    """Return "GPU 0000:1b:00.0 (NVIDIA H100 80GB HBM3)" or "network card 0000:18:00.0"."""
    if not is_gpu(device):
        return f"network card {device.bus_id}"
    model = pci.models.get(device.bus_id)
    return f"GPU {device.bus_id} ({model})" if model else f"GPU {device.bus_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A PCIe link, identified by its lower end, which reports the current width and speed."""

    lower: PciDevice
    upper: PciDevice | None
    device: PciDevice
    """The GPU or card below it."""

    @property
    def widest(self) -> int | None:
        """The lanes that both ends have: a slot with fewer lanes than the card is the limit."""
        ends = [end.max_width for end in (self.lower, self.upper) if end is not None]
        return min((width for width in ends if width), default=None)

    @property
    def fastest(self) -> float | None:
        """The speed that both ends support."""
        ends = [end.max_speed_gt_s for end in (self.lower, self.upper) if end is not None]
        return min((speed for speed in ends if speed), default=None)


@rule(
    "DD320",
    "pcie",
    Severity.ERROR,
    "A PCIe link has fewer lanes or a lower speed than both ends support",
    group=CheckGroup.LINKS,
    needs=("pci", "rdma"),
    reads="/sys/bus/pci/devices/*/{current,max}_link_{width,speed} of GPUs, RDMA cards and the bridges above them",
)
def check_pcie(node: Node) -> Answer:
    """Report PCIe links of GPUs and RDMA cards with fewer lanes or a lower speed than both ends support."""
    pci = need(node.pci)
    rdma = known(node.rdma)
    cards = {device.bus_id for device in rdma.devices} if rdma is not None else set()
    devices = [device for device in pci.devices if is_gpu(device) or device.bus_id in cards]
    links = _links(pci, devices)
    judgeable = [link for link in links if link.lower.width is not None and link.widest is not None]
    if not judgeable:
        return skipped("no GPU or RDMA card shows its PCIe link" if devices else "there is no GPU and no RDMA card")
    problems = [problem for link in judgeable for problem in _judge(pci, link, devices)]
    widths = Counter(f"x{link.lower.width}" for link in judgeable if link.lower is link.device)
    seen = ", ".join(f"{count} at {width}" for width, count in widths.most_common())
    return judged(problems, f"links of GPUs and RDMA cards: {seen}; speed of idle GPUs is not judged")


def _links(pci: Pci, devices: list[PciDevice]) -> list[_Link]:
    """Pair the two ends of each link. In a chain, downstream and upstream ports of switches alternate."""
    known_ids = by_bus_id(pci)
    found: dict[str, _Link] = {}
    for device in devices:
        chain = [known_ids[bus_id] for bus_id in device.upstream if bus_id in known_ids]
        ends = [device, *chain]
        for lower, upper in zip(ends[::2], [*ends[1::2], None], strict=False):
            if upper is not None or lower is device:
                found.setdefault(lower.bus_id, _Link(lower=lower, upper=upper, device=device))
    return list(found.values())


def _judge(pci: Pci, link: _Link, devices: list[PciDevice]) -> list[Problem]:
    width, widest = link.lower.width or 0, link.widest or 0
    if pci.virtual_machine or link.upper is None:
        return _beside_peers(pci, link, devices)
    if width < widest:
        return [_narrow(pci, link, width, widest)]
    if link.lower is link.device and is_gpu(link.device):
        return _beside_peers(pci, link, devices)
    speed, fastest = link.lower.speed_gt_s, link.fastest
    if speed is not None and fastest is not None and speed < fastest and not _idles(link):
        return [_slow(pci, link, speed, fastest)]
    return []


def _idles(link: _Link) -> bool:
    """Say whether the device itself is slow too: bridges above an idle consumer GPU slow down with it."""
    return is_gpu(link.device) and link.device.speed_gt_s is not None and link.device.speed_gt_s < (link.fastest or 0)


def _where(pci: Pci, link: _Link) -> str:
    bridge = "" if link.lower is link.device else f"bridge {link.lower.bus_id} above "
    return f"The PCIe link of {bridge}{describe(pci, link.device)}"


def _narrow(pci: Pci, link: _Link, width: int, widest: int) -> Problem:
    return Problem(
        summary=(
            f"{_where(pci, link)} has only {width} of {widest} lanes: transfers take {widest // width} times as long"
        ),
        evidence=(
            f"{link.lower.bus_id}: current_link_width {width}, max_link_width {link.lower.max_width}",
            f"the port above it: max_link_width {link.upper.max_width if link.upper is not None else 'unknown'}",
        ),
        fix=f"reseat the card and its riser, then check again: lspci -vvs {link.lower.bus_id} | grep Lnk",
        severity=Severity.WARNING if is_consumer(pci, link.device) else Severity.ERROR,
    )


def _slow(pci: Pci, link: _Link, speed: float, fastest: float) -> Problem:
    return Problem(
        summary=f"{_where(pci, link)} runs at {speed:g} of {fastest:g} GT/s",
        evidence=(f"{link.lower.bus_id}: current_link_speed {speed:g} GT/s, both ends support {fastest:g} GT/s",),
        fix="check the slot's PCIe generation in the BIOS, and reseat the card and its riser",
        severity=Severity.WARNING,
    )


def _beside_peers(pci: Pci, link: _Link, devices: list[PciDevice]) -> list[Problem]:
    """Compare a link with those of other GPUs of the model. Without a view of the slot, nothing else can be done."""
    mine = link.device
    if link.lower is not mine:
        return []
    peers = [one for one in devices if (one.vendor, one.device) == (mine.vendor, mine.device) and one is not mine]
    wider = [one for one in peers if (one.width or 0) > (mine.width or 0)]
    if wider:
        return [_narrower(pci, mine, wider, virtual=pci.virtual_machine)]
    faster = [one for one in peers if (one.speed_gt_s or 0) > (mine.speed_gt_s or 0)]
    if mine in gpus_of(pci) and len(faster) * 2 > len(peers) + 1 and mine.speed_gt_s:
        return [_slower(pci, mine, faster)]
    return []


def _narrower(pci: Pci, mine: PciDevice, wider: list[PciDevice], *, virtual: bool) -> Problem:
    most = max(one.width or 0 for one in wider)
    return Problem(
        summary=f"{describe(pci, mine)} has a PCIe link with {mine.width} lanes, but others of its model have {most}",
        evidence=(f"wider: {', '.join(one.bus_id for one in wider[:4])}",),
        fix="ask your provider for another machine" if virtual else "use a slot with more lanes if there is one",
        severity=Severity.WARNING if virtual else Severity.INFO,
    )


def _slower(pci: Pci, mine: PciDevice, faster: list[PciDevice]) -> Problem:
    most = max(one.speed_gt_s or 0 for one in faster)
    return Problem(
        summary=(
            f"{describe(pci, mine)} has its PCIe link at {mine.speed_gt_s:g} GT/s, and others of its model at {most:g} "
            "GT/s"
        ),
        evidence=("idle GPUs lower the speed: this matters only under load",),
        fix="under load: nvidia-smi --query-gpu=pci.bus_id,pcie.link.gen.current,pcie.link.gen.max --format=csv",
        severity=Severity.INFO,
    )
