"""Where the ranks of one bench leave messages for each other: an open store, below the bench's own number.

Several benches may follow each other over the store of one launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.framing import BadMessage
from ddpdoctor.exchange.store import Prefixed, StoreError, wait_for
from ddpdoctor.model.codec import WrongValue, decode, encode

if TYPE_CHECKING:
    from ddpdoctor.exchange.meeting import Meeting
    from ddpdoctor.exchange.store import Store

Kind = TypeVar("Kind")
COUNTER = "bench"


class Room(Prefixed):
    """A store that takes and gives records; all calls raise ``StoreError``."""

    def __init__(self, meeting: Meeting, store: Store) -> None:
        """Enter the bench that is on now."""
        self.round = store.add(COUNTER, 0)
        super().__init__(store, f"{COUNTER}/{self.round}/")
        self._meeting, self._outside = meeting, store

    def leave(self) -> None:
        """Let who comes next start a bench of their own. For rank 0, once."""
        self._outside.add(COUNTER, 1)

    def send(self, key: str, record: Any) -> None:
        """Leave a dataclass."""
        self.set(key, self._meeting.pack(encode(record)))

    def look_for(self, kind: type[Kind], key: str, sender: str) -> Kind | None:
        """Return a dataclass, or None where there is none yet."""
        message = self.look(key)
        return None if message is None else self._read(kind, message, sender)

    def receive(self, kind: type[Kind], key: str, limit_s: float, sender: str) -> Kind:
        """Return a dataclass once it is there."""
        message = wait_for(self, key, limit_s)
        if message is None:
            raise StoreError(f"nothing was heard of {sender} within {limit_s:g} s")
        return self._read(kind, message, sender)

    def _read(self, kind: type[Kind], message: bytes, sender: str) -> Kind:
        try:
            return decode(kind, self._meeting.unpack(message))
        except (BadMessage, WrongValue) as error:
            raise StoreError(f"{sender} sent {error}") from error
