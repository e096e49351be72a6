"""Facts about GPUs from NVML and the kernel. A field is None if the device or this NVML does not provide it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None
    ours: bool
    """It belongs to this job: the same batch job or pod, or a descendant of the same launcher."""
    graphics: bool = False
    """It only draws on a screen and computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU."""

    index: int
    active: bool
    errors: int | None
    """Replay, recovery and CRC errors together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it."""

    index: int
    uuid: str
    name: str
    bus_id: str
    """In the notation of sysfs: "0000:1b:00.0"."""
    vbios: str | None = None
    ecc_enabled: bool | None = None
    ecc_uncorrected_volatile: int | None = None
    ecc_uncorrected_aggregate: int | None = None
    ecc_corrected_volatile: int | None = None
    remapped_correctable: int | None = None
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pages: int | None = None
    retired_pending: bool | None = None
    sram_threshold_exceeded: bool | None = None
    clock_event_reasons: int | None = None
    """Bits of nvmlDeviceGetCurrentClocksEventReasons."""
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    power_limit_mw: int | None = None
    """The lowest limit in force."""
    default_power_limit_mw: int | None = None
    app_clock_sm_mhz: int | None = None
    default_app_clock_sm_mhz: int | None = None
    max_clock_sm_mhz: int | None = None
    persistence: bool | None = None
    mig_enabled: bool | None = None
    compute_mode: str | None = None
    """default, exclusive-process, prohibited."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    nvlinks: tuple[NvLink, ...] | None = None
    """Links that the device has; empty for one without NVLink."""
    fabric_state: str | None = None
    """not-supported, not-started, in-progress, completed."""
    fabric_status: str | None = None
    """success, or NVML's word for what went wrong."""
    error: str | None = None
    """Why the device did not answer, or only partly: "GPU is lost", "it did not answer in time"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """NVML's view of the path between two GPUs."""

    first: int
    second: int
    ancestor: str
    """Their closest common ancestor: internal, single, multiple, hostbridge, node or system, nearest first."""
    p2p: str | None
    """ok, or NVML's word for why peer reads are not possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOnBus:
    """A GPU that the kernel sees on the PCI bus, even if NVML does not list it."""

    bus_id: str
    device: int | None
    """The PCI device id, which is equal for GPUs of one model."""
    driver: str | None
    """The kernel driver bound to it (nvidia, vfio-pci, nouveau), or None."""
    open_error: str | None = None
    """For a GPU of the NVIDIA driver that NVML does not list: "ok" if its device file could be opened, or the name of
    the error, such as EIO or EPERM. None if that was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All facts from NVML."""

    driver: str | None
    cuda_driver: str | None
    """The highest CUDA version that the driver supports, such as "13.0"."""
    devices: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...]
    persistenced: bool
    """The persistence daemon's socket exists."""
    fabric_manager: bool | None
    """Whether nv-fabricmanager runs, or None if other users' processes are not visible."""
    host_pids: bool = False
    """Whether the machine's processes are visible. False in a container: NVML's pids are wrong or missing there."""
    on_bus: tuple[GpuOnBus, ...] = ()
    """NVIDIA GPUs in sysfs."""
    init_error: str | None = None
    """NVML's name of the error if it could not be initialized. ``devices`` is empty then."""


DEVICE_ERROR = re.compile(r"(?:CUDA error|unhandled cuda error|CUDA driver error)(?!: out of memory)", re.IGNORECASE)
"""An error of a device, as torch and NCCL word it. If the device is at fault, the kernel's log has an Xid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error of a GPU in the kernel's log."""

    bus_id: str
    code: int
    text: str
    age_s: float | None
    """Seconds before now, or None if the log has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckProcess:
    """A process in uninterruptible sleep inside a GPU driver."""

    pid: int
    name: str
    wchan: str
    seconds: float | None
    """Its least duration, or None if it could be checked only once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelView:
    """The GPU errors in the kernel's log, if it is readable."""

    xids: tuple[Xid, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """The result of a test computation on one GPU (--deep)."""

    index: int
    ok: bool
    error: str | None
    timed_out: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCopy:
    """A copy from one GPU to another, compared byte by byte (--deep)."""

    source: int
    target: int
    ok: bool
    error: str | None
    gb_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrial:
    """Results of --deep."""

    work: tuple[GpuWork, ...]
    copies: tuple[PeerCopy, ...]
