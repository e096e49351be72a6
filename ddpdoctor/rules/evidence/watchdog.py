"""Compares the collectives in which ranks ran into a time limit: who came late, who made another call, who is inside.

Numbers count within one process group. Torch before 2.3 does not say the group, and two disjoint groups may have one
name, so only ranks that are in one group for sure are compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.evidence import (
    MOST_RANKS,
    Absent,
    Differ,
    Exited,
    Fact,
    Failed,
    Inside,
    Operation,
    Reached,
    Shown,
    Size,
    Waiting,
    Who,
)  # fmt: skip
from ddpdoctor.model.sides import group_alike
from ddpdoctor.rules.evidence.group_members import members_of, split_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SINGLE = frozenset({"send", "recv", "coalesced"})
"""Their numbers are not those of the group's collectives."""
_FROM_ROOT = frozenset({"broadcast", "scatter"})
"""The root may complete it before the others have come."""
_SAME_IN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
    "reduce_scatter",
})  # fmt: skip
"""Operations whose input must have equally many elements on all ranks."""
_SAME_OUT = frozenset({"all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"})
_NEAR = 16
"""Our choice: numbers without a group that lie further apart are those of different groups."""


@dataclass(slots=True)
class _Group:
    """What is known of the ranks of one group."""

    key: str
    words: str
    waits: dict[int, Waiting] = field(default_factory=dict)
    reached: dict[int, Reached] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    """Group ranks by global ranks."""

    def part(self, ranks: Sequence[int]) -> _Group:
        """Return what is known of some of the ranks."""
        return _Group(
            self.key, self.words,
            waits={rank: self.waits[rank] for rank in ranks if rank in self.waits},
            reached={rank: self.reached[rank] for rank in ranks if rank in self.reached},
            places={rank: self.places[rank] for rank in ranks if rank in self.places},
        )  # fmt: skip

    @property
    def is_default(self) -> bool:
        """Whether it is the default group, or, with old torch, taken for it."""
        return not self.key


def compare_waits(facts: Sequence[Fact], world: int | None = None) -> list[Fact]:
    """Return who is absent from a collective that others ran into a time limit in, who differs, and who is inside.

    Args:
        facts: What was read of one run. Global ranks are filled in.
        world: The number of ranks, if it is known from elsewhere.
    """
    sizes = [fact.ranks for fact in facts if isinstance(fact, Size) and not fact.group]
    world = max([world or 0, *sizes]) or None
    seen = frozenset(fact.who.rank for fact in facts if fact.who.rank is not None and not isinstance(fact, Absent))
    listed = {fact.group: fact.members for fact in facts if isinstance(fact, Size) and fact.group and fact.members}
    found: list[Fact] = []
    for group in _groups(facts):
        for ranks in split_group(group.places, set(group.waits) | set(group.reached)):
            part = group.part(ranks)
            if part.waits:
                size = _size(part.waits.values())
                least = max(seen | part.waits.keys()) + 1
                members = members_of(part.places, listed.get(group.key), size if group.key else world or size or least)
                if part.is_default and not members:
                    members = tuple(range(least))
                is_whole = size is not None or (group.key in listed) or (part.is_default and world is not None)
                found += _compare(part, members, seen, is_whole=is_whole)
    return [*found, *_compare_numberless(facts, seen, world)]


def _groups(facts: Iterable[Fact]) -> list[_Group]:
    """Sort waits and numbers by groups."""
    groups: dict[tuple[str, str], _Group] = {}
    waits = [fact for fact in facts if isinstance(fact, Waiting) and _has_number(fact)]
    known = [fact for fact in waits if fact.operation.group_words]
    for fact in waits:
        key, words = _group_of(fact, known)
        group = groups.setdefault((key, words), _Group(key, words))
        rank = fact.who.rank
        assert rank is not None
        former = group.waits.get(rank)
        if former is None or (fact.operation.seq or 0) < (former.operation.seq or 0):
            group.waits[rank] = fact
        _place(group, fact.who)
    for reached in (fact for fact in facts if isinstance(fact, Reached)):
        named = groups.get((reached.group, reached.group_words))
        if named is not None and reached.who.rank is not None:
            _keep_reached(named, reached)
            _place(named, reached.who)
    return [group for group in groups.values() if group.words or _is_comparable(group)]


def _has_number(fact: Waiting) -> bool:
    """Return whether a wait is one of a collective that has a number in its group."""
    operation = fact.operation
    usable = fact.timed_out and not fact.in_init and not fact.in_store and fact.who.rank is not None
    return usable and operation.seq is not None and operation.op not in _SINGLE


