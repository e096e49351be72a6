"""Compares the calls of ranks and where they wait, by their time limits, logged calls and stacks.

Numbers count within one process group. Torch before 2.3 does not log the group, and disjoint groups may share a
name, so only ranks that are certainly in one group are compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.words import group_alike, grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ddpdoctor.model.stacks import Frame


_SINGLE = frozenset({"send", "recv", "coalesced"})  # their numbers are not those of the group's collectives
_FROM_ROOT = frozenset({"broadcast", "scatter"})  # the root may complete it before the others have come
# Operations whose input must have equally many elements on all ranks.
_SAME_IN = frozenset({
    "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor",
    "reduce_scatter",
})  # fmt: skip
_SAME_OUT = frozenset({"all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"})
# Our choice: nobody completes a call that another has not begun, save as the root of a broadcast. So numbers that lie
# further apart are those of different groups, or of different runs in one log.
_NEAR = 16
_Call = tuple[str, int | None, str]
_Limits = Sequence[tuple[int, lf.Waiting]]  # ranks, and the time limits that they ran into
Kind = TypeVar("Kind", bound=lf.Fact)
# What a rank does that, as far as a stack can tell, waits for other ranks.
WAITS = frozenset({lf.Doing.COLLECTIVE, lf.Doing.DEVICE})
_SIGNS = (lf.Seen, lf.Moving, lf.BusyRank, lf.Called, lf.Finished)  # a rank that says one of these is there
NO_ANSWER = "no-answer"  # the kind of note about a rank that did not answer torch's debug server


def split_group(places: Mapping[int, int], ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each group among groups of one name. ``places``: group ranks by global ranks.

    Two ranks with one group rank are in different groups. They are told apart only if a plain layout fits: the ranks of
    a group are consecutive, or a constant stride apart.
    """
    every = tuple(sorted(ranks))
    if len(set(places.values())) == len(places):
        return [every]
    fitting = []
    for stride in range(1, max(places) + 1):  # how far apart neighbors in a group are
        clusters = grouped((rank - place * stride, rank) for rank, place in sorted(places.items()))
        if min(clusters) >= 0:
            fitting.append(tuple(tuple(those) for _, those in sorted(clusters.items())))
    if not fitting:
        return []
    fewest = min(len(clusters) for clusters in fitting)
    best = {clusters for clusters in fitting if len(clusters) == fewest}
    return list(best.pop()) if len(best) == 1 else []


def members_of(places: Mapping[int, int], listed: Sequence[int] | None, size: int | None) -> tuple[int, ...]:
    """Return the global ranks of a group, in the order of their group ranks, or as many as can be told.

    ``places``: group ranks by global ranks; ``listed``: the members, if a source lists them; ``size``: how many.
    """
    if listed is not None:
        return tuple(listed)
    size = min(size, lf.MOST_RANKS) if size is not None else None
    pairs = sorted((place, rank) for rank, place in places.items())
    steps = {(rank - former) / (place - other) for (other, former), (place, rank) in pairwise(pairs) if place != other}
    step = steps.pop() if len(steps) == 1 else 0.0
    stride = int(step) if step >= 1 and step == int(step) else None
    if stride is None:
        return ()
    rank, place = next(iter(places.items()))
    count = size if size is not None else min(max(places.values()) + 1, lf.MOST_RANKS)
    return tuple(found for number in range(count) if (found := rank + (number - place) * stride) >= 0)


@dataclass(slots=True)
class _Group:
    key: str
    words: str
    waits: dict[int, lf.Waiting] = field(default_factory=dict)
    reached: dict[int, lf.Reached] = field(default_factory=dict)
    # All that the ranks said of how far they had come, in the order of the lines; ``reached`` has the furthest.
    said: dict[int, list[lf.Reached]] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)  # group ranks by global ranks

    def part(self, ranks: Sequence[int]) -> _Group:
        tables: tuple[dict[int, Any], ...] = (self.waits, self.reached, self.said, self.places)
        return _Group(self.key, self.words, *({n: table[n] for n in ranks if n in table} for table in tables))


