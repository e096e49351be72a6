"""What NVML and the kernel say of GPUs. None in a field: the device or this NVML does not tell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None
    ours: bool
    """Of this job: the same batch job or pod, or below the same launcher."""
    graphics: bool = False
    """Draws on a screen, and computes nothing."""


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
    """As sysfs writes it: "0000:1b:00.0"."""
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
    """The lowest of all limits that are in force."""
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
    """Where the device did not answer, or only in part: "GPU is lost", "it did not answer in time"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """What NVML says of the way between two GPUs."""

    first: int
    second: int
    ancestor: str
    """internal, single, multiple, hostbridge, node, system: what they have in common, nearest first."""
    p2p: str | None
    """ok, or NVML's word for why reads are not possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOnBus:
    """A GPU that the kernel sees on the PCI bus, whether or not NVML lists it."""

    bus_id: str
    device: int | None
    """The PCI device id: GPUs of one model have the same."""
    driver: str | None
    """The kernel driver that has taken it: nvidia, vfio-pci, nouveau; None where none has."""
    open_error: str | None = None
    """Of one that the NVIDIA driver has and NVML does not list: "ok" where its device file could be opened, or the
    name of the error, such as EIO or EPERM; None where that was not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All that NVML says."""

    driver: str | None
    cuda_driver: str | None
    """The highest CUDA version that the driver takes, as "13.0"."""
    devices: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...]
    persistenced: bool
    """The persistence daemon's socket is there."""
    fabric_manager: bool | None
    """Whether nv-fabricmanager runs; None where processes of others cannot be seen."""
    host_pids: bool = False
    """Whether the machine's processes can be seen. False in a container, where NVML names processes that are not
    there, or none."""
    on_bus: tuple[GpuOnBus, ...] = ()
    """NVIDIA GPUs of sysfs."""
    init_error: str | None = None
    """NVML's name of the error where it could not be started; ``devices`` is then empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error of a GPU in the kernel's log."""

    bus_id: str
    code: int
    text: str
    age_s: float | None
    """Before now; None where the log has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckProcess:
    """A process in uninterruptible sleep inside a GPU driver."""

    pid: int
    name: str
    wchan: str
    seconds: float | None
    """How long at least; None where only one look was possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelView:
    """What the kernel says of GPUs, where it may be read."""

    xids: tuple[Xid, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWork:
    """What one GPU did when it was given work (--deep)."""

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
