"""Access to a machine: the files below a root folder, and system calls; and the facts of a node, read with them.

A recorded machine is read by the same code: it is a folder of files with answers in place of ``SystemCalls``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import ChildEnd, ChildProcess, ask_side_by_side, start_program, wait_for_program
from ddpdoctor.model.node import Node, NodeProcess
from ddpdoctor.model.reading import NotRead, Unread, Why

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

SHARED_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs"})
UNLIMITED = -1  # the value of resource.RLIM_INFINITY
_STA_UNSYNC = 0x40  # a bit of adjtimex's status, from linux/timex.h
_TIMEX_SIZE_BYTES = 512  # larger than struct timex in any kernel
# Our choice: what can hang has a shorter limit of its own. On a machine with twenty processes per core, reading a few
# files took eight seconds.
SECTION_LIMIT_S = 20.0
TORCH_LIMIT_S = 60.0  # our choice: a cold import from a network file system takes this long on a busy cluster
TRIAL_LIMIT_S = 300.0
# The sections that each module reads: ``read_SECTION`` takes the system and the plan. It raises ``NotRead`` if the
# section is absent or denied; any other exception is a bug and becomes an ``Unread``.
_SECTIONS = {
    "software": ("conf_files", "software", "torch"),
    "limits": ("limits", "clock", "load"),
    "network": ("names", "network", "rdma"),
    "gpus": ("gpus", "gpu_trial"),
    "kernel": ("kernel_log", "stuck_processes", "pci"),
}
COLLECTORS = {section: module for module, sections in _SECTIONS.items() for section in sections}
ALONE = frozenset({"load"})  # what is read after all others have ended, because they would disturb it
# Each collector has shorter limits for its own look-ups, commands and children: a dead server costs one fact only.
LIMITS_S = {"torch": TORCH_LIMIT_S, "gpus": 45.0, "gpu_trial": TRIAL_LIMIT_S}
# The facts that can explain a low bandwidth. Reading them imports no torch and gives the GPUs no work.
SECTIONS_FOR_BENCH = frozenset({"conf_files", "gpus", "limits", "load", "names", "network", "pci", "rdma", "software"})


class SystemCalls:
    """Calls to the kernel and the C library for facts that are in no file. All raise OSError if they fail."""

    def platform(self) -> str:
        return sys.platform

    def hostname(self) -> str:
        return socket.gethostname()

    def home(self) -> str:
        import pwd

        try:
            return pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise OSError("this user is not in the password database") from None

    def kernel(self) -> str:
        return os.uname().release

    def rlimit(self, name: str) -> tuple[int, int]:
        """Return the soft and hard limit of "NOFILE", "MEMLOCK" or "NPROC"; -1 is unlimited."""
        import resource

        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            raise OSError(f"this system has no limit {name}")
        return resource.getrlimit(number)

    def cpus(self) -> tuple[int, ...]:
        """Return the CPUs that this process may run on, or all CPUs on systems without affinity."""
        if hasattr(os, "sched_getaffinity"):
            return tuple(sorted(os.sched_getaffinity(0)))
        return tuple(range(os.cpu_count() or 1))

    def statvfs(self, path: str) -> tuple[int, int]:
        """Return the size of a path's file system, and how much of it this user may still use, in bytes."""
        stat = os.statvfs(path)
        return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail

    def writable(self, path: str) -> bool:
        return os.access(path, os.W_OK)

    def readable(self, path: str) -> bool:
        """Return whether we may open a device file: permissions do not show what a container's rules forbid."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def resolve(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name in getaddrinfo's order, without repeats."""
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))

    def fqdn(self) -> str:
        return socket.getfqdn()

    def reverse(self, address: str) -> str:
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]

    def interface_addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the IPv4 and IPv6 addresses of every interface that has one: "10.0.0.4/24", "fe80::1/64"."""
        import ipaddress

        import psutil

        addresses: dict[str, tuple[str, ...]] = {}
        for name, entries in psutil.net_if_addrs().items():
            for entry in entries:
                if entry.family in {socket.AF_INET, socket.AF_INET6}:
                    ip = ipaddress.ip_address(entry.address.partition("%")[0])
                    mask = ipaddress.ip_address(entry.netmask.partition("%")[0]) if entry.netmask else None
                    prefix = ip.max_prefixlen if mask is None else int(mask).bit_count()
                    addresses[name] = (*addresses.get(name, ()), f"{ip}/{prefix}")
        return addresses

    def interface_states(self) -> dict[str, tuple[bool, int, int]]:
        """Return whether each interface is up, its MTU, and its megabits per second (0: unknown), without sysfs."""
        import psutil

        return {name: (bool(state.isup), state.mtu, state.speed) for name, state in psutil.net_if_stats().items()}

    def bind(self, port: int, *, reuse: bool) -> None:
        """Bind a TCP port briefly without listening, like torch's store: on IPv6 and IPv4 together, else on IPv4."""
        try:
            _bind(socket.AF_INET6, port, reuse=reuse)
        except OSError as error:
            if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EADDRINUSE}:
                raise
            _bind(socket.AF_INET, port, reuse=reuse)

    def run(self, command: Sequence[str], limit_s: float) -> ChildEnd:
        """Run a read-only command from PATH or the sbin folders; raises FileNotFoundError or TimeoutError."""
        path = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if path is None:
            raise FileNotFoundError(errno.ENOENT, f"{command[0]} is not installed")
        ended = wait_for_program(start_program([path, *command[1:]], is_bound=True), limit_s)
        if ended.status is None:
            raise TimeoutError(errno.ETIMEDOUT, f"{command[0]} did not answer within {limit_s:.0f} s")
        return ended

    def clock_unsynchronized(self) -> bool:
        """Return whether the kernel considers the wall clock unsynchronized (STA_UNSYNC in adjtimex)."""
        if sys.platform != "linux":
            raise OSError("adjtimex exists only on Linux")
        import ctypes

        library = ctypes.CDLL(None, use_errno=True)
        # struct timex begins: unsigned modes; long offset, freq, maxerror, esterror; int status. Modes 0 only asks.
        place = 5 * ctypes.sizeof(ctypes.c_long)
        buffer = ctypes.create_string_buffer(_TIMEX_SIZE_BYTES)
        if library.adjtimex(buffer) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return bool(int.from_bytes(buffer.raw[place : place + 4], sys.byteorder) & _STA_UNSYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A machine to read: its files below ``root``, its environment, its calls."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    calls: SystemCalls = field(default_factory=SystemCalls)

    @property
    def live(self) -> bool:
        """Whether this is the machine that this process runs on, so that commands and NVML are available."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """Return where an absolute path of the machine is on this one."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without surrounding white space; raises OSError."""
        return self.path(name).read_text(encoding="utf-8", errors="replace").strip()

    def text_or(self, name: str, default: str = "") -> str:
        try:
            return self.text(name)
        except OSError:
            return default

    def number_or_none(self, name: str) -> int | None:
        """Return the integer in a file (decimal or 0x…), or None."""
        try:
            return int(self.text(name), 0)
        except (OSError, ValueError):
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(os.listdir(self.path(folder))))  # noqa: PTH208 - only names are needed
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        """Return whether a path exists; a dangling link counts."""
        return os.path.lexists(self.path(name))