def ranked(facts: Iterable[lf.Fact], kind: type[Kind]) -> list[tuple[int, Kind]]:
    """Return the facts of a kind whose rank is known, with the rank."""
    return [(fact.who.rank, fact) for fact in facts if isinstance(fact, kind) and fact.who.rank is not None]


def compare_waits(facts: Sequence[lf.Fact], world: int | None = None) -> list[lf.Fact]:
    """Return who is absent where others ran into a time limit, who differs, and who is inside."""
    sizes = [fact.ranks for fact in facts if isinstance(fact, lf.Size) and not fact.group]
    world = max([world or 0, *sizes]) or None
    listed = {fact.group: fact.members for fact in facts if isinstance(fact, lf.Size) and fact.group and fact.members}
    listed_sizes = {fact.group: fact.ranks for fact in facts if isinstance(fact, lf.Size) and fact.group}
    silent = _silent_ranks(facts, world)
    limits = [(rank, wait) for rank, wait in ranked(facts, lf.Waiting) if wait.timed_out]
    found: list[lf.Fact] = []
    for group in _groups(facts, limits):
        for ranks in split_group(group.places, set(group.waits) | set(group.reached)):
            part = group.part(ranks)
            if not part.waits or not _is_comparable(part.waits):
                continue
            size = _size(part.waits.values()) or listed_sizes.get(group.key)
            if not part.key:  # the default group, or, with old torch, taken for it
                whole = size if part.words and world is None else world
                members = tuple(range(min(whole or max({*ranks, *silent}) + 1, lf.MOST_RANKS)))
            else:
                whole = size
                members = members_of(part.places, listed.get(group.key), size)
            found += _compare_limits(part, members, silent, whole)
    found += _compare_numberless(facts, limits, silent, world)
    return _name_work(found, facts, limits)


def _name_work(found: list[lf.Fact], facts: Sequence[lf.Fact], limits: _Limits) -> list[lf.Fact]:
    """Return the facts, with what absent ranks did instead.

    If nothing else shows which rank was late, it is the only one at work while others timed out. Progress bars without
    a rank belong to rank 0: frameworks show them on the main process only.
    """
    excused = {fact.who.rank for fact in facts if _excuses(fact)}
    excused |= {rank for fact in found if isinstance(fact, lf.Inside) for rank in fact.ranks}
    work: dict[int, lf.BusyRank] = {}
    for fact in facts:
        if isinstance(fact, lf.BusyRank):
            rank = fact.who.rank if fact.who != lf.Who() else 0
            if rank is not None and rank not in excused and (rank not in work or fact.who.rank is not None):
                work[rank] = fact
    named = [fact for fact in found if isinstance(fact, lf.Absent | lf.Differ)]
    if not named and len(work) == 1 and limits:
        (rank, busy), target = next(iter(work.items())), limits[0][1]
        certain = busy.who.rank is not None
        named = [_absence(rank, target, dict(limits), busy, certain=certain, in_init=target.in_init, expected=True)]
        found = [*(fact for fact in found if not isinstance(fact, lf.Inside)), *named]
    for at, fact in enumerate(found):
        if isinstance(fact, lf.Absent) and fact.who.rank in work:
            busy = work[fact.who.rank]
            found[at] = replace(fact, busy=busy, certain=fact.certain or busy.who.rank is not None)
    return found


