"""What kind of device a PCI device is, and how a finding names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.links import Pci, PciDevice

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
