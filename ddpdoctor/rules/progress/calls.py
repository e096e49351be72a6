"""What the members of a group called under each number, where they differ, and which of them are to blame.

The minority is to blame, else the rank whose call does not fit its own history. The difference may show only later: a
rank that skips one backward continues to its next forward. An equal collective from another line shifts all later ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, islice
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import group_alike, grouped, majority_of, outvoted
from ddpdoctor.rules.progress import waits as wt
from ddpdoctor.rules.progress.states import FORWARDS, NATIVE_PHASES, NOT_COLLECTIVES, Activity, RankState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.facts import CallKind, ModelSeen, Rank, TensorSeen
    from ddpdoctor.model.stacks import Frame

    _Place = tuple[bool, int]

MAX_GAP = 4096  # most numbers in a row that one phase may take; more means a damaged record
# Most extra or missing calls in a row that are searched for. Our choice: the calls of one function, say a metric's.
MOST_SHIFT = 8
RING_RECORDS = 4096  # Records of a rank that are compared: as many as its ring holds. Only two ranks are compared.
MOST_AHEAD = 32  # how many numbers after a parting are searched, to distinguish a call too many from one too few
MOST_ALIKE = 4
MAX_HISTORY = 4096  # how many of a rank's last numbers are searched for a pattern if few ranks disagree
ALL_HISTORY = 1 << 16  # the same limit, over all ranks that disagree
ENOUGH = 3  # Collectives before the disagreement that make a history. Our choice: fewer show no pattern.
MOST_RECORDS = 4096  # records of a rank that are compared if the group is small: as many as its ring holds
ALL_RECORDS = 1 << 18  # records of all ranks of a group that are compared: then 1,024 ranks are judged within seconds
# Operations that need one shape on all ranks.
SAME_SHAPE = frozenset({
    "all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "gather_into_tensor",
})  # fmt: skip
# Operations for which some backends allow different shapes on different ranks. Shape counts only if one does not
# complete.
EVEN_SHAPE = SAME_SHAPE | {"all_gather", "gather", "scatter", "reduce_scatter", "all_gather_coalesced"}
# Also the operations that are made for different splits. Shape counts only if a rank was aborted inside.
ANY_SHAPE = EVEN_SHAPE | {"all_to_all", "all_to_all_single"}
COALESCED = "coalesced"  # torch's name for a batch of calls of any kind
ROOTED = frozenset({"broadcast", "reduce", "gather", "gather_into_tensor", "scatter"})
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_coalesced"})
NOWHERE = (True, -1)  # the place of a difference that is not among the tensors that fit in the record


class TimelineEntry(NamedTuple):
    """What one rank has under one number of a group: its recorded call, or the phase in which C++ makes the call."""

    rank: int
    kind: CallKind
    native: bool  # C++ made the collective, in the phase ``kind``
    place: int  # index of the call or phase
    # C++ made it outside every known phase, as compiled code does: only torch's own counter shows it.
    unrecorded: bool = False

    @property
    def site(self) -> Frame | None:
        return self.kind.site

    @property
    def key(self) -> Hashable:
        return key_of(self.kind)


class Event(NamedTuple):
    """A record of a group that has a number."""

    place: int
    kind: CallKind
    number: int
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives of one rank in one group, by number."""

    rank: int
    entries: Mapping[int, TimelineEntry]
    # Index of the first call or phase for each ``key_of``, whether or not it took a number.
    first_places: Mapping[Hashable, int]


def key_of(kind: CallKind) -> Hashable:
    """Return the operation and the line, which call patterns consist of; for a backward the line does not count."""
    site = kind.site
    return (kind.op, None if kind.op in NATIVE_PHASES or site is None else (site.file, site.line))


def line_key(kind: CallKind) -> Hashable:
    site = kind.site
    return (kind.op, None if site is None else (site.file, site.line))


