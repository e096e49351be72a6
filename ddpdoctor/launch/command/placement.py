"""Which of how many members of a job this ``wrap`` is, and where the members meet.

A *member* is one ``wrap``: one a node where torchrun starts the ranks, one a rank where each process becomes a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Style(Enum):
    """What a member starts."""

    TORCHRUN = "torchrun"
    """torchrun, which starts the ranks of a node."""
    RANK = "rank"
    """The script itself: this process's place among the others is its rank."""
    COMMAND = "command"
    """A command, as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one ``wrap`` stands in its job, and what follows from it for what it starts."""

    style: Style = Style.TORCHRUN
    number: int | None = 0
    """Of this member, from 0; None where only the rendezvous will tell."""
    expected: int = 1
    """Members that are to come; the fewest, of an elastic job."""
    most: int = 1
    """Members that may come."""
    hosts: tuple[str, ...] = ()
    """Where the first member may be reached, the likeliest first; empty where nothing tells."""
    port: int = 0
    """The members' own port there."""
    names: tuple[str, ...] = ()
    """Of the hosts of all members, by number; empty where nothing says them."""
    of_ranks: bool = False
    """Whether each member is one rank, and not a node whose launcher starts ranks."""
    nodes: int = 1
    """Of members that are ranks: on how many nodes they are."""
    one_host: bool = False
    """Whether all members are on one host."""
    token: bytes | None = field(default=None, repr=False)
    """The job's secret, where it has one."""
    store: tuple[str, int] | None = None
    """Host and port of the job's own store; None where nothing tells."""
    batch_job: str = ""
    """Slurm's job and step, "1234.0"; empty elsewhere."""
    torchrun_args: tuple[str, ...] = ()
    """To be put before torchrun's own options."""
    variables: tuple[tuple[str, str], ...] = ()
    """To be set for what is started."""
    note: str | None = None
    """What was chosen and how to choose otherwise, for the user; None where there was nothing to choose."""

    @property
    def alone(self) -> bool:
        """Whether there are no others to hear of."""
        return max(self.expected, self.most) <= 1
