"""Which of how many members of a job this ``wrap`` is, and where the members meet."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Style(Enum):
    """What a member is."""

    ALONE = "alone"
    """There are no others."""
    TORCHRUN = "torchrun"
    """One a node: it starts the launcher of the node's ranks."""
    RANK = "rank"
    """One a rank: the task that ran it becomes that rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one ``wrap`` stands in its job."""

    style: Style = Style.ALONE
    number: int | None = None
    """Its own, which for one a node is the node rank; None where only the rendezvous will tell."""
    expected: int = 1
    """Members that are to come; the fewest, of an elastic job."""
    hosts: tuple[str, ...] = ()
    """Where the first member may be reached, the likeliest first."""
    port: int = 0
    """The members' own port there."""
    names: tuple[str, ...] = ()
    """Of the hosts of all members, by number; empty where nobody said them."""
    token: bytes | None = None
    """The job's secret, where it has one."""
    torchrun_args: tuple[str, ...] = ()
    """To be put before torchrun's own options."""
    variables: tuple[tuple[str, str], ...] = ()
    """To be set for what is started."""

    @property
    def alone(self) -> bool:
        """Whether there are no others to hear of."""
        return self.style is Style.ALONE