def _groups(facts: Iterable[lf.Fact], limits: _Limits) -> list[_Group]:
    groups: dict[tuple[str, str], _Group] = {}
    waits = [(rank, fact) for rank, fact in limits if not fact.in_init and not fact.in_store]
    waits = [(n, fact) for n, fact in waits if fact.operation.seq is not None and fact.operation.op not in _SINGLE]
    known = [(_call_key(fact), _group_of(fact)) for _, fact in waits if fact.operation.group_words]
    for rank, fact in waits:
        key, words = _group_of(fact)
        if not words and not key:  # its line was lost: it is the group in which others wait in the same call
            every = {group for call, group in known if call == _call_key(fact)} or {group for _, group in known}
            key, words = next(iter(every)) if len(every) == 1 else ("", "")
        group = groups.setdefault((key, words), _Group(key, words))
        former = group.waits.get(rank)
        if former is None or (fact.operation.seq or 0) < (former.operation.seq or 0):
            group.waits[rank] = fact
        _note_place(group, fact.who)
    for rank, reached in ranked(facts, lf.Reached):
        named = groups.get((reached.group, reached.group_words))
        if named is not None:
            named.said.setdefault(rank, []).append(reached)
            furthest = named.reached.get(rank)
            if furthest is None or (reached.enqueued or -1) >= (furthest.enqueued or -1):
                named.reached[rank] = reached
            _note_place(named, reached.who)
    return [group for group in groups.values() if group.words or _is_comparable(group.waits)]


def _group_of(wait: lf.Waiting) -> tuple[str, str]:
    return wait.operation.group, wait.operation.group_words


def _note_place(group: _Group, who: lf.Who) -> None:
    if who.rank is not None and who.group_rank is not None and who.group == group.key and group.words:
        group.places[who.rank] = who.group_rank


def _is_comparable(waits: Mapping[int, lf.Waiting]) -> bool:
    """Return whether the numbers are likely to be those of one group in one run."""
    numbers = [wait.operation.seq or 0 for wait in waits.values()]
    return max(numbers) - min(numbers) <= _NEAR


def _size(waits: Iterable[lf.Waiting]) -> int | None:
    """Return the size of a group as the elements in and out of an operation show it."""
    for wait in waits:
        operation, few, many = wait.operation, wait.operation.numel_in, wait.operation.numel_out
        if operation.op == "reduce_scatter_tensor":
            few, many = many, few
        elif operation.op != "all_gather_into_tensor":
            continue
        if few and many and many % few == 0 and many // few <= lf.MOST_RANKS:
            return many // few
    return None


def _compare_limits(group: _Group, members: Sequence[int], silent: frozenset[int], whole: int | None) -> list[lf.Fact]:
    """Compare the ranks of one group.

    ``members``: the known ones; ``silent``: ranks whose silence is evidence; ``whole``: how many the group has.
    """
    late = _late(group)
    if late:
        return [*late]
    calls = Counter(wait.operation.seq for wait in group.waits.values())
    most = max(calls.values())
    those = [wait for wait in group.waits.values() if calls[wait.operation.seq] == most]
    target = next((wait for wait in those if wait.operation.op), those[0])
    ahead = _ahead(group, target, whole)
    if ahead is not None:
        return [ahead]
    # The ranks that did not come: those whose own numbers show it; else those that said nothing of a limit
    number = target.operation.seq or 0
    others = {rank: reached for rank, reached in group.reached.items() if rank not in group.waits}
    behind = [rank for rank, reached in others.items() if _is_behind(reached, number)]
    if behind:
        return [_absence(rank, target, group.waits, group.reached[rank], certain=True) for rank in sorted(behind)]
    differ = _limits_differ(group, whole)
    if differ is not None:
        return [differ]
    unsaid = [rank for rank in members if rank in silent and rank not in group.waits and rank not in group.reached]
    if unsaid:
        return [_absence(rank, target, group.waits, target, certain=False) for rank in unsaid]
    inside = set(group.waits)
    for rank, reached in group.reached.items():
        if reached.enqueued is not None and reached.enqueued >= number > (reached.completed or 0):
            inside.add(rank)
    if len(inside) < 2 or len({_call_key(wait) for wait in group.waits.values() if wait.operation.op}) > 1:
        return []
    complete = whole is not None and len(inside) >= whole
    return [lf.Inside(operation=target.operation, ranks=tuple(sorted(inside)), complete=complete, **_where(target))]


