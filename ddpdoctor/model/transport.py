"""What NCCL and torch say themselves of a collective that does not complete."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLine:
    """A warning of NCCL's log."""

    pid: int | None
    """The process that wrote it; None where the line does not say."""
    source: str
    """Where in NCCL: "transport/net_ib.cc:123"; empty where it does not say."""
    text: str