def _group_of(fact: Waiting, known: Sequence[Waiting]) -> tuple[str, str]:
    """Return a wait's group. If its line was lost, it is the group in which others wait in the same call."""
    own = fact.operation
    if own.group_words or own.group:
        return own.group, own.group_words
    same = {
        (other.operation.group, other.operation.group_words) for other in known if _call(other) == _call(fact)
    }  # fmt: skip
    every = same or {(other.operation.group, other.operation.group_words) for other in known}
    return next(iter(every)) if len(every) == 1 else ("", "")


def _place(group: _Group, who: Who) -> None:
    if who.rank is not None and who.group_rank is not None and who.group == group.key and group.words:
        group.places[who.rank] = who.group_rank


def _keep_reached(group: _Group, fact: Reached) -> None:
    rank = fact.who.rank
    assert rank is not None
    former = group.reached.get(rank)
    if former is None or (fact.enqueued or -1) >= (former.enqueued or -1):
        group.reached[rank] = fact


def _is_comparable(group: _Group) -> bool:
    """Return whether numbers without a group are likely to be those of one group."""
    numbers = [wait.operation.seq or 0 for wait in group.waits.values()]
    return max(numbers) - min(numbers) <= _NEAR


def _size(waits: Iterable[Waiting]) -> int | None:
    """Return the size of a group as the elements in and out of an operation show it."""
    for wait in waits:
        operation, few, many = wait.operation, wait.operation.numel_in, wait.operation.numel_out
        if operation.op == "reduce_scatter_tensor":
            few, many = many, few
        elif operation.op != "all_gather_into_tensor":
            continue
        if few and many and many % few == 0 and many // few <= MOST_RANKS:
            return many // few
    return None


def _compare(group: _Group, members: Sequence[int], seen: frozenset[int], *, is_whole: bool) -> list[Fact]:
    calls = Counter(wait.operation.seq for wait in group.waits.values())
    most = max(calls.values())
    target = next(wait for wait in group.waits.values() if calls[wait.operation.seq] == most)
    ahead = _ahead(group, target)
    if ahead is not None:
        return [ahead]
    absent = _absent(group, target, members, seen)
    differ = _differ(group) if not any(fact.certain for fact in absent) else None
    if differ is not None:
        return [differ]
    if absent:
        return [*absent]
    inside = {*group.waits, *(rank for rank, reached in group.reached.items() if _is_inside(reached, target))}
    if len(inside) < 2 or len({_call(wait) for wait in group.waits.values()}) > 1:
        return []
    complete = is_whole and inside >= set(members)
    operation = target.operation
    return [Inside(operation=operation, ranks=tuple(sorted(inside)), complete=complete, **_where(target))]


def _absent(group: _Group, target: Waiting, members: Sequence[int], seen: frozenset[int]) -> list[Absent]:
    """Return the ranks that did not come: those whose own numbers show it; else those that said nothing of a limit."""
    number = target.operation.seq or 0
    others = [rank for rank in members if rank not in group.waits]
    behind = [
        rank for rank, reached in group.reached.items() if rank not in group.waits and _is_behind(reached, number)
    ]
    if behind:
        return [_absence(group, rank, target, group.reached[rank], certain=True) for rank in sorted(behind)]
    silent = [rank for rank in others if rank not in group.reached and rank in seen]
    unseen = [rank for rank in others if rank not in group.reached and rank not in seen]
    sources = {wait.spot.source for wait in group.waits.values()}
    expected = not silent and len(sources) == 1 and len(unseen) < len(group.waits)
    return [
        _absence(group, rank, target, target, certain=False, expected=expected)
        for rank in (unseen if expected else silent)
    ]


def _ahead(group: _Group, target: Waiting) -> Differ | None:
    """Return that ranks have completed a later call than the one that the others wait in: they made other calls."""
    number = target.operation.seq or 0
    ahead = tuple(
        sorted(
            rank
            for rank, reached in group.reached.items()
            if rank not in group.waits and reached.completed is not None and reached.completed > number
        )
    )
    if not ahead or target.operation.op in _FROM_ROOT or len(ahead) >= len(group.waits):
        return None
    reached = group.reached[ahead[0]]
    later = Operation(group=group.key, group_words=group.words, seq=reached.completed)
    sides = ((tuple(sorted(group.waits)), target.operation), (ahead, later))
    return Differ(sides=sides, odd=ahead, aspect="number", **_where(reached))


def _is_behind(reached: Reached, number: int) -> bool:
    return reached.enqueued is not None and reached.enqueued < number


def _is_inside(reached: Reached, target: Waiting) -> bool:
    number = target.operation.seq or 0
    completed = reached.completed if reached.completed is not None else 0
    return reached.enqueued is not None and reached.enqueued >= number > completed