def _late(group: _Group) -> list[lf.Absent]:
    """Return the ranks that reached the first call in which others wait only after those had timed out.

    They complete that call, because the others' ranks are still in it, and time out later: in the
    same call if the others have left, else in a later one. So their numbers are not those of one moment.
    """
    number = min(wait.operation.seq or 0 for wait in group.waits.values())
    first = {rank: wait for rank, wait in group.waits.items() if wait.operation.seq == number}
    target = min(first.values(), key=lambda wait: (wait.time is None, wait.time.seconds if wait.time else 0.0))
    found: dict[int, tuple[lf.Fact, bool]] = {}
    for rank, wait in group.waits.items():
        if wait is target or (rank in first and wait.operation.op and _call_key(wait) != _call_key(target)):
            continue
        behind = (fact for fact in group.said.get(rank, ()) if _is_behind(fact, number))
        told = next((fact for fact in behind if fact.told_by in first or _is_after(fact.time, target.time)), None)
        if told is not None:
            found[rank] = told, True
        elif wait.ran_s is not None and _is_after(wait.time, target.time, wait.ran_s):
            found[rank] = wait, rank in first
    waiters = set(first) - set(found)
    return [
        _absence(rank, target, waiters, fact, certain=certain, late=True, expected=True)
        for rank, (fact, certain) in sorted(found.items(), key=lambda item: item[0])
    ]  # fmt: skip


def _is_after(time: lf.Time | None, other: lf.Time | None, before_s: float = 0.0) -> bool:
    """Return whether what was so long before a time came after another time on the same clock."""
    if time is None or other is None or time.clock != other.clock:
        return False
    return time.seconds - before_s > other.seconds


def _silent_ranks(facts: Sequence[lf.Fact], world: int | None) -> frozenset[int]:
    """Return the ranks that were there, and whose silence about a time limit shows that they ran into none.

    What people paste often lacks the lines of some ranks. So the lines of a rank must be lacking where they would be:

    - in a file that holds its lines only;
    - behind a line in which it says that another rank told it to dump;
    - in a log that has the last lines of those that ran into their limits, and lines of all ranks: of as many as the
      world has, else earlier lines of every rank up to the highest.

    A rank whose watchdog is stuck cannot report, and one that lost a peer or failed does not wait any more.
    """
    waits = [fact for fact in facts if isinstance(fact, lf.Waiting) and fact.timed_out and not fact.in_init]
    sources = {fact.spot.source for fact in waits}
    told, excused, ended = set(), set(), set()
    early: dict[int, set[str]] = {}  # the files that hold other lines of a rank
    cut = False
    for fact in facts:
        rank = fact.who.rank
        if isinstance(fact, lf.Hint) and fact.kind == "elided":
            cut = cut or fact.spot.source in sources
        if rank is None or isinstance(fact, lf.Absent):
            continue
        # The last that a rank writes after a limit.
        timed_out = isinstance(fact, lf.Failed) and fact.nature is lf.Nature.TIMED_OUT
        if timed_out or (isinstance(fact, lf.Hint) and fact.kind == "watchdog-ended"):
            ended.add(rank)
        if _excuses(fact):
            excused.add(rank)
        elif isinstance(fact, lf.Hint) and fact.kind == "told-to-dump":
            told.add(rank)
        elif isinstance(fact, _SIGNS) and fact.spot.line is not None:
            early.setdefault(rank, set()).add(fact.spot.source)
    waiters = {rank for rank, _ in ranked(waits, lf.Waiting)}
    shared = {rank for rank, files in early.items() if files & sources}
    known = shared | waiters | excused if world is not None else shared
    every = range(world if world is not None else max({*early, *waiters}, default=-1) + 1)
    is_whole = not cut and waiters <= ended and known.issuperset(every)
    alone = {rank for rank, files in early.items() if not files & sources}
    found = (told | alone | (shared if is_whole else set())) - excused
    return frozenset(found if len(found) <= max(len(waiters), 1) else told - excused)


