"""Ranks that disagree about a collective of the same group and number, and who of them is to blame.

The minority is to blame, else the rank whose call does not fit its own history.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import kind_of, pack_calls
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import grouped, majority_of

from ddpdoctor.rules.progress.groups import CallPosition, Group, find_group, recorded_seq
from ddpdoctor.rules.progress.parting import find_departure
from ddpdoctor.rules.progress.states import FORWARDS, NATIVE_PHASES, Activity, RankState
from ddpdoctor.rules.progress.timeline import GroupCalls, TimelineEntry, key_of, read_timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.facts import CallKind

    from ddpdoctor.rules.progress.timeline import GroupCalls


MAX_HISTORY = 4096
"""How many of a rank's last numbers are searched for a pattern if few ranks disagree."""
ALL_HISTORY = 1 << 16
"""The same limit, over all ranks that disagree."""
ENOUGH = 3
"""Collectives before the disagreement that make a history. Our choice: fewer show no pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Who is to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    reason: str


def find_blame(
    parts: Sequence[TimelineEntry], lines: Sequence[GroupCalls], seq: int, sign: Callable[[TimelineEntry], Hashable]
) -> Blame:  # fmt: skip
    """Blame the minority; without a majority, blame the rank whose call least fits its own history."""
    most = set(majority_of(grouped((sign(part), part.rank) for part in parts).values()))
    if most:
        return Blame(
            ranks=tuple(part.rank for part in parts if part.rank not in most),
            confidence=Confidence.HIGH,
            reason=f"{len(most)} of {len(parts)} ranks agree",
        )
    departing = _departing(parts, {line.rank: line for line in lines}, seq)
    if departing:
        return Blame(
            ranks=departing, confidence=Confidence.MEDIUM, reason="its call breaks the order of its earlier calls"
        )
    return Blame(
        ranks=tuple(part.rank for part in parts),
        confidence=Confidence.LOW,
        reason="there is no majority, and the earlier calls do not show which side is wrong",
    )


def _departing(parts: Sequence[TimelineEntry], lines: Mapping[int, GroupCalls], seq: int) -> tuple[int, ...]:
    """Return the ranks whose call is the least expected, or none if the history does not show it."""
    most = min(MAX_HISTORY, max(ALL_HISTORY // len(parts), 64))
    one_line = len({part.site for part in parts}) == 1
    scores = {part.rank: _familiarity(lines[part.rank], part, seq, most, one_line=one_line) for part in parts}
    if None in scores.values() or len(set(scores.values())) < 2:
        return ()
    lowest = min(score for score in scores.values() if score is not None)
    return tuple(rank for rank, score in scores.items() if score == lowest)


def _familiarity(
    line: GroupCalls, part: TimelineEntry, seq: int, most: int, *, one_line: bool
) -> tuple[float, bool, bool] | None:
    """Return how likely the call is by the rank's own history, and whether the rank made it before.

    The second value says whether the rank made it at all, the third whether with the same dtype, shape, root and
    reduction. That says nothing of lines that no rank has come to before, such as those of `if rank == 0:` and its
    `else:`. Return None if the history is too short.
    """
    before = [line.entries[number] for number in sorted(line.entries) if number < seq][-most:]
    if len(before) < ENOUGH:
        return None
    keys = [key_of(entry.kind) for entry in before]
    share = expected_next(keys).get(part.key, 0.0)
    known = line.first_places.get(part.key, part.place) < part.place
    same = (known or one_line) and any(_like(entry.kind) == _like(part.kind) for entry in before)
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


MOST_RECORDS = 4096
"""Records of a rank that are compared if the group is small: as many as its ring holds."""
ALL_RECORDS = 1 << 18
"""Records of all ranks of a group that are compared: then 1,024 ranks are judged within seconds."""
SAME_SHAPE = frozenset({
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "gather_into_tensor",
})  # fmt: skip
"""Operations that need one shape on all ranks."""
EVEN_SHAPE = SAME_SHAPE | {"all_gather", "gather", "scatter", "reduce_scatter", "all_gather_coalesced"}
"""Operations for which some backends allow different shapes on different ranks. Shape counts only if one does not
complete."""
ANY_SHAPE = EVEN_SHAPE | {"all_to_all", "all_to_all_single"}
"""Also the operations that are made for different splits. Shape counts only if a rank was aborted inside."""
COALESCED = "coalesced"
"""torch's name for a batch of calls of any kind."""
ROOTED = frozenset({"broadcast", "reduce", "gather", "gather_into_tensor", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Different calls in one group under one number, and who is to blame for it."""

    group: Group
    seq: int
    parts: tuple[TimelineEntry, ...]
    blame: Blame
    passed: bool
    """The calls matched and went through, but they shifted later calls, which then disagreed."""
    left: tuple[int, ...] = ()
    """Ranks that never made such a call and whose scripts have ended."""


def _signature(entry: TimelineEntry, shaped: AbstractSet[str]) -> Hashable:
    """Return what must be equal on all ranks. The shape is part of it for the operations in ``shaped``."""
    kind = entry.kind
    if entry.native:
        return "forward" if kind.op in FORWARDS else kind.op
    shape = kind.shape if kind.op in shaped else None
    root = (kind.peer or 0) if kind.op in ROOTED else None
    redop = (kind.redop or "SUM") if kind.op in REDUCING else None
    return (kind.op, kind.dtype, shape, root, redop)


def find_conflict(
    states: Mapping[int, RankState], positions: Mapping[int, CallPosition], shaped: AbstractSet[str] = SAME_SHAPE
) -> Conflict | None:
    """Return the earliest disagreement in a group that a rank waits in."""
    for group in dict.fromkeys(position.group for position in positions.values()):
        conflict = _conflict_in(group, states, positions, shaped)
        if conflict is not None:
            return conflict
    return None


def find_misread(
    states: Mapping[int, RankState], table: Mapping[tuple[int, str], Group], world: int
) -> Conflict | None:
    """Return the first call of a finished job in which ranks had tensors of one shape and different dtypes.

    Gloo lets a shorter message through, and the receiver reads its bytes as its own dtype.
    """
    dtypes: dict[Hashable, dict[int, set[str | None]]] = {}
    for number, state in states.items():
        for kind in pack_calls(state.rank.recent_calls).counts:
            if kind.op in EVEN_SHAPE and kind.site is not None and kind.dtype is not None and not kind.failed:
                key = (kind.op, kind.site, kind.shape, kind.group)
                dtypes.setdefault(key, {}).setdefault(number, set()).add(kind.dtype)
    named = {key[3] for key, found in dtypes.items() if len(set(map(frozenset, found.values()))) > 1}  # type: ignore[index]
    groups = {find_group(table, states[n].rank, name, world) for name in sorted(named) for n in states}
    for group in sorted(groups, key=attrgetter("name", "members")):
        if set(group.members) <= set(states):
            lines = [read_timeline(states[n], group.name, most=MOST_RECORDS) for n in group.members]
            for seq in sorted(set.intersection(*(set(line.entries) for line in lines))):
                parts = _parts_at(lines, seq)
                alike = {(part.kind.op, part.site, part.kind.shape) for part in parts if not part.native}
                if (
                    len(alike) == 1
                    and len({part.kind.dtype for part in parts}) > 1
                    and not any(p.native for p in parts)
                ):
                    blame = find_blame(parts, lines, seq, lambda part: part.kind.dtype)
                    return Conflict(group=group, seq=seq, parts=parts, blame=blame, passed=True)
    return None


def _conflict_in(
    group: Group, states: Mapping[int, RankState], positions: Mapping[int, CallPosition], shaped: AbstractSet[str]
) -> Conflict | None:
    members = [states[m] for m in group.members if m in states]
    most = min(MOST_RECORDS, max(ALL_RECORDS // max(1, len(members)), 64))
    lines = [read_timeline(state, group.name, most=most) for state in members]
    lines = _with_unnumbered(lines, states, positions, group)
    seq = _first_difference(lines, shaped)
    if seq is None:
        return None
    parts = _parts_at(lines, seq)
    loose = any(part.unrecorded for part in parts)  # torch alone reports a call: only the operation is known
    blame = find_blame(parts, lines, seq, lambda part: part.kind.op if loose else _signature(part, shaped))
    earlier = find_departure(lines, blame.ranks, seq)
    if earlier is None:
        return Conflict(group=group, seq=seq, parts=parts, blame=blame, passed=False)
    parts = _parts_at(lines, earlier)
    blame = find_blame(parts, lines, earlier, lambda part: part.key)
    return Conflict(group=group, seq=earlier, parts=parts, blame=blame, passed=True)


def _first_difference(lines: list[GroupCalls], shaped: AbstractSet[str]) -> int | None:
    """Return the lowest number under which two ranks have different collectives."""
    signatures: dict[int, Hashable] = {}
    first: dict[int, Hashable] = {}
    differing: int | None = None
    for line in lines:
        for seq, entry in line.entries.items():
            if entry.unrecorded or (differing is not None and seq >= differing):
                continue
            key = 2 * id(entry.kind) + entry.native
            found = signatures.get(key)
            if found is None:
                found = signatures[key] = _signature(entry, shaped)
            if first.setdefault(seq, found) != found:
                differing = seq
    unrecorded = _first_unrecorded_difference(lines)
    return min((seq for seq in (differing, unrecorded) if seq is not None), default=None)


def _first_unrecorded_difference(lines: list[GroupCalls]) -> int | None:
    """Return the lowest number under which a call that only torch reports differs in its operation from a peer's.

    Shapes and dtypes are not compared, because torch names them in its own way. DDP phases are not compared either,
    because it is not known which calls they make.
    """
    unrecorded = {seq for line in lines for seq, entry in line.entries.items() if entry.unrecorded}
    for seq in sorted(unrecorded):
        entries = (line.entries.get(seq) for line in lines)
        ops = {entry.kind.op for entry in entries if entry is not None and not entry.native} - {COALESCED}
        if len(ops) > 1:
            return seq
    return None


def _parts_at(lines: list[GroupCalls], seq: int) -> tuple[TimelineEntry, ...]:
    found = (line.entries.get(seq) for line in sorted(lines, key=attrgetter("rank")))
    return tuple(entry for entry in found if entry is not None)


def _with_unnumbered(
    lines: list[GroupCalls], states: Mapping[int, RankState], positions: Mapping[int, CallPosition], group: Group
) -> list[GroupCalls]:
    """Give ranks that wait in a DDP phase without a known number an entry under the numbers the others wait for."""
    pending = {position.seq for position in positions.values() if position.group == group and position.seq is not None}
    found = []
    for line in lines:
        state = states[line.rank]
        call = state.call
        mine = positions.get(line.rank)
        counts = call is not None and call.op in NATIVE_PHASES and call.begun is None
        if state.doing is not Activity.NATIVE or call is None or not counts or mine is None or mine.group != group:
            found.append(line)
            continue
        entry = TimelineEntry(line.rank, kind_of(call), native=True, place=call.index)
        above = recorded_seq(state.rank, group.name)
        missing = {seq: entry for seq in pending if seq > above and seq <= (mine.seq or seq)}
        found.append(replace(line, entries={**missing, **line.entries}))
    return found
