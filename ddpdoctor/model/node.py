"""What is known of a machine: its GPUs, limits, links, network and software."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.reading import NOT_ASKED, NotRead, Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An error of a device, as torch and NCCL word it. If the device is at fault, the kernel's log has an Xid.
DEVICE_ERROR = re.compile(r"(?:CUDA error|unhandled cuda error|CUDA driver error)(?!: out of memory)", re.IGNORECASE)
Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that uses memory of a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None
    ours: bool  # it belongs to this job: the same batch job or pod, or a descendant of the same launcher
    graphics: bool = False  # it only draws on a screen and computes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One NVLink of a GPU."""

    index: int
    active: bool
    errors: int | None  # replay, recovery and CRC errors together


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it."""

    index: int
    uuid: str
    name: str
    bus_id: str  # in the notation of sysfs: "0000:1b:00.0"
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
    clock_event_reasons: int | None = None  # bits of nvmlDeviceGetCurrentClocksEventReasons
    temperature_c: int | None = None
    slowdown_temperature_c: int | None = None
    power_limit_mw: int | None = None  # the lowest limit in force
    default_power_limit_mw: int | None = None
    app_clock_sm_mhz: int | None = None
    default_app_clock_sm_mhz: int | None = None
    max_clock_sm_mhz: int | None = None
    persistence: bool | None = None
    mig_enabled: bool | None = None
    compute_mode: str | None = None  # default, exclusive-process, prohibited
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    nvlinks: tuple[NvLink, ...] | None = None  # links that the device has; empty for one without NVLink
    fabric_state: str | None = None  # not-supported, not-started, in-progress, completed
    fabric_status: str | None = None  # success, or NVML's word for what went wrong
    error: str | None = None  # why it did not answer, or only partly: "GPU is lost", "it did not answer in time"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPair:
    """NVML's view of the path between two GPUs."""

    first: int
    second: int
    ancestor: str  # the closest common one: internal, single, multiple, hostbridge, node or system
    p2p: str | None  # ok, or NVML's word for why peer reads are not possible


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOnBus:
    """A GPU that the kernel sees on the PCI bus, even if NVML does not list it."""

    bus_id: str
    device: int | None  # the PCI device id, which is equal for GPUs of one model
    driver: str | None  # the kernel driver bound to it (nvidia, vfio-pci, nouveau), or None
    # For a GPU of the NVIDIA driver that NVML does not list: "ok" if its device file could be opened, or the name of
    # the error, such as EIO or EPERM. None if that was not tried.
    open_error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All facts from NVML."""

    driver: str | None
    cuda_driver: str | None  # the highest CUDA version that the driver supports, such as "13.0"
    devices: tuple[Gpu, ...]
    pairs: tuple[GpuPair, ...]
    persistenced: bool  # the persistence daemon's socket exists
    fabric_manager: bool | None  # whether nv-fabricmanager runs, or None if other users' processes are not visible
    # Whether the machine's processes are visible. False in a container: NVML's pids are wrong or missing there.
    host_pids: bool = False
    on_bus: tuple[GpuOnBus, ...] = ()  # NVIDIA GPUs in sysfs
    init_error: str | None = None  # NVML's name of the error if it could not be initialized. ``devices`` is empty then.


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One error of a GPU in the kernel's log."""

    bus_id: str
    code: int
    text: str
    age_s: float | None  # seconds before now, or None if the log has no time


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckProcess:
    """A process in uninterruptible sleep inside a GPU driver."""

    pid: int
    name: str
    wchan: str
    seconds: float | None  # its least duration, or None if it could be checked only once


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A resource limit. None means unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A mounted folder and its free space."""

    path: str
    purpose: str  # such as "temporary files, working directory", for people to read
    fstype: str | None
    total_bytes: int
    free_bytes: int
    writable: bool
    write_mb_s: float | None = None  # measured with --deep; MB is 1e6 bytes
    error: str | None = None  # Why it could not be read: "did not answer within 2 s". Sizes are 0 then.
    temporary: bool = False  # whether it is for temporary files
    timed_out: bool = False  # it did not answer in time


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """What is mounted at /dev/shm."""

    volume: Volume
    stale_files: tuple[str, ...]  # files of NCCL and torch whose owners no longer exist
    stale_bytes: int
    loader_workers: int = 0  # number of torch DataLoader workers that run here now


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of this process, its cgroup and the machine. None: unlimited, or unknown if the field says so."""

    nofile: Limit | None
    memlock: Limit | None
    nproc: Limit | None
    user_processes: int | None  # threads that this user runs now, as RLIMIT_NPROC counts them, or None if unknown
    pids_max: int | None  # the tightest limit on tasks among the cgroup and those above it
    pids_current: int | None
    cpus_online: int
    cpus_allowed: tuple[int, ...]  # CPU affinity of the collecting process
    cpu_quota: float | None  # CPUs that the cgroup grants, such as 2.5. None: no quota.
    memory_total_bytes: int | None
    memory_available_bytes: int | None
    swap_total_bytes: int | None
    memory_limit_bytes: int | None  # The tightest memory limit among the cgroup and those above it. None: no limit.
    memory_used_bytes: int | None  # memory in use by the cgroup of that limit, without droppable page cache
    oom_kills: int | None  # How many OOM kills the cgroup of that limit has had. None: no limit, or unknown.
    shm: SharedMemory | None
    volumes: tuple[Volume, ...]
    somaxconn: int | None
    numa_nodes: int  # number of memory nodes, also of those without processors, such as a GPU's
    numa_balancing: int | None
    nproc_applies: bool = True  # False for root, because RLIMIT_NPROC does not apply to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The wall clock."""

    synchronized: bool | None = field(metadata={"json": "synchronised"})  # STA_UNSYNC; None: unread
    offset_s: float | None  # from the clock of rank 0, positive if ahead; None on its node and without gathering


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyCpu:
    """A processor that others used while the ranks slept."""

    cpu: int
    share: float  # share of the sampled time, 0 to 1, that other processes, the kernel and a hypervisor used


