"""Tells quickly whether a part of a log can interest any reader: most of a log is progress, and is only counted.

To search for a hundred triggers costs most of the time that a log takes. So upper case becomes lower, and all but
letters is left out first: lines of progress, which differ in numbers, become equal, and each is searched once.
"""

from __future__ import annotations

import string
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import LineReader

_MOST_IDLE = 4096
_LONG = 512
_LOWER = bytes(range(256)).lower()
_LEFT_OUT = bytes(set(range(256)) - set(f"{string.ascii_letters}\n".encode()))


def condense(text: bytes) -> bytes:
    """Return the letters of each line of a text in lower case."""
    return text.translate(_LOWER, _LEFT_OUT)


def condensed_triggers(readers: Iterable[LineReader]) -> tuple[bytes, ...]:
    """Return the fewest condensed strings of which each trigger of the readers contains one."""
    return _fewest(frozenset(trigger for reader in readers for trigger in reader.triggers))


@cache
def _fewest(triggers: frozenset[bytes]) -> tuple[bytes, ...]:
    condensed = sorted({condense(trigger) for trigger in triggers}, key=lambda one: (len(one), one))
    kept: list[bytes] = []
    for one in condensed:
        if not any(shorter in one for shorter in kept):
            kept.append(one)
    return tuple(kept)


class Funnel:
    """Tells which parts of one log the readers want. It keeps the lines that it knows to be of no interest."""

    def __init__(self, readers: Iterable[LineReader]) -> None:
        self._triggers = condensed_triggers(readers)
        self._idle: set[bytes] = set()

    def wants(self, block: bytes) -> bool:
        """Return whether a part of the log has a trigger."""
        new = set(condense(block).split(b"\n")) - self._idle
        text = b"\n".join(new)
        if any(trigger in text for trigger in self._triggers):
            return True
        if len(self._idle) < _MOST_IDLE:
            self._idle |= {line for line in new if len(line) < _LONG}
        return False
