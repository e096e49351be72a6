"""What torch's flight recorder dumped of one rank: the calls of each group, in columns. No judgment, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from ddpdoctor.model.evidence import Spot
    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, order=True)
class FlightCall:
    """A collective, without what differs from one call to the next."""

    op: str
    """Python's name for it: "all_reduce", "reduce_scatter_tensor"."""
    numels_in: tuple[int, ...]
    """Elements of each input; empty if there is none, or the backend does not say."""
    numels_out: tuple[int, ...]
    shape: tuple[int, ...]
    """The shape of the first input."""
    dtype: str
    """The dtype of the first input: "float32"; empty if unknown."""


@dataclass(frozen=True, slots=True)
class FlightTransfer:
    """A send or receive that has not completed."""

    op: str
    """"send" or "recv"."""
    peer: int | None
    """The other rank within the group; None: any source, or unknown."""
    nth: int
    """Its number, from 1, among all transfers of this kind with this peer that the dump holds."""
    numel: int | None
    created_ns: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class FlightGroup:
    """The calls of one process group, oldest first."""

    name: str
    desc: str
    members: tuple[int, ...] | None
    """Global ranks in the order of their group ranks, or None if the dump does not say."""
    calls: tuple[tuple[FlightCall, ...], ...]
    """The different calls of the group: one collective, or those of a coalesced block in a fixed order."""
    which: array[int]
    """The call of each number, as an index into ``calls``."""
    seq: array[int]
    """The numbers, strictly increasing. They count the collectives of the group."""
    done: int
    """How many of them, from the start, have completed. The next one, if there is one, is pending."""
    knows_ends: bool
    """False: the backend does not say which calls have completed, and ``done`` counts all but the last one."""
    timed_out: bool
    """The pending call ran into a time limit."""
    limit_s: float | None
    """The time limit of the pending call."""
    pending_ns: int | None
    """Wall clock at which the pending call was made."""
    pending_frames: tuple[Frame, ...]
    """Where the pending call was made, outermost first."""
    pending_in_backward: bool
    """A thread of autograd made the pending call, and no Python did: DDP's reducer."""
    last_frames: tuple[Frame, ...]
    """Where the last call was made, outermost first."""
    transfers: tuple[FlightTransfer, ...]
    """Sends and receives that have not completed, oldest first."""
    made: Mapping[tuple[str, int | None], int]
    """How many sends and receives the dump holds, by kind and peer."""
    last_made_ns: Sequence[int] = ()
    """Wall clock at which each of the last calls was made, as many as there are."""
    last_ended_ns: Sequence[int] = ()
    """Wall clock at which each of them was seen to have completed; 0: not known."""

    @property
    def last(self) -> int:
        """The number of the last collective that was made; 0: none."""
        return self.seq[-1] if self.seq else 0

    @property
    def last_done(self) -> int:
        """The number up to which collectives have completed, as far as the dump goes back."""
        return self.seq[self.done - 1] if self.done else (self.seq[0] - 1 if self.seq else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One dump."""

    rank: int | None
    """From the file's name, because the content does not say."""
    spot: Spot
    version: str
    """"2.10"."""
    groups: tuple[FlightGroup, ...]
    world_size: int | None
    """The size of the default group, or at least as many ranks as its groups name; None: no group names its ranks."""
    wrapped: bool
    """The ring was full: older entries are lost."""
    one_counter: bool
    """TorchComms: one counter for all groups, so that numbers of a group were given anew by order."""
    first_ns: int | None
    """Wall clock of the oldest and of the newest entry."""
    last_ns: int | None
    has_frames: bool
    damaged: str = ""
    """What is wrong with it, such as "cut off"; empty: nothing."""