def read_timeline(state: RankState, name: str, most: int) -> GroupCalls:
    """Return what a rank has under the numbers of a group, as far as its last ``most`` records show."""
    # A DDP phase records how many collectives the group had begun at its start. C++ took the numbers between that one
    # and the group's next record.
    rank = state.rank.rank
    entries: dict[int, TimelineEntry] = {}
    count = 0
    phase: Event | None = None
    cursor: int | None = None
    events = read_events(state, name, most)
    for at, event in enumerate(events):
        if event.kind.op == wt.TAKES_NO_NUMBER and event.ended_ns and not event.kind.failed:
            continue
        # A new_group that has returned was called by all ranks.
        makes_group = event.kind.op == "new_group" and not event.ended_ns
        collective = makes_group or event.kind.op not in NOT_COLLECTIVES
        before = event.number - 1 if collective else event.number
        if phase is not None and cursor is not None and before > cursor:
            count += _fill_gap(entries, rank, phase, cursor, before)
        if phase is not None and phase.ended_ns and phase.ended_ns <= event.started_ns:
            phase = None
        if collective:
            entries.setdefault(event.number, TimelineEntry(rank, event.kind, native=False, place=event.place))
        elif event.kind.op in NATIVE_PHASES:
            phase, count = event, 0
        if cursor is None or event.number > cursor:
            cursor = event.number
        # A hook or a custom function calls in backward: then the phase failed because of a call inside it.
        failed = (later.kind.failed for later in islice(events, at + 1, None) if later.started_ns < event.ended_ns)
        if event.kind.failed and not (event.kind.op in NATIVE_PHASES and any(failed)):
            break
    if phase is not None and cursor is not None:
        group = wt.own_state(state.rank, name)
        waits = state.doing is Activity.NATIVE and wt.native_group(state) == name
        begun: int | None = None
        if group is not None and group.backend and group.enqueued >= 0:  # the process has answered
            begun = wt.native_seq(state, name) if waits else group.enqueued
        # Such a phase takes as many numbers as the last time, at least one.
        same = [e.place for e in entries.values() if e.native and e.kind.op == phase.kind.op and e.place != phase.place]
        usual = max(1, same.count(same[-1])) if same else 1
        _fill_gap(entries, rank, phase, cursor, cursor + max(0, usual - count) * waits if begun is None else begun)
    for call in state.rank.open_calls:
        if call.device_state is not None and call.seq is not None and call.group == name:
            entry = TimelineEntry(rank, call.kind, native=False, place=call.index, unrecorded=call.native)
            entries.setdefault(call.seq, entry)
    kinds = {id(event.kind): event for event in reversed(events)}
    first_places: dict[Hashable, int] = {}
    for event in sorted(kinds.values(), key=attrgetter("place")):
        first_places.setdefault(key_of(event.kind), event.place)
    return GroupCalls(rank=rank, entries=entries, first_places=first_places)


def _fill_gap(entries: dict[int, TimelineEntry], rank: int, phase: Event, cursor: int, last: int) -> int:
    if last - cursor > MAX_GAP:
        return 0
    entry = TimelineEntry(rank, phase.kind, native=True, place=phase.place)
    for number in range(cursor + 1, last + 1):
        entries.setdefault(number, entry)
    return max(0, last - cursor)


def read_events(state: RankState, name: str, most: int) -> list[Event]:
    names = {name, ""} if name == wt.default_name(state.rank) else {name}
    group = wt.own_state(state.rank, name)
    log = state.rank.recent_calls[-most:]
    taken = [kind.group in names and kind.op != "work_wait" for kind in log.kinds]
    chosen = [taken[which] and number >= 0 for which, number in zip(log.which, log.numbers, strict=True)]
    kinds = [log.kinds[which] for which in compress(log.which, chosen)]
    columns = (compress(column, chosen) for column in (log.numbers, log.started_ns, log.ended_ns))
    found = list(map(Event, compress(log.indexes, chosen), kinds, *columns))
    for call in state.rank.open_calls:
        if call.device_state is not None or call.op == "work_wait" or call.group not in names:
            continue  # a call on a device was recorded before
        number = call.seq if call.seq is not None else call.begun
        if number is not None:
            number += call.op == "new_group"
        elif call.op not in NOT_COLLECTIVES and group is not None and group.backend and group.enqueued >= 0:
            number = group.enqueued + 1
        found += [Event(call.index, call.kind, number, call.started_ns, 0)] if number is not None else []
    return sorted(found, key=attrgetter("place"))