def _excuses(fact: lf.Fact) -> bool:
    """Return whether a fact shows that its rank cannot report a limit, or does not wait."""
    if isinstance(fact, lf.Failed):
        return fact.nature not in {lf.Nature.STOPPED, lf.Nature.FOLLOWS}
    return isinstance(fact, lf.Waiting) or (isinstance(fact, lf.Hint) and fact.kind in {"watchdog-stuck", "gil"})


def _ahead(group: _Group, target: lf.Waiting, whole: int | None) -> lf.Differ | None:
    """Return that ranks have completed a later call than the one that the others wait in: they made other calls."""
    number = target.operation.seq or 0
    done = {rank: reached.completed for rank, reached in group.reached.items() if rank not in group.waits}
    ahead = tuple(sorted(rank for rank, last in done.items() if last is not None and number < last <= number + _NEAR))
    if not ahead or target.operation.op in _FROM_ROOT or len(ahead) >= len(group.waits):
        return None
    reached = group.reached[ahead[0]]
    later = lf.Operation(group=group.key, group_words=group.words, seq=reached.completed)
    sides = ((tuple(sorted(group.waits)), target.operation), (ahead, later))
    settled = whole is not None and 2 * len(group.waits) > whole  # they are most of their group
    return lf.Differ(sides=sides, odd=ahead, aspect="number", settled=settled, **_where(reached))


def _is_behind(reached: lf.Reached, number: int) -> bool:
    return reached.enqueued is not None and number - _NEAR <= reached.enqueued < number


def _absence(rank: int, target: lf.Waiting, waiters: Iterable[int], shown_by: lf.Fact, **more: Any) -> lf.Absent:
    waiting = tuple(sorted(set(waiters)))
    fields = {"operation": target.operation, "waiters": waiting, "shown": lf.Shown.NUMBERS, **_where(shown_by), **more}
    return lf.Absent(who=lf.Who(rank=rank), **fields)


def _limits_differ(group: _Group, whole: int | None) -> lf.Differ | None:
    """Return how the calls differ in which ranks of one group wait."""
    calls = {rank: _call_key(wait) for rank, wait in group.waits.items() if wait.operation.op}
    ordered = [ranks for _, ranks in group_alike(calls)]
    if len(ordered) < 2:
        return None
    operations = [group.waits[ranks[0]].operation for ranks in ordered]
    aspect = _aspect(operations)
    earliest = min(operations, key=lambda operation: operation.seq or 0)
    ahead = [rank for rank, wait in group.waits.items() if wait.operation.seq != earliest.seq]
    # One rank may have passed an operation that it was the root of.
    root_ahead = earliest.op in _FROM_ROOT and len(ahead) == 1 and group.places.get(ahead[0], ahead[0]) == 0
    if not aspect or (aspect == "number" and (not group.words or root_ahead)):
        return None  # numbers without a group may be those of different groups
    odd = tuple(sorted(rank for ranks in ordered[1:] for rank in ranks))
    return lf.Differ(
        sides=tuple(zip(ordered, operations, strict=True)), aspect=aspect,
        settled=whole is not None and 2 * len(ordered[0]) > whole,
        odd=odd if len(ordered[0]) > len(ordered[1]) else None, **_where(group.waits[odd[0]]),
    )  # fmt: skip


def _aspect(operations: Sequence[lf.Operation]) -> str:
    """Return what differs but must be equal, or an empty string."""
    if len({operation.seq for operation in operations}) > 1:
        return "number"
    if len({operation.op for operation in operations}) > 1:
        return "operation"
    op = operations[0].op
    if (
        "barrier" in {operation.made_by for operation in operations}
        and len({operation.numel_in for operation in operations}) > 1
    ):
        return "operation"
    if op in _SAME_IN and len({operation.numel_in for operation in operations if operation.numel_in is not None}) > 1:
        return "shape"
    if (
        op in _SAME_OUT
        and len({operation.numel_out for operation in operations if operation.numel_out is not None}) > 1
    ):
        return "shape"
    return ""


