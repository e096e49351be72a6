"""What a process tells rank 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpdoctor.model.node import Node, Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Left as soon as a process has reached the store, so that it can be named if nothing more comes of it."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Left by rank 0 for the others: what its host calls itself in full, where that is known."""

    fqdn: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Rank 0's wall clock, in seconds since 1970."""

    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that one process has to say."""

    rank: int
    """Among those that gather."""
    machine: str
    container: str
    process: Process
    node: Node | None
    """From the one process of a host that reads it, without processes."""
    host: str
    version: str
    """Of ddpdoctor."""
