"""Every ordered pair of nodes: a connection to a port opened for it alone, a small and a large payload over it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.exchange.store import Store
    from ddpdoctor.model.reaching import NodePair, Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLimits:
    """What the mesh may take."""

    connect_s: float = 3.0
    stall_s: float = 4.0
    """A payload of which nothing gets on for so long has stalled: time for four retransmissions (0.2, 0.6, 1.4, 3 s)."""
    total_s: float | None = None
    """None: by the number of nodes."""
    port_range: tuple[int, int] | None = None
    """The ports to listen on, both ends among them; None: any that the kernel gives."""


def run_mesh(store: Store, own: int, publications: Sequence[Publication], limits: MeshLimits) -> tuple[NodePair, ...]:
    """Run this node's part; return all pairs on the first of ``publications``, this node's own on the others.

    ``own`` is this node's number. All nodes call it at about the same time with equal publications, over a store whose
    keys below "mesh/" are free. Raises ``StoreError`` where the store is lost.
    """
    raise NotImplementedError
