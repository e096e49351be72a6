"""PCI devices, the bridges above them, IOMMU, and RDMA ports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device. Bus ids are in the notation of sysfs: "0000:1b:00.0"."""

    bus_id: str
    vendor: int
    device: int
    device_class: int
    """The 24 bits of class, subclass and interface: 0x030200 is a 3D controller."""
    numa_node: int | None
    """None if the kernel says -1."""
    local_cpus: tuple[int, ...]
    """CPUs near a GPU; empty for other devices."""
    width: int | None
    max_width: int | None
    speed_gt_s: float | None
    max_speed_gt_s: float | None
    acs_redirect: bool | None
    """Whether a bridge's Access Control Services redirect peer traffic to the root. False if the bridge lacks that
    capability, None if it cannot be read (that needs root)."""
    upstream: tuple[str, ...]
    """Bridges above it, nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pci:
    """GPUs, NICs, NVSwitches, the bridges above them, and the state of the IOMMU."""

    devices: tuple[PciDevice, ...]
    iommu: bool
    """Whether an Intel or AMD IOMMU is active. Arm's are left out because GPUs are designed to work behind them."""
    iommu_passthrough: bool
    """Whether it does not translate addresses: iommu=pt on the kernel's command line, or the kernel's default."""
    virtual_machine: bool
    nvidia_proc_gpus: tuple[str, ...]
    """Bus ids in /proc/driver/nvidia/gpus."""
    models: dict[str, str] = field(default_factory=dict)
    """The driver's names of NVIDIA GPUs by bus id: "NVIDIA H100 80GB HBM3"."""
    numa_nodes: int = 1
    """Number of memory nodes with processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of a port's GID table."""

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
    """The state in sysfs without the number: ACTIVE, DOWN, INIT."""
    phys_state: str
    """LinkUp, Disabled, Polling."""
    link_layer: str
    """InfiniBand or Ethernet; Unspecified for the Elastic Fabric Adapter of AWS."""
    rate_gb_s: float | None
    """In gigabits per second."""
    gids: tuple[Gid, ...]
    counters: dict[str, int]
    """link_downed, symbol_error, port_rcv_errors and local_link_integrity_errors, if they can be read."""
    counters_later: dict[str, int]
    """The same counters, read again shortly after."""
    rate_text: str = ""
    """The rate in sysfs, with lanes and generation: "400 Gb/sec (4X NDR)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device (HCA)."""

    name: str
    bus_id: str | None
    board: str | None
    """Board id, which is equal for devices of one model."""
    firmware: str | None
    ports: tuple[RdmaPort, ...]
    uverbs: str | None = None
    """Its device file in /dev/infiniband: "uverbs0"."""
    netdevs: tuple[str, ...] = ()
    """Network interfaces of the same PCI function."""
    virtual_function: bool = False
    """It is an SR-IOV function whose physical function is visible here too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices and what a process needs to use them."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool
    """nvidia_peermem or nv_peer_mem is loaded."""
    dmabuf: bool | None
    """Kernel and driver do not need peermem. None if the driver's kind is unknown."""
    uverbs: tuple[str, ...]
    """/dev/infiniband/uverbs* that this process can open."""
    uverbs_denied: tuple[str, ...]
    """Existing ones that it cannot open."""
    rdma_cm: bool
    """/dev/infiniband/rdma_cm exists. NCCL does not need it."""
    ipc_lock: bool | None = None
    """Whether this process has CAP_IPC_LOCK, which lifts RLIMIT_MEMLOCK. None if unknown."""
