"""The place of this ``wrap`` in its job: its number, the number of members, and where they meet.

A *member* is one ``wrap``: one per node if torchrun starts the ranks, or one per rank if each process becomes a rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Style(Enum):
    """What a member starts."""

    TORCHRUN = "torchrun"
    """torchrun, which starts the ranks of a node."""
    RANK = "rank"
    """The script itself, as one rank; the member's number is its rank."""
    COMMAND = "command"
    """A command, unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of one ``wrap`` in its job, and what to pass to the process that it starts."""

    style: Style = Style.TORCHRUN
    number: int | None = 0
    """This member's number, from 0, or None if only the rendezvous will assign it."""
    expected: int = 1
    """How many members should join; in an elastic job, at least how many."""
    most: int = 1
    """How many members may join at most."""
    hosts: tuple[str, ...] = ()
    """Names or addresses of the first member, the likeliest first; empty if unknown."""
    port: int = 0
    """ddpdoctor's own port on that host."""
    names: tuple[str, ...] = ()
    """The host names of all members, by number; empty if unknown."""
    of_ranks: bool = False
    """Whether each member is one rank instead of a node whose launcher starts ranks."""
    nodes: int = 1
    """The number of nodes, if members are ranks."""
    one_host: bool = False
    """Whether all members are on one host."""
    token: bytes | None = field(default=None, repr=False)
    """The job's secret, or None if it has none."""
    store: tuple[str, int] | None = None
    """Host and port of the job's own store, or None if unknown."""
    batch_job: str = ""
    """Slurm's job and step, "1234.0"; empty elsewhere."""
    torchrun_args: tuple[str, ...] = ()
    """Options to add before the user's torchrun options."""
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables to set for the started process."""
    note: str | None = None
    """A sentence for the user on what was chosen and how to change it, or None if nothing was."""

    @property
    def alone(self) -> bool:
        """Whether this is the only member."""
        return max(self.expected, self.most) <= 1
