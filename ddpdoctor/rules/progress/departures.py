"""Where two ranks parted before it showed: an equal collective from another line passes and shifts all later ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from .timeline import key_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from .timeline import Timeline

MOST_SHIFT = 8
"""Most extra or missing calls in a row that are searched for. Our choice: the calls of one function, say a metric's."""


def find_departure(lines: Sequence[Timeline], blamed: Collection[int], seq: int) -> int | None:
    """Return the number at which one rank made more or fewer calls than another, if that was before ``seq``.

    A different line alone proves nothing. It counts only with a shift: from there on, one rank's lines are the other's,
    the same count of numbers earlier or later.
    """
    pair = _pair(lines, blamed)
    if pair is None:
        return None
    mine, other = ({seq: key_of(entry.kind) for seq, entry in line.entries.items()} for line in pair)
    if seq not in mine or seq not in other:
        return None
    low = seq
    while low - 1 in mine and low - 1 in other:
        low -= 1
    partners = _partners(mine, other, range(low, seq + 1))
    start = next((n for n in range(low, seq) if not _agree(mine[n], other[n], partners)), None)
    if start is None:
        return None
    shifted = any(
        _is_shifted(mine, other, start, seq, by, partners) or _is_shifted(mine, other, start, seq, -by, partners)
        for by in range(1, MOST_SHIFT + 1)
    )
    return start if shifted else None


def _pair(lines: Sequence[Timeline], blamed: Collection[int]) -> tuple[Timeline, Timeline] | None:
    """Return a rank that is to blame and one that is not; if exactly two may be to blame, return these two."""
    odd = [line for line in lines if line.rank in blamed]
    rest = [line for line in lines if line.rank not in blamed]
    if odd and rest:
        return odd[0], rest[0]
    return (odd[0], odd[1]) if len(odd) == 2 else None


def _partners(
    mine: Mapping[int, Hashable], other: Mapping[int, Hashable], numbers: range
) -> dict[Hashable, Hashable]:  # fmt: skip
    """Return the pairs of lines that belong together: ``if rank == 0: broadcast(x) else: broadcast(x)``."""
    pairs: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
    for number in numbers:
        pairs[mine[number]][other[number]] += 1
    found = {}
    for key, met in pairs.items():
        partner, times = met.most_common(1)[0]
        if key not in met and times > 1:
            found[key] = partner
    return found


def _agree(mine: Hashable, other: Hashable, partners: Mapping[Hashable, Hashable]) -> bool:
    return mine == other or partners.get(mine) == other


def _is_shifted(
    mine: Mapping[int, Hashable],
    other: Mapping[int, Hashable],
    start: int,
    end: int,
    by: int,
    partners: Mapping[Hashable, Hashable],
) -> bool:
    """Return whether ``mine`` has ``by`` more calls from ``start`` on, or fewer if ``by`` is negative."""
    length = end - start + 1 - abs(by)
    first = start + max(by, 0), start + max(-by, 0)
    return length > 0 and all(_agree(mine[first[0] + i], other[first[1] + i], partners) for i in range(length))