@dataclass(frozen=True, slots=True, kw_only=True)
class Governor:
    """How the kernel sets the frequency of some processors."""

    name: str  # scaling_governor: performance, powersave, schedutil
    driver: str  # scaling_driver: intel_pstate, amd-pstate-epp, acpi-cpufreq; empty if unknown
    preference: str  # energy_performance_preference, such as balance_power; empty if there is none
    cpus: int  # to how many of this process's allowed processors this applies


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy other work keeps a machine. The ranks, their children and their launcher do not count."""

    window_s: float  # length of the sample
    busy: tuple[BusyCpu, ...]  # processors with any other use, by number
    # The share of its busy time since boot that this virtual machine lost to others by its hypervisor, or None if
    # unknown.
    steal_share: float | None
    governors: tuple[Governor, ...]  # empty if the kernel does not show them, as in most virtual machines


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device. Bus ids are in the notation of sysfs: "0000:1b:00.0"."""

    bus_id: str
    vendor: int
    device: int
    device_class: int  # the 24 bits of class, subclass and interface: 0x030200 is a 3D controller
    numa_node: int | None  # None if the kernel says -1
    local_cpus: tuple[int, ...]  # CPUs near a GPU; empty for other devices
    width: int | None
    max_width: int | None
    speed_gt_s: float | None
    max_speed_gt_s: float | None
    # Whether a bridge's Access Control Services redirect peer traffic to the root. False if the bridge lacks that
    # capability, None if it cannot be read (that needs root).
    acs_redirect: bool | None
    upstream: tuple[str, ...]  # bridges above it, nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Pci:
    """GPUs, NICs, NVSwitches, the bridges above them, and the state of the IOMMU."""

    devices: tuple[PciDevice, ...]
    iommu: bool  # Intel's or AMD's is active; GPUs are designed to work behind Arm's
    iommu_passthrough: bool  # it translates no addresses: iommu=pt, or the kernel's default
    virtual_machine: bool
    nvidia_proc_gpus: tuple[str, ...]  # bus ids in /proc/driver/nvidia/gpus
    models: dict[str, str] = field(default_factory=dict)  # by bus id: "NVIDIA H100 80GB HBM3"
    numa_nodes: int = 1  # number of memory nodes with processors


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An entry of a port's GID table."""

    index: int
    gid: str
    type: str  # "IB/RoCE v1" or "RoCE v2"
    netdev: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """A port of an RDMA device."""

    device: str
    port: int
    state: str  # the state in sysfs without the number: ACTIVE, DOWN, INIT
    phys_state: str  # LinkUp, Disabled, Polling
    link_layer: str  # InfiniBand or Ethernet; Unspecified for the Elastic Fabric Adapter of AWS
    rate_gb_s: float | None  # in gigabits per second
    gids: tuple[Gid, ...]
    counters: dict[str, int]  # link_downed, symbol_error, port_rcv_errors, local_link_integrity_errors
    counters_later: dict[str, int]  # the same counters, read again shortly after
    rate_text: str = ""  # the rate in sysfs, with lanes and generation: "400 Gb/sec (4X NDR)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDevice:
    """An RDMA device (HCA)."""

    name: str
    bus_id: str | None
    board: str | None  # board id, which is equal for devices of one model
    firmware: str | None
    ports: tuple[RdmaPort, ...]
    uverbs: str | None = None  # its device file in /dev/infiniband: "uverbs0"
    netdevs: tuple[str, ...] = ()  # network interfaces of the same PCI function
    virtual_function: bool = False  # it is an SR-IOV function whose physical function is visible here too


