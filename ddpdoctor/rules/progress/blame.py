"""Who is to blame for a disagreement: the minority, else the rank whose call does not fit its own history."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence

from .timeline import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from ddpdoctor.model.call_log import CallKind
    from ddpdoctor.model.stacks import Frame

    from .timeline import Timeline

MAX_HISTORY = 4096
"""How many of a rank's last numbers are searched for a pattern if few ranks disagree."""
ALL_HISTORY = 1 << 16
"""The same limit, over all ranks that disagree."""
ENOUGH = 3
"""Collectives before the disagreement that make a history. Our choice: fewer show no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has under a number: its recorded call, or the phase in which C++ makes the collective."""

    rank: int
    kind: CallKind
    native: bool
    place: int
    """Index of the call or phase."""
    started_ns: int

    @property
    def site(self) -> Frame | None:
        """The user's line that made the call."""
        return self.kind.site

    @property
    def key(self) -> Hashable:
        """The operation and the line. Patterns are made of these."""
        return key_of(self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who is to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    reason: str


def find_blame(
    parts: Sequence[Part], lines: Sequence[Timeline], seq: int, sign: Callable[[Part], Hashable]
) -> Blame:  # fmt: skip
    """Blame the minority; without a majority, blame the rank whose call least fits its own history."""
    classes: dict[Hashable, list[int]] = defaultdict(list)
    for part in parts:
        classes[sign(part)].append(part.rank)
    largest = max(classes.values(), key=len)
    most = set(largest)
    if 2 * len(most) > len(parts) and len(most) > 1:
        ranks = tuple(part.rank for part in parts if part.rank not in most)
        return Blame(
            ranks=ranks, confidence=Confidence.HIGH, reason=f"{len(most)} of {len(parts)} ranks agree with each other"
        )
    departing = _departing(parts, {line.rank: line for line in lines}, seq)
    if departing:
        return Blame(
            ranks=departing, confidence=Confidence.MEDIUM, reason="its call departs from the order of calls so far"
        )
    return Blame(
        ranks=tuple(part.rank for part in parts),
        confidence=Confidence.LOW,
        reason="neither side is in the majority, and no earlier calls tell which one departs",
    )


def _departing(parts: Sequence[Part], lines: Mapping[int, Timeline], seq: int) -> tuple[int, ...]:
    """Return the ranks whose call is the least expected, or none if the history does not show it."""
    most = min(MAX_HISTORY, max(ALL_HISTORY // len(parts), 64))
    scores = {part.rank: _familiarity(lines[part.rank], part, seq, most) for part in parts}
    if None in scores.values() or len(set(scores.values())) < 2:
        return ()
    lowest = min(score for score in scores.values() if score is not None)
    return tuple(rank for rank, score in scores.items() if score == lowest)


def _familiarity(line: Timeline, part: Part, seq: int, most: int) -> tuple[float, bool, bool] | None:
    """Return how likely the call is by the rank's own history, and whether the rank made it before.

    The second value says whether the rank made it at all, the third whether with the same dtype, shape, root and
    reduction. Return None if the history is too short.
    """
    before = [line.entries[number] for number in sorted(line.entries) if number < seq][-most:]
    if len(before) < ENOUGH:
        return None
    keys = [key_of(entry.kind) for entry in before]
    share = expected_next(keys).get(part.key, 0.0)
    known = line.first_places.get(part.key, part.place) < part.place
    same = any(_like(entry.kind) == _like(part.kind) for entry in before)
    return share, known, same


def _like(kind: CallKind) -> Hashable:
    return (kind.op, kind.dtype, kind.shape, kind.peer, kind.redop)


def expected_next(history: Sequence[Hashable]) -> dict[Hashable, float]:
    """Return what followed the longest earlier repetitions of the history's end, and how often (by the Z-function)."""
    backwards = list(reversed(history))
    lengths = _z_function(backwards)
    longest = max(lengths[1:], default=0)
    if longest == 0:
        return {}
    followers = Counter(backwards[i - 1] for i in range(1, len(backwards)) if lengths[i] == longest)
    return {key: count / followers.total() for key, count in followers.items()}


def _z_function(keys: Sequence[Hashable]) -> list[int]:
    """Return, for each place, how many keys from there on are the same as from the beginning."""
    size = len(keys)
    lengths = [0] * size
    left = right = 0
    for i in range(1, size):
        if i < right:
            lengths[i] = min(right - i, lengths[i - left])
        while i + lengths[i] < size and keys[lengths[i]] == keys[i + lengths[i]]:
            lengths[i] += 1
        if i + lengths[i] > right:
            left, right = i, i + lengths[i]
    return lengths