HERE = System()


def is_shared(path: Path, system: System = HERE) -> bool:
    """Return whether a path is on a file system that other hosts may use."""
    kind = mount_of(system, str(path))[1] or ""
    return kind.removeprefix("fuse.") in SHARED_FILE_SYSTEMS


def mount_of(system: System, path: str) -> tuple[str, str | None]:
    """Return the mount point of a path, and the type of its file system (None if unknown)."""
    best, fstype = "", None
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (system.root / "proc/mounts").read_text(errors="replace").splitlines()
    for line in lines:
        words = line.split(" ")
        if len(words) < 3:
            continue
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code.group(1), 8)), words[1])
        within = path == point or path.startswith(point.rstrip("/") + "/")
        # Of two mounts at the same point, the later one is visible.
        if within and len(point) >= len(best):
            best, fstype = point, words[2]
    return best or "/", fstype


def _bind(family: socket.AddressFamily, port: int, *, reuse: bool) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        if reuse:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", port))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPlan:
    """What to read, and how."""

    sections: frozenset[str]
    deep: bool = False
    use_torch: bool = True  # if False, torch is not imported, and versions come from package metadata
    head: str | None = None  # the full name of rank 0's host, if known
    torch_child: ChildProcess | None = None  # a child that was started earlier; if None, the collector starts one
    limit_s: float | None = None  # upper limit for every section; if None, each section has only its own limit


def read_node(system: System, plan: ReadingPlan, processes: tuple[NodeProcess, ...]) -> Node:
    """Read the planned sections of a node; a section that does not answer in time becomes an ``Unread``."""
    facts = _read_sections(system, plan, plan.sections - ALONE)
    for name in sorted(plan.sections & ALONE):
        facts |= _read_sections(system, plan, [name])
    return Node(host=system.calls.hostname(), processes=processes, **facts)


def _read_sections(system: System, plan: ReadingPlan, sections: Collection[str]) -> dict[str, Any]:
    """Read sections in parallel, the slowest first: those with child processes run while we read the others."""
    most_s = math.inf if plan.limit_s is None else plan.limit_s
    limits = {name: min(LIMITS_S.get(name, SECTION_LIMIT_S), most_s) for name in sections}
    ordered = sorted(sections, key=lambda name: -LIMITS_S.get(name, SECTION_LIMIT_S))
    replies = ask_side_by_side({name: partial(_read_section, name, system, plan) for name in ordered}, limits)
    return {
        name: Unread(why=Why.TIMEOUT, reason=f"{name} did not answer within {limits[name]:.0f} s")
        if reply.timed_out
        else reply.value
        for name, reply in replies.items()
    }


def _read_section(name: str, system: System, plan: ReadingPlan) -> Any:
    try:
        module = importlib.import_module(f"ddpdoctor.collect.{COLLECTORS[name]}")
        return getattr(module, f"read_{name}")(system, plan)
    except NotRead as missing:
        return missing.unread
    except Exception as error:  # noqa: BLE001 - one failing collector must not stop the others
        return Unread(why=Why.ERROR, reason=f"{name}: {type(error).__name__}: {error}")
