"""The ranks of a probe as one of them sees them: they meet, rank 0 hears all, and all end with one status.

Nothing of this goes over a process group: which may be what is wrong, and which the user's code may make for itself.

Keys, below the probe's own number (see ``Room``): ``NAME/RANK`` for what is gathered, ``status``, and ``left``.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.meeting import Meeting
from ddpdoctor.exchange.store import StoreError, wait_for
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.probes.bandwidth.connect import open_store
from ddpdoctor.probes.bandwidth.room import Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ddpdoctor.model.launch import Launch

Kind = TypeVar("Kind")

MEET_LIMIT_S = 60.0
"""Ours: how long a rank tries to reach the store. Importing torch on a busy host takes tens of seconds."""
LEAVE_LIMIT_S = 5.0
"""Ours: how long rank 0, which may serve the store, waits for the others to have heard the status."""
LOOK_EVERY_S = 0.02


class Together:
    """One rank among others; alone where there is no launcher."""

    def __init__(self, launch: Launch, room: Room | None) -> None:
        """Take who this rank is; ``room`` is None for one that is alone."""
        self.rank, self.world_size = launch.rank, launch.world_size
        self._launch = launch
        self._room = room

    def open_store(self) -> Any:
        """Return a store of torch that all ranks share, for a process group. Raises ``StoreError``."""
        if self._room is None:
            from torch.distributed import HashStore

            return HashStore()
        return open_store(self._launch, self._room, MEET_LIMIT_S)

    def gather(self, name: str, record: Kind, limit_s: float) -> tuple[Kind, ...] | None:
        """Return the records of all ranks, in their order, on rank 0; None on the others, which go on at once.

        ``record`` is a dataclass that ``codec`` knows. Raises ``StoreError`` for ranks of which nothing is heard.
        """
        if self._room is None:
            return (record,)
        if self.rank != 0:
            self._room.send(f"{name}/{self.rank}", record)
            return None
        heard: dict[int, Kind] = {0: record}
        deadline = time.monotonic() + limit_s
        while waiting := [rank for rank in range(self.world_size) if rank not in heard]:
            before = len(heard)
            for rank in waiting:
                found = self._room.look_for(type(record), f"{name}/{rank}", f"rank {rank}")
                if found is not None:
                    heard[rank] = found
            if len(heard) == before:
                if time.monotonic() > deadline:
                    raise StoreError(f"nothing was heard of {rank_list(waiting)} within {limit_s:g} s")
                time.sleep(LOOK_EVERY_S)
        return tuple(heard[rank] for rank in range(self.world_size))

    def end(self, decide: Callable[[], int], limit_s: float) -> int:
        """Have rank 0 decide on the exit status; return it on every rank, once all can know.

        torchrun stops those that are left when one ends badly: so all end together. ``limit_s`` is how long the others
        wait for rank 0.
        """
        if self._room is None:
            return decide()
        if self.rank == 0:
            return self._lead(self._room, decide)
        told = wait_for(self._room, "status", limit_s)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on nothing is left that it should cut short
        with suppress(StoreError):  # rank 0 may have waited long enough
            self._room.add("left", 1)
        return ExitStatus.INCONCLUSIVE if told is None else int(told)

    def _lead(self, room: Room, decide: Callable[[], int]) -> int:
        status: int = ExitStatus.DEFECT
        try:
            status = decide()
        except UserError as error:
            status = error.status
            raise
        finally:
            room.leave()
            room.set("status", b"%d" % status)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._see_off(room)
        return status

    def _see_off(self, room: Room) -> None:
        deadline = time.monotonic() + LEAVE_LIMIT_S
        with suppress(StoreError):
            while room.add("left", 0) < self.world_size - 1 and time.monotonic() < deadline:
                time.sleep(LOOK_EVERY_S)


@contextmanager
def together(launch: Launch, env: Mapping[str, str], limit_s: float = MEET_LIMIT_S) -> Iterator[Together]:
    """Meet the other ranks. Raises ``UserError`` where they cannot be reached or are lost on the way."""
    if launch.launcher is Launcher.NONE or launch.world_size == 1:
        yield Together(launch, None)
        return
    try:
        with Meeting(launch, env) as meeting, closing(meeting.open(limit_s)) as store:
            yield Together(launch, Room(meeting, store))
    except StoreError as error:
        raise unreachable(launch, error) from error


def unreachable(launch: Launch, error: Any) -> UserError:
    """Return what to tell the user of a store that cannot be reached, or of ranks that are lost on the way."""
    place = f"{launch.hosts[0]}:{launch.port}"
    if launch.rank == 0:
        advice = "Did a rank fail before it came here? Is the command the same on every rank?"
        return UserError(
            f"the ranks cannot go on together at {place}: {error}", help=advice, status=ExitStatus.INCONCLUSIVE
        )
    return UserError(
        f"rank {launch.rank} cannot go on without rank 0 at {place}: {error}",
        help="Is the command running on rank 0's host? Check MASTER_ADDR, MASTER_PORT and firewalls.",
        status=ExitStatus.INCONCLUSIVE,
    )