def find_departure(lines: Sequence[GroupCalls], blamed: Collection[int], seq: int) -> int | None:
    """Return the number at which one rank made more or fewer calls than another, if that was before ``seq``."""
    # A different line alone proves nothing. It counts only with a shift: from there on, one rank's lines are the
    # other's, the same count of numbers earlier or later.
    # A rank that is to blame and one that is not; if exactly two may be to blame, these two.
    odd = [line for line in lines if line.rank in blamed]
    rest = [line for line in lines if line.rank not in blamed]
    pair = [odd[0], rest[0]] if odd and rest else odd
    if len(pair) != 2:
        return None
    mine, other = ({seq: key_of(entry.kind) for seq, entry in line.entries.items()} for line in pair)
    if seq not in mine or seq not in other:
        return None
    low = seq
    while low - 1 in mine and low - 1 in other:
        low -= 1
    numbers = range(low, seq + 1)
    pairs = grouped((mine[number], other[number]) for number in numbers)
    usual = {key: Counter(met).most_common(1)[0] for key, met in pairs.items() if key not in met}
    partners = {key: partner for key, (partner, times) in usual.items() if times > 1}
    start = next((n for n in range(low, seq) if not _agree(mine[n], other[n], partners)), None)
    if start is None:
        return None
    for by in (by for most in range(1, MOST_SHIFT + 1) for by in (most, -most)):  # so many calls more, or fewer
        length, own, theirs = seq - start + 1 - abs(by), start + max(by, 0), start + max(-by, 0)
        if length > 0 and all(_agree(mine[own + i], other[theirs + i], partners) for i in range(length)):
            return start
    return None


def _agree(mine: Hashable, other: Hashable, partners: Mapping[Hashable, Hashable]) -> bool:
    return mine == other or partners.get(mine) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """How one rank and another continued after the last thing they both did."""

    before: CallKind | None  # the last thing that both did
    instead_of: CallKind  # what the other rank did next
    went_on: CallKind | None = None  # what the parted rank did next, or None if that was nothing that the group can see
    is_earlier: bool = False  # both ranks have gone on since, so the difference shows later
    is_extra: bool = False  # ``went_on`` is an extra call, after which the rank did what was due


@dataclass(frozen=True, slots=True)
class _Act:
    """A call or phase, and whether it took numbers (None: not known). A backward under ``no_sync`` takes none."""

    kind: CallKind
    took: bool | None

    @property
    def key(self) -> Hashable:
        return line_key(self.kind)

    def is_like(self, other: _Act) -> bool:
        return self.key == other.key and (None in {self.took, other.took} or self.took == other.took)


def find_parting(state: RankState, other: RankState, group: str, seq: int) -> Parting | None:
    """Return where ``state`` diverged from ``other``, at or before the collective ``seq`` of a group."""
    # Acts that only one of them ever makes do not count: with `if rank == 0: broadcast(x)`, the others have another
    # line.
    mine, others = _acts(state, group), _acts(other, group)
    keys = [{act.key for acts in found.values() for act in acts} for found in (mine, others)]
    shared = keys[0] & keys[1]
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
        later = (act for own in sorted(mine) if own > number for act in mine[own] if act.key in shared)
        if at == len(ours) and (following := next(later, None)) is not None and following.is_like(theirs[at]):
            return None  # it is due after a call that only this rank makes, and that did not stop the host
        if len(ours) < len(mine[number]) or (at == len(ours) and number == max(mine)):
            return Parting(before=before, instead_of=theirs[at].kind)
        ahead = range(number, number + MOST_AHEAD)
        return Parting(
            before=before,
            went_on=ours[at].kind if at < len(ours) else None,
            instead_of=theirs[at].kind,
            is_earlier=number < max(mine) or at + 1 < len(ours),
            is_extra=at < len(ours)
            and (bool(ours[at].took) or ours[at].kind.op not in NATIVE_PHASES)
            and _is_extra(*([act for own in ahead for act in acts.get(own, ())][at:] for acts in (mine, others))),
        )
    rest = [act.kind for number in sorted(others) if number > max(mine, default=0) for act in others[number]]
    return Parting(before=before, instead_of=rest[0]) if rest else None


