"""PCI devices, the bridges above them, IOMMU, and RDMA ports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device. Bus ids are as sysfs writes them: "0000:1b:00.0"."""

    bus_id: str
    vendor: int
    device: int
    device_class: int
    """The 24 bits of class, subclass and interface: 0x030200 is a 3D controller."""
    numa_node: int | None
    """None where the kernel says -1."""
    local_cpus: tuple[int, ...]
    width: int | None
    max_width: int | None
    speed_gt_s: float | None
    max_speed_gt_s: float | None
    acs_redirect: bool | None
    """Whether Access Control Services send peer traffic up to the root; None where the capability cannot be read
    (that needs root) or is not there."""
    upstream: tuple[str, ...]
    """Bridges above it, nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pci:
    """GPUs, NICs, NVSwitches and the bridges above them, and what the IOMMU does."""

    devices: tuple[PciDevice, ...]
    iommu: bool
    """Whether an IOMMU is at work."""
    iommu_passthrough: bool
    """iommu=pt on the kernel's command line, or its build default."""
    virtual_machine: bool
    nvidia_proc_gpus: tuple[str, ...]
    """Bus ids below /proc/driver/nvidia/gpus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of a port's table of addresses."""

    index: int
    gid: str
    type: str
    """"IB/RoCE v1" or "RoCE v2"."""
    netdev: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    port: int
    state: str
    """As sysfs has it, without the number: ACTIVE, DOWN, INIT."""
    phys_state: str
    """LinkUp, Disabled, Polling."""
    link_layer: str
    """InfiniBand or Ethernet."""
    rate_gb_s: float | None
    """Gigabits per second."""
    gids: tuple[Gid, ...]
    counters: dict[str, int]
    """link_downed, symbol_error, port_rcv_errors, local_link_integrity_errors, where they can be read."""
    counters_later: dict[str, int]
    """The same a moment later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device (HCA)."""

    name: str
    bus_id: str | None
    board: str | None
    """Board id: devices of one model have the same."""
    firmware: str | None
    ports: tuple[RdmaPort, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices and what a process needs to use them."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool
    """nvidia_peermem or nv_peer_mem is loaded."""
    dmabuf: bool | None
    """Kernel and driver can do without peermem; None where the driver's kind is not known."""
    uverbs: tuple[str, ...]
    """/dev/infiniband/uverbs* that this process can open."""
    uverbs_denied: tuple[str, ...]
    """Those that are there and cannot be opened."""
    rdma_cm: bool
