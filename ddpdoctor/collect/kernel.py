"""Reads what the kernel knows of GPUs: driver errors in its log, processes hung in the driver, and the PCI bus."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import ask_side_by_side
from ddpdoctor.collect.limits import NODES, memory_nodes, parse_cpu_list
from ddpdoctor.collect.proc import Process, read_link, read_process
from ddpdoctor.collect.software import NO_DRIVER, is_nvidia_here
from ddpdoctor.collect.system import ReadingPlan, System
from ddpdoctor.model.node import GpuOnBus, KernelView, Pci, PciDevice, StuckProcess, Xid
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KMSG = "/dev/kmsg"
RECORD_BYTES = 8192  # of one record: a read fails if the buffer is too small, and the kernel writes no longer ones
LIMIT_S = 1.5
GRANT = (
    "no permission to read the kernel's log: run as root, or open it to all users with `sudo sysctl "
    "kernel.dmesg_restrict=0`; a container needs --cap-add SYSLOG --device /dev/kmsg"
)
XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)\): (?P<code>\d+)(?:, )?(?P<text>.*)")
MAX_TEXT = 200  # how many characters of the driver's message we keep
BETWEEN_READS_S = 1.0
KTHREADD = 2  # The parent of kernel threads. The driver's own kernel threads may sleep for long.
# Symbols of the NVIDIA modules: nvidia_ioctl, nv_open_device, _nv012345rm, uvm_ioctl, os_acquire_mutex.
DRIVER_WORDS = re.compile(r"nvidia|\bnv_|_nv\d{6}rm|\buvm_|rm_ioctl|os_acquire_")
# Programs that only query the driver: in uninterruptible sleep, they hang in the driver, whatever the symbol.
TOOLS = re.compile(r"nvidia-|nv-fabricmanage|nv-hostengine|dcgmi")
HUNG_TASK = re.compile(r"INFO: task .+:(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds")
DEVICES = "/sys/bus/pci/devices"
DRIVER = "/proc/driver/nvidia/gpus"
DRIVER_LIMIT_S = 1.0  # to answer, the driver takes a lock that a hanging GPU may hold
NVIDIA = 0x10DE
NVIDIA_CLASSES = frozenset({0x0300, 0x0302})
GPU_VENDORS = frozenset({NVIDIA, 0x1002})
GPU_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})  # VGA, 3D, other display, processing accelerator (MI300)
NVSWITCH = (NVIDIA, 0x0680)
NIC_CLASSES = frozenset({0x0200, 0x0207})  # Ethernet and InfiniBand controllers
WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})  # Lane counts in PCIe. The kernel writes 0, 63 or 255 if it does not know.
BUS_ID = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
MODEL = re.compile(r"^Model:\s*(.*\S)", re.MULTILINE)
ACS_ID, ACS_CONTROL = 0x000D, 6
ACS_REDIRECT = 0x0004 | 0x0008  # PCI_ACS_RR and PCI_ACS_CR in include/uapi/linux/pci_regs.h: peer traffic goes upstream
EXTENDED, CONFIG_SHOWN_TO_ALL = 0x100, 64
HYPERVISORS = ("qemu", "kvm", "vmware", "virtualbox", "innotek", "xen", "openstack", "virtual machine", "amazon ec2")


def read_kernel_log(system: System, plan: ReadingPlan) -> KernelView:  # noqa: ARG001 - all collectors get both
    """Return the GPU errors since boot; raises ``NotRead`` if the log is missing or we may not read it."""
    xids = []
    for age_s, text in read_log(system):
        xid = XID.search(text)
        if xid:
            bus_id = xid["bus"].lower()  # "0000:1b:00", and in the older form "0000:1b:00.0"
            bus_id = bus_id if "." in bus_id else f"{bus_id}.0"
            said = xid["text"].strip()[:MAX_TEXT]
            xids.append(Xid(bus_id=bus_id, code=int(xid["code"]), text=said, age_s=age_s))
    return KernelView(xids=tuple(xids))


def read_kernel_oom_pids() -> frozenset[int] | None:
    """Return the pids that were killed for memory according to the kernel log, or None if it is not readable."""
    try:
        lines = read_log(System())
    except NotRead:
        return None
    return frozenset(int(pid) for _, text in lines for pid in re.findall(r"Killed process (\d+)", text))


def read_log(system: System) -> tuple[tuple[float | None, str], ...]:
    """Return the age in seconds and the text of each record that is still in the kernel's log; raises ``NotRead``.

    A record is "6,1234,5678901234,-;text": priority, number, microseconds since boot.
    """
    try:
        records = list(_records(system))
    except OSError as error:
        denied = error.errno in {errno.EPERM, errno.EACCES}
        reason = GRANT if denied else f"no kernel log here: {KMSG}: {error.strerror}"
        raise NotRead(Unread(why=Why.DENIED if denied else Why.ABSENT, reason=reason)) from None
    uptime = system.text_or("/proc/uptime").split()
    log = []
    for line in (line for record in records for line in record.splitlines()):
        head, separator, text = line.partition(";")
        fields = head.split(",")
        if separator and len(fields) >= 3 and fields[2].isdecimal():
            age_s = max(0.0, float(uptime[0]) - int(fields[2]) / 1e6) if uptime else None
            log.append((age_s, text))
    return tuple(log)


def _records(system: System) -> Iterator[str]:
    """Yield the current records of /dev/kmsg without waiting for more; a recorded machine has a plain file there."""
    until = time.monotonic() + LIMIT_S
    fd = os.open(system.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            try:
                record = os.read(fd, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # the record was overwritten; the next read returns the oldest one left
                continue
            if not record:
                return
            yield record.decode(errors="replace")
    finally:
        os.close(fd)


def read_stuck_processes(system: System, _plan: ReadingPlan) -> tuple[StuckProcess, ...]:
    """Return the processes that hang in the driver; raises ``NotRead`` without a driver."""
    if not is_nvidia_here(system):
        raise NotRead(NO_DRIVER)
    return find_stuck(system, time.sleep)


def find_stuck(system: System, wait: Callable[[float], None]) -> tuple[StuckProcess, ...]:
    """Check twice, the second time only if the first found a process; one that slept briefly has run in between."""
    first = _sleepers(system)
    if not first:
        return ()
    wait(BETWEEN_READS_S)
    second = _sleepers(system)
    try:
        hung_tasks = [HUNG_TASK.search(text) for _, text in read_log(system)]
    except NotRead:
        hung_tasks = []
    # The kernel repeats the message with longer times: the last line counts.
    blocked_s = {int(task["pid"]): float(task["seconds"]) for task in hung_tasks if task is not None}
    stuck = []
    for process, wchan, _ in (sleeper for sleeper in first if sleeper in second):
        seconds = max(BETWEEN_READS_S, blocked_s.get(process.pid, 0.0))
        stuck.append(StuckProcess(pid=process.pid, name=process.name, wchan=wchan, seconds=seconds))
    return tuple(stuck)


def _sleepers(system: System) -> list[tuple[Process, str, list[str]]]:
    """Return who sleeps in the driver but our children and kernel threads, with wchan and context switches."""
    own = os.getpid() if system.live else 0
    sleepers = []
    for pid in filter(str.isdecimal, system.names("/proc")):
        process = read_process(int(pid), system.path("/proc"))
        if process is None or process.state != "D" or process.ppid in {own, KTHREADD}:
            continue
        wchan = system.text_or(f"/proc/{pid}/wchan").removeprefix("0")
        stack = system.text_or(f"/proc/{pid}/stack")
        if DRIVER_WORDS.search(wchan) or DRIVER_WORDS.search(stack) or TOOLS.match(process.name):
            switches = re.findall(r"ctxt_switches:\s*(\d+)", system.text_or(f"/proc/{pid}/status"))
            sleepers.append((process, wchan, switches))
    return sleepers


def read_pci(system: System, plan: ReadingPlan) -> Pci:  # noqa: ARG001 - all collectors get both
    """Read the devices that matter to training only, because a host may have thousands of virtual functions."""
    names = system.names(DEVICES)
    if not names:
        raise NotRead(Unread(why=Why.ABSENT, reason="this system shows no PCI devices"))
    wanted = [name for name in names if _wanted(system, name)]
    chains = {name: _bridges_above(system, name) for name in wanted}
    bridges = sorted({bridge for chain in chains.values() for bridge in chain})
    chains |= {bridge: _bridges_above(system, bridge) for bridge in bridges}
    # From the devices' groups, or else from the kernel's command line.
    iommu_types = {system.text_or(f"{DEVICES}/{name}/iommu_group/type") for name in wanted} - {""}
    passes_through = not {"iommu=pt", "iommu.passthrough=1"}.isdisjoint(system.text_or("/proc/cmdline").split())
    gpus = system.names(DRIVER)
    # A hanging GPU gets no model.
    replies = ask_side_by_side(
        {bus_id: partial(system.text, f"{DRIVER}/{bus_id}/information") for bus_id in gpus}, DRIVER_LIMIT_S
    )
    # From the x86 processor flags, or else the firmware's machine names
    flags: list[str] = []
    with contextlib.suppress(OSError), system.path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        # Reading further is slow, because the kernel checks each processor's clock.
        flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), flags)
    product = system.text_or("/sys/class/dmi/id/product_name").lower()
    machine = f"{system.text_or('/sys/class/dmi/id/sys_vendor')} {product}".lower()
    is_virtual = any(name in machine for name in HYPERVISORS) and not product.endswith(".metal")
    models = {bus_id: MODEL.search(reply.value or "") for bus_id, reply in replies.items()}
    return Pci(
        devices=tuple(_read_device(system, name, chains[name], bridge=name in bridges) for name in sorted(chains)),
        iommu=any(unit.startswith(("dmar", "ivhd")) for unit in system.names("/sys/class/iommu")),
        iommu_passthrough=iommu_types == {"identity"} if iommu_types else passes_through,
        virtual_machine="hypervisor" in flags if flags else is_virtual,
        nvidia_proc_gpus=gpus,
        models={bus_id: model[1] for bus_id, model in models.items() if model is not None},
        numa_nodes=max(1, sum(bool(system.text_or(f"{NODES}/{node}/cpulist")) for node in memory_nodes(system))),
    )


def _wanted(system: System, name: str) -> bool:
    """Return whether a device matters; its class is read first, because that alone rules out most devices."""
    kind = (system.number_or_none(f"{DEVICES}/{name}/class") or 0) >> 8
    if kind in NIC_CLASSES:
        return True
    if kind not in GPU_CLASSES and kind != NVSWITCH[1]:
        return False
    vendor = system.number_or_none(f"{DEVICES}/{name}/vendor")
    return (vendor, kind) == NVSWITCH or (vendor in GPU_VENDORS and kind in GPU_CLASSES)


def _bridges_above(system: System, name: str) -> tuple[str, ...]:
    """Return the bridges between a device and the root, nearest first, from the target of its link in sysfs."""
    real = os.path.realpath(system.path(f"{DEVICES}/{name}"))
    return tuple(part for part in reversed(real.split("/")[:-1]) if BUS_ID.fullmatch(part))


def _read_device(system: System, name: str, chain: tuple[str, ...], *, bridge: bool) -> PciDevice:
    folder = f"{DEVICES}/{name}"
    node = system.number_or_none(f"{folder}/numa_node")
    kind = system.number_or_none(f"{folder}/class") or 0
    config = b""
    if bridge:
        with contextlib.suppress(OSError):
            config = system.path(f"{folder}/config").read_bytes()
    return PciDevice(
        bus_id=name, vendor=system.number_or_none(f"{folder}/vendor") or 0,
        device=system.number_or_none(f"{folder}/device") or 0, device_class=kind,
        numa_node=None if node is None or node < 0 else node,
        local_cpus=parse_cpu_list(system.text_or(f"{folder}/local_cpulist")) if kind >> 8 in GPU_CLASSES else (),
        width=_width(system, f"{folder}/current_link_width"), max_width=_width(system, f"{folder}/max_link_width"),
        speed_gt_s=parse_speed(system.text_or(f"{folder}/current_link_speed")),
        max_speed_gt_s=parse_speed(system.text_or(f"{folder}/max_link_speed")), acs_redirect=parse_acs(config),
        upstream=chain,
    )  # fmt: skip


def _width(system: System, name: str) -> int | None:
    width = system.number_or_none(name)
    return width if width in WIDTHS else None


def parse_speed(text: str) -> float | None:
    """Return GT/s from "32.0 GT/s PCIe" or "8 GT/s", or None for "Unknown" and empty text."""
    speed = re.match(r"(\d+(?:\.\d+)?) GT/s", text)
    return float(speed[1]) if speed else None


def parse_acs(config: bytes) -> bool | None:
    """Return whether ACS redirects in a bridge's configuration space, or None if we may read only its header."""
    if len(config) <= CONFIG_SHOWN_TO_ALL:
        return None
    seen: set[int] = set()
    at = EXTENDED
    while EXTENDED <= at <= len(config) - 4 and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == ACS_ID:
            control = int.from_bytes(config[at + ACS_CONTROL : at + ACS_CONTROL + 2], "little")
            return bool(control & ACS_REDIRECT)
        at = header >> 20 & 0xFFC
    return False