def _is_extra(ours: Sequence[_Act], theirs: Sequence[_Act]) -> bool:
    # Whether it goes on like the others after a few extra acts of its own, and not the other way around.
    for more in range(1, MOST_SHIFT + 1):
        for acts, other, is_extra in ((ours, theirs[more:], False), (ours[more:], theirs, True)):
            pairs = list(zip(acts[:MOST_ALIKE], other, strict=False))
            if pairs and all(mine.is_like(its) for mine, its in pairs):
                return is_extra
    return False


def _acts(state: RankState, group: str) -> Mapping[int, Sequence[_Act]]:
    """Return what a rank did, by how many collectives its group had begun before."""
    # A forward without gradients that took no number is left out, because each rank may evaluate as often as it likes.
    found: dict[int, list[_Act]] = defaultdict(list)
    records = read_events(state, group, RING_RECORDS)
    events = [event for event in records if event.kind.op in NATIVE_PHASES or event.kind.op not in NOT_COLLECTIVES]
    begun = [event.number - (event.kind.op not in NOT_COLLECTIVES) for event in events]
    for at, event in enumerate(events):
        took = begun[at + 1] > begun[at] if at + 1 < len(events) else None
        if event.kind.op != "ddp_forward_no_grad" or took:
            found[begun[at]].append(_Act(event.kind, took if event.kind.op == "backward" else None))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The ranks to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    reason: str