def _call_key(wait: lf.Waiting) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    operation = wait.operation
    numel_in = operation.numel_in if operation.op in _SAME_IN else None
    numel_out = operation.numel_out if operation.op in _SAME_OUT else None
    return operation.seq, operation.op, numel_in, numel_out


def _where(fact: lf.Fact) -> Mapping[str, Any]:
    return {"spot": fact.spot, "time": fact.time, "said": fact.said}


def _compare_numberless(
    facts: Sequence[lf.Fact], limits: _Limits, silent: frozenset[int], world: int | None
) -> list[lf.Fact]:  # fmt: skip
    """Compare waits without a number: those of nccl2 and Gloo, and those in ``init_process_group``.

    A rank that was seen and said nothing of a limit or a lost peer is the one that the others waited for, or it had
    completed all its calls. If as many wait in init as have come, and one rank is not among them, it has not come.
    """
    in_calls = [(rank, fact) for rank, fact in limits if not fact.in_init and not fact.in_store]
    waiters = {rank for rank, _ in in_calls}
    if silent and len(silent) < len(waiters) and all(fact.operation.seq is None for _, fact in in_calls):
        target = in_calls[0][1]
        return [_absence(rank, target, waiters, target, certain=False) for rank in sorted(silent)]
    if world is None:
        return []
    inits = {rank for rank, fact in limits if fact.in_init}
    late = [rank for rank in range(world) if rank not in inits]
    came = max((fact.came for fact in facts if isinstance(fact, lf.Waiting) and fact.came is not None), default=None)
    has_others = any(late == [fact.who.rank] and not isinstance(fact, lf.Size) for fact in facts)
    if len(inits) > 1 and len(late) == 1 and came == len(inits) and not has_others:
        target = next(fact for _, fact in limits if fact.in_init)
        return [lf.Absent(who=lf.Who(rank=late[0]), waiters=tuple(sorted(inits)), in_init=True, **_where(target))]
    return []


def compare_calls(facts: Iterable[lf.Fact]) -> Iterator[lf.Differ]:
    """Return the first call of each communicator in which ranks differ.

    Calls of one group call share a number, so all calls of a rank at a number are compared together. Sizes may differ
    by intent in none of these operations.
    """
    for group, those in grouped((fact.operation.group, fact) for _, fact in ranked(facts, lf.Called)).items():
        ranks = {fact.who.rank for fact in those}
        size = re.search(r" of (\d+) ranks$", group)
        if size is not None and len(ranks) > int(size[1]):
            continue
        by_number = grouped((fact.operation.seq or 0, fact) for fact in those)
        found = next(filter(None, (_calls_differ(by_number[number]) for number in sorted(by_number))), None)
        if found is not None:
            yield found


def _calls_differ(called: Sequence[lf.Called]) -> lf.Differ | None:
    calls = grouped(ranked(called, lf.Called))
    shapes = {rank: tuple(sorted((_shape_of(fact.operation) for fact in own), key=str)) for rank, own in calls.items()}
    sides = grouped((shape, rank) for rank, shape in shapes.items())
    if len(sides) < 2 or len({len(shape) for shape in sides}) > 1:
        return None
    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
    common = Counter(call for shape in sides for call in set(shape))
    shown = []
    for shape, ranks in ordered:
        own = next((call for call in shape if common[call] < len(sides)), shape[0])
        fact = next(fact for fact in calls[ranks[0]] if _shape_of(fact.operation) == own)
        shown.append((tuple(sorted(ranks)), fact))
    majority, last = shown[0][0], shown[-1][1]
    sides_of = tuple((ranks, fact.operation) for ranks, fact in shown)
    odd = tuple(sorted(set(calls) - set(majority))) if 2 * len(majority) > len(calls) else None
    aspect = "operation" if len({fact.operation.op for _, fact in shown}) > 1 else "shape"
    return lf.Differ(spot=last.spot, said=last.said, sides=sides_of, odd=odd, aspect=aspect)


