"""Where a rank parted from the others, by its records: the first act that differs, or an equal call from another line.

The difference may show only later. A rank that skips one backward goes on to its next forward, and is at the end of its
loop while the others still reduce gradients. An equal collective from another line passes and shifts all later ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.rules.progress.states import NATIVE_PHASES, is_collective_op
from ddpdoctor.rules.progress.timeline import key_of, line_key, read_events

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from ddpdoctor.model.facts import CallKind

    from ddpdoctor.rules.progress.states import RankState
    from ddpdoctor.rules.progress.timeline import GroupCalls


MOST_SHIFT = 8
"""Most extra or missing calls in a row that are searched for. Our choice: the calls of one function, say a metric's."""


def find_departure(lines: Sequence[GroupCalls], blamed: Collection[int], seq: int) -> int | None:
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


def _pair(lines: Sequence[GroupCalls], blamed: Collection[int]) -> tuple[GroupCalls, GroupCalls] | None:
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


MOST_RECORDS = 4096
"""Records of a rank that are compared: as many as its ring holds. Only two ranks are compared."""

MOST_AHEAD = 32
"""How many numbers after a parting are searched, to distinguish a call too many from one too few."""
MOST_ALIKE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """How one rank and another went on after the last thing they both did."""

    before: CallKind | None
    """The last thing that both did."""
    instead_of: CallKind
    """What the other rank did next."""
    went_on: CallKind | None = None
    """What the parted rank did next, or None if that was nothing that the group can see."""
    is_earlier: bool = False
    """Both ranks have gone on since, so the difference shows later."""
    is_extra: bool = False
    """``went_on`` is an extra call, after which the rank did what was due."""

    @property
    def repeats(self) -> bool:
        """Whether the rank makes the call of a line again, and the others went on from there."""
        if self.before is None or self.went_on is None or self.is_earlier:
            return False
        return self.went_on.op not in NATIVE_PHASES and line_key(self.went_on) == line_key(self.before)


@dataclass(frozen=True, slots=True)
class _Act:
    """A call or phase, and whether it took numbers (None: not known). A backward under ``no_sync`` takes none."""

    kind: CallKind
    took: bool | None

    @property
    def key(self) -> Hashable:
        return line_key(self.kind)

    @property
    def is_collective(self) -> bool:
        """Whether all ranks had to do it."""
        return bool(self.took) or self.kind.op not in NATIVE_PHASES

    def is_like(self, other: _Act) -> bool:
        return self.key == other.key and (None in {self.took, other.took} or self.took == other.took)


def find_parting(one: RankState, other: RankState, group: str, seq: int) -> Parting | None:
    """Return where ``one`` parted from ``other``, at or before the collective ``seq`` of a group.

    Acts that only one of them ever makes do not count: with `if rank == 0: broadcast(x)`, the others have another line.
    """
    mine, others = _acts(one, group), _acts(other, group)
    shared = _keys(mine) & _keys(others)
    first = max(min(mine, default=0), min(others, default=0)) + 1
    before: CallKind | None = None
    for number in sorted(number for number in mine.keys() & others.keys() if first <= number < seq):
        ours = [act for act in mine[number] if act.key in shared]
        theirs = [act for act in others[number] if act.key in shared]
        at = next((at for at, act in enumerate(theirs) if at == len(ours) or not ours[at].is_like(act)), None)
        if at is None:
            before = ours[-1].kind if ours else before
            continue
        before = ours[at - 1].kind if at else before
        if at == len(ours) and _comes_next(mine, number, shared, theirs[at]):
            return None  # it is due after a call that only this rank makes, and that did not stop the host
        if len(ours) < len(mine[number]) or (at == len(ours) and number == max(mine)):
            return Parting(before=before, instead_of=theirs[at].kind)
        return Parting(
            before=before,
            went_on=ours[at].kind if at < len(ours) else None,
            instead_of=theirs[at].kind,
            is_earlier=number < max(mine) or at + 1 < len(ours),
            is_extra=at < len(ours)
            and ours[at].is_collective
            and _is_extra(_from(mine, number, at), _from(others, number, at)),
        )
    rest = [act.kind for number in sorted(others) if number > max(mine, default=0) for act in others[number]]
    return Parting(before=before, instead_of=rest[0]) if rest else None


def _comes_next(acts: Mapping[int, Sequence[_Act]], number: int, shared: Collection[Hashable], due: _Act) -> bool:
    """Return whether a rank's next act of those that others make too, after a number, is the one that is due."""
    later = (act for at in sorted(acts) if at > number for act in acts[at] if act.key in shared)
    following = next(later, None)
    return following is not None and following.is_like(due)


def _from(acts: Mapping[int, Sequence[_Act]], start: int, at: int) -> list[_Act]:
    return [act for number in range(start, start + MOST_AHEAD) for act in acts.get(number, ())][at:]


def _is_extra(ours: Sequence[_Act], theirs: Sequence[_Act]) -> bool:
    """Return whether ``ours`` matches ``theirs`` after a few extra acts of its own, and not the other way around."""
    for more in range(1, MOST_SHIFT + 1):
        if _go_alike(ours, theirs[more:]):
            return False
        if _go_alike(ours[more:], theirs):
            return True
    return False


def _go_alike(one: Sequence[_Act], other: Sequence[_Act]) -> bool:
    pairs = list(zip(one[:MOST_ALIKE], other, strict=False))
    return bool(pairs) and all(mine.is_like(theirs) for mine, theirs in pairs)


def _acts(state: RankState, group: str) -> Mapping[int, Sequence[_Act]]:
    """Return what a rank did, by how many collectives its group had begun before.

    A forward without gradients that took no number is left out, because each rank may evaluate as often as it likes.
    """
    found: dict[int, list[_Act]] = defaultdict(list)
    records = read_events(state, group, MOST_RECORDS)
    events = [event for event in records if event.kind.op in NATIVE_PHASES or is_collective_op(event.kind.op)]
    begun = [event.number - is_collective_op(event.kind.op) for event in events]
    for at, event in enumerate(events):
        took = begun[at + 1] > begun[at] if at + 1 < len(events) else None
        if event.kind.op != "ddp_forward_no_grad" or took:
            found[begun[at]].append(_Act(event.kind, took if event.kind.op == "backward" else None))
    return found


def _keys(acts: Mapping[int, Sequence[_Act]]) -> set[Hashable]:
    return {act.key for of_number in acts.values() for act in of_number}