@dataclass(frozen=True, slots=True, kw_only=True)
class Rdma:
    """RDMA devices and what a process needs to use them."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool  # nvidia_peermem or nv_peer_mem is loaded
    dmabuf: bool | None  # Kernel and driver do not need peermem. None if the driver's kind is unknown.
    uverbs: tuple[str, ...]  # /dev/infiniband/uverbs* that this process can open
    uverbs_denied: tuple[str, ...]  # existing ones that it cannot open
    rdma_cm: bool  # /dev/infiniband/rdma_cm exists. NCCL does not need it.
    ipc_lock: bool | None = None  # Whether this process has CAP_IPC_LOCK, which lifts RLIMIT_MEMLOCK. None if unknown.


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The result of resolving a name on this host. Either ``addresses`` or ``error`` is set."""

    name: str
    addresses: tuple[str, ...]
    error: str | None
    timed_out: bool
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of this host, and how it resolves the names of others."""

    hostname: str
    fqdn: str | None
    own: Lookup  # the lookup of the host name, as Gloo does it
    master: Lookup | None  # the lookup of MASTER_ADDR or of the rendezvous endpoint's host, or None if neither is given
    head: Lookup | None  # of the full name of rank 0's host, which torchrun publishes; None without gathering
    reverse_s: float | None  # the slowest reverse lookup of an own address, or the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    up: bool  # IFF_UP: somebody has switched it on
    operstate: str  # The value in sysfs: up, down, unknown, …
    carrier: bool | None
    loopback: bool
    virtual: bool  # there is no device behind it: a bridge, veth, tunnel, docker0
    mtu: int
    speed_mb_s: int | None  # megabits per second from sysfs, or None if it gives none
    addresses: tuple[str, ...]  # with prefix length: "10.0.0.4/24", "fd00::2/64"
    link_type: int  # ARPHRD_*: 1 Ethernet, 32 InfiniBand, 772 loopback

    @property
    def running(self) -> bool:
        """Whether it can carry traffic now: IFF_RUNNING, which is IFF_UP with operstate up or unknown."""
        return self.up and self.operstate in {"up", "unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """Whether a process can listen on MASTER_PORT here, and who holds it."""

    port: int
    free: bool = False
    error: str | None = None
    time_wait: bool = False  # only a closed connection in TIME_WAIT blocks the port
    owner_pid: int | None = None
    owner: str | None = None  # the command of the process that listens


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallChain:
    """A chain of a packet filter that refuses incoming packets by default."""

    name: str  # prefixed with the tool that shows it: "nft inet filter input"
    refusal: str  # "policy drop", or the last rule: "reject with icmpx admin-prohibited"
    accepts: tuple[str, ...]  # rules here or jumped to that accept new connections, in the tool's notation
    manager: str = ""  # "firewalld" or "ufw" if the names of chains show that one of them wrote it


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Interfaces, and how the kernel and a firewall treat ports."""

    interfaces: tuple[Interface, ...]  # in the kernel's order, by index: the order in which NCCL sees them
    default_interface: str | None  # the interface of the IPv4 default route, else of the IPv6 one
    ipv6_disabled: bool | None
    local_ports: tuple[int, int] | None  # ip_local_port_range: the ports that the kernel assigns to clients
    master_port: PortUse | Unread  # unread if no MASTER_PORT is given or the store would be on another host
    firewall: tuple[FirewallChain, ...] | Unread  # that refuse incoming packets by default
    mesh_proxy: bool = False  # the proxy of a service mesh (Istio's Envoy) listens in this network namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The installed software, read from files and package metadata without heavy imports."""

    python: str
    executable: str
    kernel: str  # the output of uname -r
    os_name: str  # PRETTY_NAME of os-release, such as "Debian GNU/Linux 12 (bookworm)"; empty if there is none
    platform: str  # sys.platform: linux, darwin
    wsl: bool
    container: str | None  # docker, podman, kubernetes, lxc, apptainer, … or None if none is detected
    image: str | None  # the container image, if known
    torch_version: str | None  # from package metadata, or None if torch is not installed
    nccl_wheel: str | None  # version of the nvidia-nccl-cu* wheel
    driver: str | None  # version of the NVIDIA kernel driver, from /proc/driver/nvidia/version
    driver_is_open: bool | None
    nvml_libraries: tuple[str, ...]  # Paths of libnvidia-ml.so.* files. Each name ends with the version.
    ofed: str | None
    torch_cuda: str | None = None  # what the installed torch's metadata requires, such as "12.8"
    gpu_devices: tuple[str, ...] = ()  # of GPUs: /dev/nvidia0, /dev/kfd, /dev/dxg
    hosts_lines: tuple[str, ...] | None = None  # a digest of each line of /etc/hosts but loopback
    hosts_own: tuple[str, ...] = ()  # the digests of the lines that name this host


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDevice:
    """A GPU from torch's view."""

    index: int
    name: str
    uuid: str | None  # in NVML's notation, "GPU-…", or None if torch does not provide it
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """Whether, according to torch, one GPU can reach the memory of another directly."""

    source: int
    target: int
    possible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """Facts that a child process reads from an imported torch."""

    version: str
    import_error: str | None  # The last line of the error if the import failed. The other fields are empty then.
    cuda: str | None
    hip: str | None
    cuda_available: bool
    cuda_error: str | None  # why CUDA could not be initialized, or how the process ended that did it
    device_count: int
    devices: tuple[TorchDevice, ...]
    arch_list: tuple[str, ...]  # the architectures that kernels are built for: "sm_90", "compute_90"
    nccl: str | None  # the version that torch was built with, such as "2.27.3", or None without NCCL
    nccl_libraries: tuple[str, ...]  # paths of the libnccl files that the process maps after the import
    gloo: bool
    peers: tuple[PeerAccess, ...]
    path: str | None = None  # the file that `import torch` runs, if it was found
    nccl_loaded: str | None = None  # the version that the mapped libnccl reports, or None if none is mapped
    nccl_found_by: str | None = None  # LD_PRELOAD or LD_LIBRARY_PATH if one of them selected the mapped libnccl
    cuda_library: str | None = None  # the libcuda that was mapped when CUDA was initialized
    cuda_stuck: bool = False  # whether the process that initialized CUDA hung or died in it


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers that a version starts with: (2, 13, 0) for "2.13.0+cu130", (580, 95, 5) for "580.95.05"."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match.group().split(".")) if match else ()


