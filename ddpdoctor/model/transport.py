"""What the kernel, NCCL and torch say of data that do not get from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An established TCP connection whose data the other end does not acknowledge. Ends are "10.0.0.4:29500"."""

    local: str
    remote: str
    unsent_bytes: int
    """Written by the process and not acknowledged."""
    retries: int
    """How often the kernel has sent the oldest of them again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """The TCP connections of one process; established ones, where nothing else is said."""

    by_address: tuple[tuple[str, int], ...] = ()
    """Own addresses, and how many connections each has, most first."""
    ends: tuple[str, ...] = ()
    """Own ends of all of them, by which a peer's connection is known to lead here."""
    stalled: tuple[Connection, ...] = ()
    unanswered: tuple[str, ...] = ()
    """Other ends that it has asked for a connection and that have not answered."""
    listening: tuple[str, ...] = ()
    """Addresses at which any process of the same network takes connections, "0.0.0.0:29500"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A warning of NCCL's log."""

    pid: int | None
    """The process that wrote it; None where the line does not say."""
    source: str
    """Where in NCCL: "transport/net_ib.cc:123"; empty where it does not say."""
    text: str
