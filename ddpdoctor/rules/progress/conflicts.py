"""Ranks that disagree about a collective of the same group and number, and who of them departs from the pattern."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence

from .groups import Group, Position, default_name, recorded_seq
from .states import NATIVE_PHASES, Doing, State, is_collective

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.facts import Call, Frame, Rank

MAX_HISTORY = 256
"""Recorded calls of a rank, counted from the last, that are compared: 512 ranks are then judged within a second."""
SAME_SHAPE = frozenset({"all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor"})
"""Operations that need one shape and dtype on all ranks; the others may have different splits."""
NATIVE = "DDP's reduction"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has under a number: its recorded call, or the phase in which C++ makes the collective."""

    rank: int
    call: Call
    native: bool

    @property
    def site(self) -> Frame | None:
        """The user's line that made the call."""
        return self.call.site


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Different calls under one group and number, and who is to blame for it."""

    group: Group
    seq: int | None
    parts: tuple[Part, ...]
    blamed: tuple[int, ...]
    confidence: Confidence
    reason: str


def signature(part: Part, *, loose: bool = False) -> Hashable:
    """Return what has to be equal on all ranks. ``loose`` compares shapes of all operations."""
    call = part.call
    if part.native:
        return NATIVE
    compares = call.op in SAME_SHAPE or (loose and call.shape is not None)
    return (call.op, call.dtype, call.shape) if compares else call.op


def find_conflict(
    states: Mapping[int, State], positions: Mapping[int, Position], *, loose: bool = False
) -> Conflict | None:
    """Return the earliest disagreement in a group that somebody waits in."""
    for group in dict.fromkeys(position.group for position in positions.values()):
        members = [states[m] for m in group.members if m in states]
        recorded = _recorded_parts(members, group.name)
        pending = {s.seq for s in positions.values() if s.group == group}
        natives = [state for state in members if _is_native(state, positions, group)]
        for seq in sorted(recorded):
            parts = dict(recorded[seq])
            for state in natives:
                number = state.rank.rank
                if number not in parts and _native_has(state, seq, positions, pending):
                    parts[number] = _native_part(state)
            if len({signature(part, loose=loose) for part in parts.values()}) > 1:
                return _blame(group, seq, tuple(parts[n] for n in sorted(parts)), states, loose=loose)
    return None


def _recorded_parts(members: Sequence[State], name: str) -> dict[int, dict[int, Part]]:
    """Return, for each number in the group, what ranks have recorded under it."""
    found: dict[int, dict[int, Part]] = defaultdict(dict)
    for state in members:
        rank = state.rank
        for call in (*rank.recent_calls[-MAX_HISTORY:], *rank.open_calls):
            if call.group == name and call.seq is not None and is_collective(call):
                found[call.seq][rank.rank] = Part(rank=rank.rank, call=call, native=False)
    return found


def _is_native(state: State, positions: Mapping[int, Position], group: Group) -> bool:
    position = positions.get(state.rank.rank)
    return state.doing is Doing.NATIVE and position is not None and position.group == group


def _native_has(state: State, seq: int, positions: Mapping[int, Position], pending: AbstractSet[int | None]) -> bool:
    """Return whether C++ has, or may have, this number in a rank that recorded nothing under it."""
    rank = state.rank
    high = positions[rank.rank].seq
    if high is None:
        return seq in pending and seq > recorded_seq(rank, default_name(rank))
    in_window = _window(rank, default_name(rank))
    if in_window is None:
        # Under DETAIL the pending number is the counter or one more: see groups.native_seq.
        return seq in pending and high - 2 < seq <= high
    return in_window < seq <= high


def _window(rank: Rank, name: str) -> int | None:
    """Return the lowest number that the rank still has a record of: below it nothing can be said."""
    recent = rank.recent_calls[-MAX_HISTORY:]
    return min((c.seq for c in recent if c.seq is not None and c.group == name), default=None)


def _native_part(state: State) -> Part:
    assert state.call is not None
    return Part(rank=state.rank.rank, call=state.call, native=True)


def _blame(
    group: Group, seq: int, parts: tuple[Part, ...], states: Mapping[int, State], *, loose: bool
) -> Conflict:  # fmt: skip
    """Blame the minority; without a majority, the rank whose call departs from what its own history foretells."""
    classes: dict[Hashable, list[int]] = defaultdict(list)
    for part in parts:
        classes[signature(part, loose=loose)].append(part.rank)
    most = max(classes.values(), key=len)
    if 2 * len(most) > len(parts) and len(most) > 1:
        blamed = tuple(p.rank for p in parts if p.rank not in set(most))
        confidence, reason = Confidence.HIGH, f"{len(most)} of {len(parts)} ranks agree with each other"
    else:
        departing = _departing(parts, states)
        blamed = departing or tuple(part.rank for part in parts)
        confidence = Confidence.MEDIUM if departing else Confidence.LOW
        reason = "its call departs from the order of calls so far" if departing else "neither side is in the majority"
    return Conflict(group=group, seq=seq, parts=parts, blamed=blamed, confidence=confidence, reason=reason)


def _departing(parts: Sequence[Part], states: Mapping[int, State]) -> tuple[int, ...]:
    """Return the ranks whose call is the least expected, or none where the history does not tell."""
    scores = {part.rank: _familiarity(states[part.rank].rank, part) for part in parts}
    known = {score for score in scores.values() if score is not None}
    if len(known) < 2 or None in scores.values():
        return ()
    lowest = min(known)
    return tuple(rank for rank, score in scores.items() if score == lowest)


def _familiarity(rank: Rank, part: Part) -> tuple[bool, bool] | None:
    """Return whether the rank's call is what its history foretells, and whether it had this dtype and shape before."""
    before = [c for c in rank.recent_calls if c.index < part.call.index and _in_order(c)][-MAX_HISTORY:]
    if not before:
        return None
    keys = [_key(call) for call in before]
    same = [call for call in before if _key(call) == _key(part.call)]
    alike = any((call.dtype, call.shape) == (part.call.dtype, part.call.shape) for call in same)
    return _key(part.call) in expected_next(keys), alike


def _in_order(call: Call) -> bool:
    return is_collective(call) or call.op in ("backward", "ddp_init")


def _key(call: Call) -> Hashable:
    site = call.site
    native = call.op in NATIVE_PHASES
    return (call.op, None if native or site is None else (site.file, site.line))


def expected_next(history: Sequence[Hashable]) -> frozenset[Hashable]:
    """Return what followed the longest earlier repetition of the history's end, by the Z-function: linear time."""
    backwards = list(reversed(history))
    lengths = _z_function(backwards)
    longest = max(lengths[1:], default=0)
    if longest == 0:
        return frozenset(key for key, _ in Counter(history).most_common(1))
    return frozenset(backwards[i - 1] for i in range(1, len(backwards)) if lengths[i] == longest)


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