def _absence(
    group: _Group, rank: int, target: Waiting, shown_by: Fact, *, certain: bool, expected: bool = False
) -> Absent:
    waiters = tuple(sorted(group.waits))
    operation = target.operation
    return Absent(
        who=Who(rank=rank), operation=operation, waiters=waiters, certain=certain, expected=expected,
        shown=Shown.NUMBERS,
        **_where(shown_by),
    )  # fmt: skip


def _differ(group: _Group) -> Differ | None:
    """Return in what the calls differ that ranks of one group wait in."""
    ordered = [ranks for _, ranks in group_alike({rank: _call(wait) for rank, wait in group.waits.items()})]
    operations = [group.waits[ranks[0]].operation for ranks in ordered]
    aspect = _aspect(operations)
    if not aspect or (aspect == "number" and _is_root_ahead(group, operations)):
        return None
    odd = tuple(sorted(rank for ranks in ordered[1:] for rank in ranks))
    is_plain = len(ordered[0]) > len(ordered[1])
    first = group.waits[odd[0]]
    return Differ(
        sides=tuple(zip(ordered, operations, strict=True)),
        odd=odd if is_plain else None, aspect=aspect, **_where(first),
    )  # fmt: skip


def _aspect(operations: Sequence[Operation]) -> str:
    """Return what differs, or an empty string if nothing does that must be equal."""
    if len({operation.seq for operation in operations}) > 1:
        return "number"
    if len({operation.op for operation in operations}) > 1:
        return "operation"
    op = operations[0].op
    if op in _SAME_IN and len({one.numel_in for one in operations if one.numel_in is not None}) > 1:
        return "shape"
    if op in _SAME_OUT and len({one.numel_out for one in operations if one.numel_out is not None}) > 1:
        return "shape"
    return ""


def _is_root_ahead(group: _Group, operations: Sequence[Operation]) -> bool:
    """Return whether one rank has passed an operation that it may have been the root of."""
    first = min(operations, key=lambda operation: operation.seq or 0)
    ahead = [rank for rank, wait in group.waits.items() if wait.operation.seq != first.seq]
    return first.op in _FROM_ROOT and len(ahead) == 1 and group.places.get(ahead[0], ahead[0]) == 0


def _call(wait: Waiting) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    operation = wait.operation
    numel_in = operation.numel_in if operation.op in _SAME_IN else None
    numel_out = operation.numel_out if operation.op in _SAME_OUT else None
    return operation.seq, operation.op, numel_in, numel_out


def _where(fact: Fact) -> Mapping[str, Any]:
    return {"spot": fact.spot, "time": fact.time, "said": fact.said}


def _compare_numberless(facts: Sequence[Fact], seen: frozenset[int], world: int | None) -> list[Fact]:
    """Compare waits that say no number: those of nccl2 and Gloo, and those in ``init_process_group``.

    A rank that was seen and said nothing of a limit or a lost peer is the one that the others waited for, or it had
    completed all its calls. If all but one wait in init, the last has not come, for else they would not wait.
    """
    waits = [fact for fact in facts if isinstance(fact, Waiting) and fact.who.rank is not None and fact.timed_out]
    absent = _silent([fact for fact in waits if not fact.in_init and not fact.in_store], facts)
    if world is None or absent:
        return [*absent]
    inits = {fact.who.rank for fact in waits if fact.in_init}
    late = [rank for rank in range(world) if rank not in inits]
    if len(inits) > 1 and len(late) == 1 and not (late[0] in seen and _has_other_facts(facts, late[0])):
        target = next(fact for fact in waits if fact.in_init)
        waiters = tuple(sorted(rank for rank in inits if rank is not None))
        return [Absent(who=Who(rank=late[0]), waiters=waiters, in_init=True, **_where(target))]
    return []


def _silent(waits: Sequence[Waiting], facts: Iterable[Fact]) -> list[Absent]:
    """Return the few ranks that were seen and complain of nothing, where the others waited without a number."""
    ends = {fact.who.rank for fact in facts if isinstance(fact, Failed | Exited | Waiting)}
    waiters = {fact.who.rank for fact in waits if fact.operation.seq is None}
    silent = {fact.who.rank for fact in facts if not isinstance(fact, Absent)} - ends - {None}
    if len(silent) >= len(waiters) or any(fact.operation.seq is not None for fact in waits):
        return []
    target = waits[0]
    return [
        Absent(
            who=Who(rank=rank), operation=target.operation, certain=False, shown=Shown.NUMBERS,
            waiters=tuple(sorted(rank for rank in waiters if rank is not None)), **_where(target),
        )
        for rank in sorted(rank for rank in silent if rank is not None)
    ]  # fmt: skip


def _has_other_facts(facts: Iterable[Fact], rank: int) -> bool:
    return any(fact.who.rank == rank and not isinstance(fact, Size) for fact in facts)