class Launcher(str, Enum):
    """Who started the collecting processes."""

    NONE = "none"
    TORCHRUN = "torchrun"
    SLURM = "slurm"
    NNODES = "nnodes"  # started by hand on every node, with --nnodes
    ENVIRONMENT = "environment"  # started by something that sets only RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    OWN = "ddpdoctor"  # started by a ddpdoctor that waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfFile:
    """A configuration file of NCCL, which sets variables that are not in the environment."""

    path: str
    variables: dict[str, str]  # variables outside the allow-list have an empty value
    hidden_by_env: tuple[str, ...]  # Names that the environment sets too. The environment wins.
    hidden_by_file: tuple[str, ...]  # Names that an earlier file sets too. The earlier file wins.
    bad_lines: tuple[int, ...]  # Lines that are neither NAME=VALUE nor a comment. NCCL ignores them silently.
    lines: dict[str, int] = field(default_factory=dict)  # the line, from 1, that sets each name
    repeated_lines: tuple[int, ...] = ()  # Lines that set a name again. The first setting wins.
    unread: str = ""  # why it could not be read; empty if it was read
    since: str = ""  # the first NCCL version that reads it; empty: all
    until: str = ""  # the last NCCL version that reads it; empty: all


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A collecting process: a rank of the job, or the user's own shell without a job."""

    rank: int | None  # None if no launcher sets one
    local_rank: int | None
    pid: int
    variables: dict[str, str]  # environment variables on the allow-list, with values
    other_names: tuple[str, ...]  # unknown ones that look like a variable of ours; no values are kept
    cpus: tuple[int, ...]  # the CPUs it may run on
    under_wrap: bool = False  # whether `ddpdoctor wrap` started it and therefore set some variables itself

    def number(self, name: str) -> int | None:
        """Return a variable as a whole number, or None if it is missing or not a number."""
        text = self.variables.get(name, "").strip()
        return int(text) if text.isascii() and text.removeprefix("-").isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine, or one container on it, with the processes of the job that run there."""

    host: str
    index: int = 0  # position among the nodes, sorted by lowest rank
    processes: tuple[NodeProcess, ...] = ()  # at least one, sorted by rank
    conf_files: tuple[ConfFile, ...] | Unread = NOT_ASKED
    software: Software | Unread = NOT_ASKED
    torch: TorchBuild | Unread = NOT_ASKED
    limits: Limits | Unread = NOT_ASKED
    clock: Clock | Unread = NOT_ASKED
    names: Names | Unread = NOT_ASKED
    network: Network | Unread = NOT_ASKED
    gpus: Gpus | Unread = NOT_ASKED
    kernel_log: KernelView | Unread = NOT_ASKED
    stuck_processes: tuple[StuckProcess, ...] | Unread = NOT_ASKED
    gpu_trial: GpuTrial | Unread = NOT_ASKED
    pci: Pci | Unread = NOT_ASKED
    rdma: Rdma | Unread = NOT_ASKED
    load: Load | Unread = NOT_ASKED

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(process.rank for process in self.processes if process.rank is not None))

    @property
    def first(self) -> NodeProcess:
        """The process of the lowest rank."""
        return self.processes[0]


# The sections of a node. Each has its own collector.
SECTIONS = tuple(section.name for section in fields(Node) if section.name not in {"host", "index", "processes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedVersion:
    """A version that every node should have."""

    name: str  # of what: "torch", "nccl", "python", "driver" or "kernel"
    specifier: str  # a version specifier of Python, such as ">=2.13,<3"

    @property
    def text(self) -> str:
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All collecting machines, with or without a job."""

    nodes: tuple[Node, ...]
    launcher: Launcher = Launcher.NONE
    world_size: int | None = None  # processes that the launcher should start, or None without a launcher
    nnodes: int | None = None  # nodes that the launcher should use, if it says
    missing: tuple[int, ...] = ()  # ranks that did not answer in time
    silent_hosts: tuple[str, ...] = ()  # hosts of those missing ranks that said hello
    problems: tuple[str, ...] = field(default=())  # "rank 3 sent what could not be read"
    expected: tuple[ExpectedVersion, ...] = ()  # the versions that the user expects

    @property
    def gathered(self) -> bool:
        """Whether several processes were expected to collect."""
        return self.launcher is not Launcher.NONE

    def processes(self) -> Iterator[tuple[Node, NodeProcess]]:
        """Yield every process with its node, by node and rank."""
        for node in self.nodes:
            for process in node.processes:
                yield node, process

    def each(self, section: Callable[[Node], Section | Unread]) -> tuple[tuple[Node, Section], ...]:
        """Return each node for which a section was read, with that section. Raises ``NotRead`` if there is none."""
        readings = [(node, section(node)) for node in self.nodes]
        found = tuple((node, reading) for node, reading in readings if not isinstance(reading, Unread))
        unread = next((reading for _, reading in readings if isinstance(reading, Unread)), None)
        if not found and unread is not None:
            raise NotRead(unread)
        return found
