"""Compares the stacks of ranks: who waits for others, and who is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Differ, Doing, Hint, Inside, Moving, Operation, Shown, Stacked
from ddpdoctor.model.words import group_alike, grouped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.stacks import Frame

WAITS = frozenset({Doing.COLLECTIVE, Doing.DEVICE})
"""What a rank does that, as far as a stack can tell, waits for other ranks."""

NO_ANSWER = "no-answer"
"""The kind of note about a rank that did not answer torch's debug server."""


def compare_stacks(facts: Sequence[Fact], world: int | None) -> list[Fact]:
    """Return who is absent where others wait, or that all ranks are inside, or that the job moves."""
    stacked = (fact for fact in facts if isinstance(fact, Stacked) and not fact.worker)
    by_rank = grouped((fact.who.rank, fact) for fact in stacked if fact.who.rank is not None)
    if not by_rank:
        return []
    last = {rank: stacks[-1] for rank, stacks in sorted(by_rank.items())}
    said = {fact.who.rank for fact in facts if isinstance(fact, Moving) and fact.step is None}
    moved = {rank for rank, stacks in by_rank.items() if rank in said or _moved(stacks)}
    if any(last[rank].doing in WAITS for rank in moved) or (moved and moved == set(last)):
        rank = min(moved)
        return [Moving(who=last[rank].who, spot=last[rank].spot)]
    return [*_compare(last, moved, world), *_silent(facts, last)]


def _silent(facts: Sequence[Fact], last: dict[int, Stacked]) -> Iterator[Absent]:
    """Yield the ranks that did not answer when they were asked for their stacks, while others wait."""
    waiters = {rank: stack for rank, stack in last.items() if stack.doing in WAITS}
    for fact in facts:
        if isinstance(fact, Hint) and fact.kind == NO_ANSWER and waiters and fact.who.rank not in last:
            yield Absent(
                who=fact.who, spot=fact.spot, said=fact.words, operation=_operation_of(waiters),
                waiters=tuple(waiters), certain=False, shown=Shown.STACKS,
            )  # fmt: skip


def _compare(last: dict[int, Stacked], moved: AbstractSet[int], world: int | None) -> Iterator[Fact]:
    waiters = {rank: stack for rank, stack in last.items() if stack.doing in WAITS}
    inits = {rank: stack for rank, stack in last.items() if stack.doing is Doing.INIT}
    others = {rank: stack for rank, stack in last.items() if rank not in waiters and rank not in inits}
    if waiters:
        operation = _operation_of(waiters)
        for rank, stack in {**others, **inits}.items():
            yield Absent(
                who=stack.who, spot=stack.spot, operation=operation, waiters=tuple(waiters), moves=rank in moved,
                shown=Shown.STACKS,
            )  # fmt: skip
        if not others and not inits and (differ := _places(waiters)) is not None:
            yield differ
        if not others and not inits and len(waiters) > 1 and _are_alike(waiters):
            spot = next(iter(waiters.values())).spot
            complete = world is None or len(last) >= world
            yield Inside(operation=operation, ranks=tuple(waiters), spot=spot, complete=complete)
    elif inits:
        for rank, stack in others.items():
            yield Absent(
                who=stack.who,
                spot=stack.spot,
                waiters=tuple(inits),
                in_init=True,
                moves=rank in moved,
                shown=Shown.STACKS,
            )


def _places(waiters: dict[int, Stacked]) -> Differ | None:
    """Return that ranks wait in different calls, if the stacks of all name the call."""
    if any(stack.doing is not Doing.COLLECTIVE or stack.operation is None for stack in waiters.values()):
        return None
    sides = group_alike({rank: stack.operation for rank, stack in waiters.items() if stack.operation is not None})
    if len(sides) < 2:
        return None
    odd = tuple(sorted(rank for _, ranks in sides[1:] for rank in ranks))
    shown_sides = tuple((ranks, operation) for operation, ranks in sides)
    is_plain = len(sides[0][1]) > len(sides[1][1])
    spot = waiters[odd[0]].spot
    return Differ(sides=shown_sides, odd=odd if is_plain else None, aspect="place", certain=False, spot=spot)


def _operation_of(stacks: dict[int, Stacked]) -> Operation:
    """Return the operation that most of the waiting ranks are in, as far as their stacks name it."""
    named = [stack.operation for stack in stacks.values() if stack.operation is not None]
    return max(named, key=named.count) if named else Operation(op="a collective")


def _are_alike(stacks: dict[int, Stacked]) -> bool:
    return len({_lines(stack) for stack in stacks.values()}) == 1


def _lines(stack: Stacked) -> tuple[tuple[str, int], ...]:
    """Return the user's lines, else all. Sources differ in how much of a path and of a function's name they give."""
    frames = [frame for frame in stack.frames if frame.user] or stack.frames
    return tuple((frame.file.rpartition("/")[2], frame.line) for frame in frames)


def _moved(stacks: Sequence[Stacked]) -> bool:
    """Return whether the samples of a rank differ in the user's lines."""
    return len({_lines(stack) for stack in stacks}) > 1


def innermost(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, else the innermost of all."""
    return next((frame for frame in reversed(frames) if frame.user), frames[-1] if frames else None)
