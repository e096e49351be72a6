"""What a process was seen to do over some seconds: CPU time, bytes of files, bytes of the network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one process did, as rates over the time that it was looked at."""

    over_s: float
    cores: float
    """CPUs that all its threads used together."""
    wanted: float | None
    """The share of the time for which its main thread ran or waited for a core; None where the kernel does not say."""
    read_bytes_s: float | None
    """Of files and pipes, cached or not; None where that may not be read."""
    written_bytes_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingChild:
    """A process below a rank that does something."""

    pid: int
    name: str
    """The command without secrets, or what the kernel calls a Python process."""
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiving:
    """A connection over which a process receives."""

    remote: str
    """"10.0.0.4:443"."""
    bytes_s: float