def find_blame(
    parts: Sequence[TimelineEntry], lines: Sequence[GroupCalls], seq: int, sign: Callable[[TimelineEntry], Hashable]
) -> Blame:  # fmt: skip
    """Blame the minority; without a majority, blame the rank whose call least fits its own history."""
    most = set(majority_of(grouped((sign(part), part.rank) for part in parts).values()))
    if most:
        few = tuple(part.rank for part in parts if part.rank not in most)
        return Blame(ranks=few, confidence=Confidence.HIGH, reason=f"{len(most)} of {len(parts)} ranks agree")
    by_rank = {line.rank: line for line in lines}
    searched = min(MAX_HISTORY, max(ALL_HISTORY // len(parts), 64))
    one_line = len({part.site for part in parts}) == 1
    # How likely the call is by the rank's own history, whether the rank made it before, and whether with the same
    # dtype, shape, root and reduction. That says nothing of lines that no rank has come to before, such as those of
    # `if rank == 0:` and its `else:`, or if the history is too short.
    scores: dict[int, tuple[float, bool, bool]] = {}
    for part in parts:
        line = by_rank[part.rank]
        before = [line.entries[number] for number in sorted(line.entries) if number < seq][-searched:]
        share = expected_next([key_of(entry.kind) for entry in before]).get(part.key, 0.0)
        known = line.first_places.get(part.key, part.place) < part.place
        same = (known or one_line) and any(_like(entry.kind) == _like(part.kind) for entry in before)
        if len(before) >= ENOUGH:
            scores[part.rank] = share, known, same
    if len(scores) == len(parts) and len(set(scores.values())) > 1:
        lowest = min(scores.values())
        ranks = tuple(rank for rank, score in scores.items() if score == lowest)
        return Blame(ranks=ranks, confidence=Confidence.MEDIUM, reason="its call breaks the order of its earlier calls")
    reason = "no majority, and the earlier calls do not show which side is wrong"
    return Blame(ranks=tuple(part.rank for part in parts), confidence=Confidence.LOW, reason=reason)


def _like(kind: CallKind) -> Hashable:
    return (kind.op, kind.dtype, kind.shape, kind.peer, kind.redop)


def expected_next(history: Sequence[Hashable]) -> dict[Hashable, float]:
    """Return what followed the longest earlier repetitions of the history's end, and how often (by the Z-function)."""
    backwards = list(reversed(history))
    size = len(backwards)
    lengths = [0] * size  # how many items from each place on are the same as from the beginning
    left = right = 0
    for i in range(1, size):
        if i < right:
            lengths[i] = min(right - i, lengths[i - left])
        while i + lengths[i] < size and backwards[lengths[i]] == backwards[i + lengths[i]]:
            lengths[i] += 1
        if i + lengths[i] > right:
            left, right = i, i + lengths[i]
    longest = max(lengths, default=0)
    followers = Counter(backwards[i - 1] for i in range(1, size) if lengths[i] == longest > 0)
    return {key: count / followers.total() for key, count in followers.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Different calls in one group under one number, and the ranks to blame for it."""

    group: wt.Group
    seq: int
    parts: tuple[TimelineEntry, ...]
    blame: Blame
    passed: bool  # the calls matched and went through, but they shifted later calls, which then disagreed
    left: tuple[int, ...] = ()  # ranks that never made such a call and whose scripts have ended

    @property
    def departing(self) -> list[TimelineEntry]:
        return [part for part in self.parts if part.rank in self.blame.ranks]

    @property
    def agreeing(self) -> list[TimelineEntry]:
        return [part for part in self.parts if part.rank not in self.blame.ranks]


def _signature(entry: TimelineEntry, shaped: AbstractSet[str]) -> Hashable:
    kind = entry.kind
    if entry.native:
        return "forward" if kind.op in FORWARDS else kind.op
    shape = kind.shape if kind.op in shaped else None
    root = (kind.peer or 0) if kind.op in ROOTED else None
    redop = (kind.redop or "SUM") if kind.op in REDUCING else None
    return (kind.op, kind.dtype, shape, root, redop)


def find_conflict(states: wt.States, positions: wt.Positions, shaped: AbstractSet[str] = SAME_SHAPE) -> Conflict | None:
    for group in dict.fromkeys(position.group for position in positions.values()):
        members = [states[m] for m in group.members if m in states]
        most = min(MOST_RECORDS, max(ALL_RECORDS // max(1, len(members)), 64))
        # Ranks in a DDP phase without a known number get an entry under the numbers that the others wait for.
        places = [position for position in positions.values() if position.group == group]
        pending = {position.seq for position in places if position.seq is not None}
        lines = []
        for state in members:
            line, mine = read_timeline(state, group.name, most=most), positions.get(state.rank.rank)
            unnumbered = state.doing is Activity.NATIVE and state.call is not None and state.call.begun is None
            if unnumbered and state.call is not None and mine is not None and mine.group == group:
                entry = TimelineEntry(line.rank, state.call.kind, native=True, place=state.call.index)
                above = wt.recorded_seq(state.rank, group.name)
                missing = {seq: entry for seq in pending if above < seq <= (mine.seq or seq)}
                line = replace(line, entries={**missing, **line.entries})
            lines.append(line)
        seq = _first_difference(lines, shaped)
        if seq is None:
            continue
        parts = _parts_at(lines, seq)
        loose = any(part.unrecorded for part in parts)  # torch alone reports a call: only the operation is known
        blame = find_blame(parts, lines, seq, attrgetter("kind.op") if loose else partial(_signature, shaped=shaped))
        earlier = find_departure(lines, blame.ranks, seq)
        if earlier is None:
            return Conflict(group=group, seq=seq, parts=parts, blame=blame, passed=False)
        parts = _parts_at(lines, earlier)
        blame = find_blame(parts, lines, earlier, attrgetter("key"))
        return Conflict(group=group, seq=earlier, parts=parts, blame=blame, passed=True)
    return None


def find_misread(states: wt.States, table: wt.Groups, world: int) -> Conflict | None:
    """Return the first call of a finished job in which ranks had tensors of one shape and different dtypes."""
    # Gloo lets a shorter message through, and the receiver reads its bytes as its own dtype.
    dtypes: dict[Hashable, dict[int, set[str | None]]] = {}
    for number, state in states.items():
        for kind in state.rank.recent_calls.counts:
            if kind.op in EVEN_SHAPE and kind.site is not None and kind.dtype is not None and not kind.failed:
                key = (kind.op, kind.site, kind.shape, kind.group)
                dtypes.setdefault(key, {}).setdefault(number, set()).add(kind.dtype)
    named = {key[3] for key, found in dtypes.items() if len(set(map(frozenset, found.values()))) > 1}  # type: ignore[index]
    groups = {wt.find_group(table, states[n].rank, name, world) for name in sorted(named) for n in states}
    for group in sorted(groups, key=attrgetter("name", "members")):
        if set(group.members) <= set(states):
            lines = [read_timeline(states[n], group.name, most=MOST_RECORDS) for n in group.members]
            for seq in sorted(set.intersection(*(set(line.entries) for line in lines))):
                parts = _parts_at(lines, seq)
                alike = {(part.kind.op, part.site, part.kind.shape) for part in parts if not part.native}
                recorded = not any(part.native for part in parts)
                if recorded and len(alike) == 1 and len({part.kind.dtype for part in parts}) > 1:
                    blame = find_blame(parts, lines, seq, lambda part: part.kind.dtype)
                    return Conflict(group=group, seq=seq, parts=parts, blame=blame, passed=True)
    return None


def _first_difference(lines: list[GroupCalls], shaped: AbstractSet[str]) -> int | None:
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
    # Of calls that only torch reports, the operation is compared: torch names shapes and dtypes in its own way. It is
    # not known which calls a phase of DDP makes.
    for seq in sorted({seq for line in lines for seq, entry in line.entries.items() if entry.unrecorded}):
        entries = (line.entries.get(seq) for line in lines)
        ops = {entry.kind.op for entry in entries if entry is not None and not entry.native} - {COALESCED}
        if len(ops) > 1:
            return seq if differing is None else min(seq, differing)
    return differing


def _parts_at(lines: list[GroupCalls], seq: int) -> tuple[TimelineEntry, ...]:
    found = (line.entries.get(seq) for line in sorted(lines, key=attrgetter("rank")))
    return tuple(entry for entry in found if entry is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDifference:
    """Models that differ in the same construction of DDP."""

    group: wt.Group
    number: int  # which model of the group this is, counted from 1
    models: Mapping[int, ModelSeen]  # by rank of the group that has come to this construction
    blamed: tuple[int, ...]  # the minority, or all ranks if there is no majority
    # The first parameter or buffer that differs, or None if it is not among those that fit in the record.
    tensor: str | None
    rows: Mapping[int, TensorSeen | None]  # by rank: what its model has at the position of the first difference


def find_difference(ranks: Sequence[Rank], table: wt.Groups, world: int) -> ModelDifference | None:
    """Return the first model of a group that differs between its ranks. The cost grows with the size of all models."""
    found: dict[tuple[wt.Group, int], dict[int, ModelSeen]] = defaultdict(dict)
    for rank in ranks:
        counts: dict[str, int] = defaultdict(int)
        for model in rank.models:
            counts[model.group] += 1
            found[wt.find_group(table, rank, model.group, world), counts[model.group]][rank.rank] = model
    for (group, number), models in sorted(found.items(), key=lambda item: item[0][1]):
        if len({model.digest for model in models.values()}) > 1:
            sides = [ranks for _, ranks in group_alike({rank: model.digest for rank, model in models.items()})]
            mine, usual = _tensors_by_place(models[sides[1][0]]), _tensors_by_place(models[sides[0][0]])
            place = min((at for at in mine.keys() | usual.keys() if mine.get(at) != usual.get(at)), default=NOWHERE)
            # If only one side has the parameter, that side's name.
            own, others_own = mine.get(place), usual.get(place)
            is_new = own is not None and own.name not in {tensor.name for tensor in usual.values()}
            named = own if is_new else others_own or own
            return ModelDifference(
                group=group,
                number=number,
                models=models,
                blamed=outvoted(sides),
                tensor=named.name if named is not None else None,
                rows={n: _tensors_by_place(model).get(place) for n, model in models.items()},
            )
    return None


def _tensors_by_place(model: ModelSeen) -> dict[_Place, TensorSeen]:
    """Return a model's tensors by place: parameters come before buffers, each in their order."""
    kinds = {kind: [tensor for tensor in model.tensors if tensor.is_buffer is kind] for kind in (False, True)}
    return {(kind, number): tensor for kind, rows in kinds.items() for number, tensor in enumerate(rows)}