def read_on_bus(system: System) -> tuple[GpuOnBus, ...]:
    """Return the NVIDIA GPUs on the PCI bus, or () without sysfs."""
    gpus = []
    for name in system.names(DEVICES):
        folder = f"{DEVICES}/{name}"
        device_class = system.number_or_none(f"{folder}/class") or 0
        if device_class >> 8 in NVIDIA_CLASSES and system.number_or_none(f"{folder}/vendor") == NVIDIA:
            driver = os.path.basename(read_link(system.path(f"{folder}/driver")))  # noqa: PTH119 - may be empty
            gpus.append(GpuOnBus(bus_id=name, device=system.number_or_none(f"{folder}/device"), driver=driver or None))
    return tuple(gpus)


def try_unlisted(system: System, on_bus: tuple[GpuOnBus, ...], listed: set[str]) -> tuple[GpuOnBus, ...]:
    """Open the device file of every GPU that the NVIDIA driver has but NVML does not list.

    It is missing or denied if a container or batch system withholds the GPU, which tells it from a broken one.
    """
    tried = []
    for gpu in on_bus:
        open_error = gpu.open_error
        is_unlisted = gpu.driver == "nvidia" and gpu.bus_id not in listed
        text = system.text_or(f"{DRIVER}/{gpu.bus_id}/information") if is_unlisted else ""
        minor = re.search(r"Device Minor:\s*(\d+)", text)
        if minor is not None:
            open_error = "ok"
            try:
                os.close(os.open(system.path(f"/dev/nvidia{minor[1]}"), os.O_RDWR | os.O_CLOEXEC))
            except OSError as error:
                open_error = errno.errorcode.get(error.errno or 0, str(error.errno))
        tried.append(replace(gpu, open_error=open_error))
    return tuple(tried)
