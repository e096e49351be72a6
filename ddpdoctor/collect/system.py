"""The machine behind a root folder: files below it, and the calls that no file shows.

Collectors read files and make calls through a ``System`` only, so that a recorded machine (a folder of files and a
table of answers) is read by the very code that reads this one.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ddpdoctor.collect.child import start_program, wait_for_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.collect.network.sockets import InterfaceState

UNLIMITED = -1
"""What resource.RLIM_INFINITY is in Python."""
_STA_UNSYNC = 0x40
"""A bit of adjtimex's status, from linux/timex.h."""
_TIMEX_SIZE_BYTES = 512
"""More than any kernel's struct timex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended, and what it printed."""

    status: int
    output: str
    error: str


class Calls(Protocol):
    """What is asked of the kernel and the C library, and has no file. Each raises OSError where it fails."""

    def platform(self) -> str:
        """Return sys.platform."""

    def hostname(self) -> str:
        """Return what gethostname says."""

    def home(self) -> str:
        """Return the home folder that the password database has for this user."""

    def kernel(self) -> str:
        """Return the kernel's release, as uname -r."""

    def rlimit(self, name: str) -> tuple[int, int]:
        """Return soft and hard limit of "NOFILE", "MEMLOCK", "NPROC"; -1 is unlimited."""

    def cpus(self) -> tuple[int, ...]:
        """Return the CPUs that this process may run on."""

    def statvfs(self, path: str) -> tuple[int, int]:
        """Return total bytes, and those that this user may still use, of the file system of a path."""

    def writable(self, path: str) -> bool:
        """Say whether this process may write to a path."""

    def readable(self, path: str) -> bool:
        """Say whether this process may open a device file for reading and writing."""

    def resolve(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name, in getaddrinfo's order, each once."""

    def fqdn(self) -> str:
        """Return what socket.getfqdn says."""

    def reverse(self, address: str) -> str:
        """Return the name of an address."""

    def interface_addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the IPv4 and IPv6 addresses of every interface that has one, with prefix length."""

    def interface_states(self) -> dict[str, InterfaceState]:
        """Return every interface, where there is no sysfs to read."""

    def bind(self, port: int, *, reuse: bool) -> None:
        """Bind a TCP port on all addresses for a moment, with or without SO_REUSEADDR, and never listen on it."""

    def run(self, command: Sequence[str], limit_s: float) -> CommandResult:
        """Run a command that only shows things, and stop it at the limit, which is a TimeoutError."""

    def clock_unsynchronised(self) -> bool:
        """Say whether the kernel holds the wall clock for unsynchronised (STA_UNSYNC of adjtimex)."""


class LiveCalls:
    """This machine's own answers."""

    def platform(self) -> str:
        """Return sys.platform."""
        return sys.platform

    def hostname(self) -> str:
        """Return what gethostname says."""
        return socket.gethostname()

    def home(self) -> str:
        """Return pw_dir; raises OSError where the user is not in the password database."""
        import pwd

        try:
            return pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise OSError("this user is not in the password database") from None

    def kernel(self) -> str:
        """Return the kernel's release, as uname -r."""
        return os.uname().release

    def rlimit(self, name: str) -> tuple[int, int]:
        """Return soft and hard limit; raises OSError where this system has none of that name."""
        import resource

        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is None:
            raise OSError(f"this system has no limit {name}")
        return resource.getrlimit(number)

    def cpus(self) -> tuple[int, ...]:
        """Return the CPUs of this process's affinity, or all where the system has no such thing."""
        if hasattr(os, "sched_getaffinity"):
            return tuple(sorted(os.sched_getaffinity(0)))
        return tuple(range(os.cpu_count() or 1))

    def statvfs(self, path: str) -> tuple[int, int]:
        """Return total and usable bytes."""
        stat = os.statvfs(path)
        return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail

    def writable(self, path: str) -> bool:
        """Say whether this process may write there."""
        return os.access(path, os.W_OK)

    def readable(self, path: str) -> bool:
        """Open it: permissions alone do not show what a container's device rules forbid."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    def resolve(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name; raises socket.gaierror, which is an OSError."""
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))

    def fqdn(self) -> str:
        """Return what socket.getfqdn says."""
        return socket.getfqdn()

    def reverse(self, address: str) -> str:
        """Return the name of an address; raises socket.herror, which is an OSError."""
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]

    def interface_addresses(self) -> dict[str, tuple[str, ...]]:
        """Return the addresses of every interface."""
        from ddpdoctor.collect.network import sockets

        return sockets.list_addresses()

    def interface_states(self) -> dict[str, InterfaceState]:
        """Return every interface, as psutil has it."""
        from ddpdoctor.collect.network import sockets

        return sockets.list_states()

    def bind(self, port: int, *, reuse: bool) -> None:
        """Bind a TCP port for a moment; raises OSError where that cannot be."""
        from ddpdoctor.collect.network import sockets

        sockets.try_bind(port, reuse=reuse)

    def run(self, command: Sequence[str], limit_s: float) -> CommandResult:
        """Run a command, found on PATH or among the system's own; raises FileNotFoundError, TimeoutError."""
        path = shutil.which(command[0], path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if path is None:
            raise FileNotFoundError(errno.ENOENT, f"{command[0]} is not installed")
        ended = wait_for_program(start_program([path, *command[1:]]), limit_s)
        if ended.status is None:
            raise TimeoutError(errno.ETIMEDOUT, f"{command[0]} did not answer within {limit_s:.0f} s")
        return CommandResult(status=ended.status, output=ended.out, error=ended.err)

    def clock_unsynchronised(self) -> bool:
        """Ask the kernel, which anybody may; raises OSError where it has no such call."""
        return bool(_read_clock_status() & _STA_UNSYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A machine to read: its files below ``root``, its environment, its calls."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    calls: Calls = field(default_factory=LiveCalls)

    @property
    def live(self) -> bool:
        """Whether this is the machine that this process runs on, where commands and NVML may be asked."""
        return self.root == Path("/")

    def path(self, name: str) -> Path:
        """Return the place of an absolute path of the machine."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Return a file's text without white space at its ends; raises OSError."""
        return self.path(name).read_text(encoding="utf-8", errors="replace").strip()

    def text_or(self, name: str, default: str = "") -> str:
        """Return a file's text, or the default where it cannot be read."""
        try:
            return self.text(name)
        except OSError:
            return default

    def number_or_none(self, name: str) -> int | None:
        """Return a file's whole number, decimal or 0x…; None where there is none."""
        try:
            return int(self.text(name), 0)
        except (OSError, ValueError):
            return None

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; none where it cannot be read."""
        try:
            return tuple(sorted(os.listdir(self.path(folder))))  # noqa: PTH208 - names alone are wanted
        except OSError:
            return ()

    def exists(self, name: str) -> bool:
        """Say whether a path exists."""
        return os.path.lexists(self.path(name))


def _read_clock_status() -> int:
    """Return the status bits of adjtimex, asked with modes 0, which sets nothing; raises OSError."""
    if sys.platform != "linux":
        raise OSError("adjtimex is a call of Linux")
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    # struct timex begins: unsigned modes; long offset, freq, maxerror, esterror; int status.
    place = 5 * ctypes.sizeof(ctypes.c_long)
    buffer = ctypes.create_string_buffer(_TIMEX_SIZE_BYTES)
    if library.adjtimex(buffer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int.from_bytes(buffer.raw[place : place + 4], sys.byteorder)
