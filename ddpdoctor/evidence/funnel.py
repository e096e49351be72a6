"""Tells quickly whether a part of a log can interest any reader: most of a log is progress, and is only counted.

To search for some thirty triggers costs most of the time that a log takes. So upper case becomes lower, and all but
letters is left out first: progress loses half of its length, and spellings of one trigger become one.
"""

from __future__ import annotations

import string
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import LineReader

_LOWER = bytes(range(256)).lower()
_LEFT_OUT = bytes(set(range(256)) - set(string.ascii_letters.encode()))


def condense(text: bytes) -> bytes:
    """Return the letters of a text in lower case."""
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
