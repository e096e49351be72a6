"""How the ranks of a trial hand records to rank 0: over the launcher's store, and never over what is being tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.probes.together import Together

if TYPE_CHECKING:
    from ddpdoctor.model.launch import Launch
    from ddpdoctor.probes.bandwidth.room import Room

Kind = TypeVar("Kind")


class Peers(Together):
    """One rank's view of the others. Every call raises ``StoreError`` where a record does not come in time."""

    def __init__(self, launch: Launch, room: Room, limit_s: float) -> None:
        """Take who this is, the room, and how long to wait for another rank."""
        super().__init__(launch, room)
        self._own_room, self._limit_s = room, limit_s

    def collect(self, name: str, record: Kind) -> tuple[Kind, ...] | None:
        """Return the records of all ranks, in their order, on rank 0; None on the others."""
        return self.gather(name, record, self._limit_s)

    def hear(self, kind: type[Kind], name: str, record: Kind | None) -> Kind:
        """Return rank 0's record on all ranks; the others give None."""
        if record is not None:
            self._own_room.send(name, record)
            return record
        return self._own_room.receive(kind, name, self._limit_s, "rank 0")
