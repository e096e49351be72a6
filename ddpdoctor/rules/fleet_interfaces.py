"""Which interface every node of a fleet would use: the basis of the checks that compare nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.rules.interface_choice import choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.network import Network
    from ddpdoctor.model.node import Fleet, Node
    from ddpdoctor.rules.interface_choice import Choice, Pick

    Chosen = tuple[tuple[Node, Network, Choice], ...]

VARIABLES = {"NCCL": "NCCL_SOCKET_IFNAME", "Gloo": "GLOO_SOCKET_IFNAME"}
"""For each library, the variable that overrides its own choice."""
SHOWN = 8
"""How many nodes are named one by one."""


def choices_of(fleet: Fleet) -> Chosen:
    """Return what each node would use; nodes whose interfaces could not be read are left out."""
    readings = fleet.each(lambda node: node.network)
    return tuple((node, network, choose(node, network)) for node, network in readings if network.interfaces)


def first_picks(chosen: Chosen) -> Iterator[tuple[str, Node, Network, Pick]]:
    """Yield, by library and node, the interface whose address the others get."""
    for node, network, choice in chosen:
        for library, picks in (("NCCL", choice.nccl), ("Gloo", choice.gloo or ())):
            if picks:
                yield library, node, network, picks[0]


def seen_of(chosen: Chosen) -> str:
    """Say what the first few nodes would use."""
    words = [f"{node.host}: {choice}" for node, _, choice in chosen[:SHOWN]]
    more = len(chosen) - SHOWN
    return "; ".join([*words, f"and {more} more nodes"] if more > 0 else words)