def _shape_of(operation: lf.Operation) -> _Call:
    return (operation.op, operation.numel_in, operation.dtype)


def compare_stacks(facts: Sequence[lf.Fact], world: int | None) -> list[lf.Fact]:
    """Return who is absent where others wait, or that all ranks are inside, or that the job moves."""
    by_rank = grouped((rank, fact) for rank, fact in ranked(facts, lf.Stacked) if not fact.worker)
    if not by_rank:
        return []
    last = {rank: stacks[-1] for rank, stacks in sorted(by_rank.items())}
    said = {fact.who.rank for fact in facts if isinstance(fact, lf.Moving) and fact.step is None}
    moved = {rank for rank, stacks in by_rank.items() if rank in said or (len({_sites(stack) for stack in stacks}) > 1)}
    if any(last[rank].doing in WAITS for rank in moved) or (moved and moved == set(last)):
        rank = min(moved)
        return [lf.Moving(who=last[rank].who, spot=last[rank].spot)]
    waiters = {rank: stack for rank, stack in last.items() if stack.doing in WAITS}
    inits = {rank: stack for rank, stack in last.items() if stack.doing is lf.Doing.INIT}
    others = {rank: stack for rank, stack in last.items() if rank not in waiters and rank not in inits}
    named = [stack.operation for stack in waiters.values() if stack.operation is not None]
    unnamed = lf.Operation(op="a collective") if waiters else lf.Operation()
    operation = max(named, key=named.count, default=unnamed)  # as most of them name it
    absent = {**others, **inits} if waiters else others if inits else {}
    found: list[lf.Fact] = [
        lf.Absent(
            who=stack.who, spot=stack.spot, operation=operation, waiters=tuple(waiters or inits),
            in_init=not waiters, moves=rank in moved, shown=lf.Shown.STACKS,
        )
        for rank, stack in absent.items()
    ]  # fmt: skip
    if waiters and not absent:
        differ = _places(waiters)
        found += [differ] if differ is not None else []
        if len(waiters) > 1 and len({_sites(stack) for stack in waiters.values()}) == 1:
            spot, complete = next(iter(waiters.values())).spot, world is None or len(last) >= world
            found.append(lf.Inside(operation=operation, ranks=tuple(waiters), spot=spot, complete=complete))
    for fact in facts:  # ranks that did not answer when they were asked for their stacks
        if isinstance(fact, lf.Hint) and fact.kind == NO_ANSWER and waiters and fact.who.rank not in last:
            found.append(lf.Absent(
                who=fact.who, spot=fact.spot, said=fact.words, operation=operation, waiters=tuple(waiters),
                certain=False, shown=lf.Shown.STACKS,
            ))  # fmt: skip
    return found


def _places(waiters: dict[int, lf.Stacked]) -> lf.Differ | None:
    """Return that ranks wait in different calls, if the stacks of all name the call."""
    if any(stack.doing is not lf.Doing.COLLECTIVE or stack.operation is None for stack in waiters.values()):
        return None
    sides = group_alike({rank: stack.operation for rank, stack in waiters.items() if stack.operation is not None})
    if len(sides) < 2:
        return None
    odd = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    shown_sides = tuple((ranks, operation) for operation, ranks in sides)
    is_plain = len(sides[0][1]) > len(sides[1][1])
    spot = waiters[odd[0]].spot
    return lf.Differ(sides=shown_sides, odd=odd if is_plain else None, aspect="place", certain=False, spot=spot)


def _sites(stack: lf.Stacked) -> tuple[tuple[str, int], ...]:
    """Return the user's lines, else all. Sources differ in how much of a path and of a function's name they give."""
    frames = [frame for frame in stack.frames if frame.user] or stack.frames
    return tuple((frame.file.rpartition("/")[2], frame.line) for frame in frames)


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, else the innermost of all."""
    return next((frame for frame in reversed(frames) if frame.user), frames[-1] if frames else None)
