"""PCI devices, the bridges above them, IOMMU, and RDMA ports."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    """Of GPUs; empty for the rest."""
    width: int | None
    max_width: int | None
    speed_gt_s: float | None
    max_speed_gt_s: float | None
    acs_redirect: bool | None
    """Whether Access Control Services send peer traffic up to the root, read of bridges; False where a bridge has no
    such capability, None where it cannot be read (that needs root)."""
    upstream: tuple[str, ...]
    """Bridges above it, nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pci:
    """GPUs, NICs, NVSwitches and the bridges above them, and what the IOMMU does."""

    devices: tuple[PciDevice, ...]
    iommu: bool
    """Whether an IOMMU of Intel or AMD is at work. Those of Arm are left out: GPUs are made to work behind them."""
    iommu_passthrough: bool
    """Whether it leaves addresses as they are: iommu=pt on the kernel's command line, or the kernel's default."""
    virtual_machine: bool
    nvidia_proc_gpus: tuple[str, ...]
    """Bus ids below /proc/driver/nvidia/gpus."""
    models: dict[str, str] = field(default_factory=dict)
    """Names of NVIDIA GPUs by bus id, as the driver has them: "NVIDIA H100 80GB HBM3"."""
    numa_nodes: int = 1
    """Memory nodes that have processors."""


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
    """InfiniBand or Ethernet; Unspecified for the Elastic Fabric Adapter of AWS."""
    rate_gb_s: float | None
    """Gigabits per second."""
    gids: tuple[Gid, ...]
    counters: dict[str, int]
    """link_downed, symbol_error, port_rcv_errors, local_link_integrity_errors, where they can be read."""
    counters_later: dict[str, int]
    """The same a moment later."""
    rate_text: str = ""
    """As sysfs has it, with lanes and generation: "400 Gb/sec (4X NDR)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device (HCA)."""

    name: str
    bus_id: str | None
    board: str | None
    """Board id: devices of one model have the same."""
    firmware: str | None
    ports: tuple[RdmaPort, ...]
    uverbs: str | None = None
    """Its device file below /dev/infiniband: "uverbs0"."""
    netdevs: tuple[str, ...] = ()
    """Network interfaces of the same PCI function."""
    virtual_function: bool = False
    """Made by SR-IOV, and its physical function can be seen here too."""


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
    """/dev/infiniband/rdma_cm is there; NCCL does without."""
    ipc_lock: bool | None = None
    """Whether this process has CAP_IPC_LOCK, to which RLIMIT_MEMLOCK does not apply; None where not known."""
