"""Looks at the store again and again while this node looks for the others, in case that it never finds them.

A store that is gone by the time the others are given up would be taken for one that was never there.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddpdoctor.model.reaching import Contact
from ddpdoctor.probes.rendezvous.door import knock

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ddpdoctor.model.reaching import Connecting
    from ddpdoctor.probes.rendezvous.torch_process import TorchProcess

FIRST_AFTER_S = 1.0
EVERY_S = 2.0
_TELLING = (
    Contact.CONNECTED,
    Contact.NO_STORE,
    Contact.RESET,
    Contact.UNREACHABLE,
    Contact.NO_ANSWER,
    Contact.FAILED,
    Contact.REFUSED,
    Contact.UNRESOLVED,
)
"""What says most first: a port that refuses is one on which nobody listens yet, or any more."""


class Scout:
    """A context in which it looks."""

    def __init__(self, host: str, port: int, torch: TorchProcess) -> None:
        """Take where the store is to be."""
        self.attempts: tuple[Connecting, ...] = ()
        """Of the look that said most."""
        self._host, self._port, self._torch = host, port, torch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="ddpdoctor-scout", daemon=True)

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop; a look that is under way is not waited for."""
        self._ended.set()

    def _look(self) -> None:
        pause_s = FIRST_AFTER_S
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            found = knock(self._host, self._port, self._torch if self._torch.is_ready else None)
            if not self._ended.is_set():
                self.attempts = more_telling(self.attempts, found)


def more_telling(one: tuple[Connecting, ...], other: tuple[Connecting, ...]) -> tuple[Connecting, ...]:
    """Return which of two looks says more; of two that say as much, the later one, which is ``other``."""
    return min((other, one), key=_order)


def _order(attempts: tuple[Connecting, ...]) -> int:
    return min((_TELLING.index(one.contact) for one in attempts), default=len(_TELLING))
