"""Which ranks can be to blame for wrong results of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import Collective
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.bandwidth import Bench, Wrong

ROOT = 0
"""The rank that broadcasts, and the target of a reduce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongDataBlame:
    """The ranks that can be to blame, how sure that is, and why."""

    ranks: tuple[int, ...]
    confidence: Confidence
    why: str


def find_blame(bench: Bench, wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Return the ranks that can be to blame for the wrong results of one case (at least one result)."""
    world = tuple(sorted(member.rank for member in bench.members))
    collective = wrongs[0].collective
    if collective is Collective.REDUCE:
        return _low(world, "the root alone has the result, of what all ranks sent")
    if collective is Collective.BROADCAST:
        return _blame_broadcast(world, wrongs)
    if collective in {Collective.SEND_RECV, Collective.ALL_TO_ALL}:
        return _blame_messages(bench, world, wrongs)
    return _blame_shared(world, wrongs)


def _blame_shared(world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Blame ranks for a result that all ranks compute together: a wrong rank beside right ones made it wrong itself."""
    ranks = _ranks(wrongs)
    if len(ranks) < len(world):
        right = rank_list(set(world) - set(ranks))
        return WrongDataBlame(
            ranks=ranks, confidence=Confidence.HIGH, why=f"the same call gave {right} the right result"
        )
    alike = len({(one.index, one.found) for one in wrongs}) == 1
    why = "all ranks have the same wrong number, so one of them sent it" if alike else "no rank has the right result"
    return _low(world, f"{why}: which one is at fault cannot be told")


def _blame_broadcast(world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    ranks = _ranks(wrongs)
    right = set(world) - set(ranks) - {ROOT}
    if right:
        why = f"{rank_list(right)} received the same data right"
        return WrongDataBlame(ranks=ranks, confidence=Confidence.MEDIUM, why=why)
    if len(world) > 2:
        why = f"every rank that received of rank {ROOT} has it wrong"
        return WrongDataBlame(ranks=(ROOT,), confidence=Confidence.MEDIUM, why=why)
    return _low(world, "sender and receiver cannot be told apart")


def _blame_messages(bench: Bench, world: tuple[int, ...], wrongs: Sequence[Wrong]) -> WrongDataBlame:
    """Blame ranks for messages from one rank to another: the rank that all wrong messages have in common."""
    ends = [{one.rank, _sender(bench, world, one)} for one in wrongs]
    common = set.intersection(*ends)
    if len(ends) > 1 and len(common) == 1:
        why = "it sent or received every message that arrived wrong"
        return WrongDataBlame(ranks=tuple(common), confidence=Confidence.MEDIUM, why=why)
    return _low(tuple(sorted(set.union(*ends))), "sender and receiver cannot be told apart")


def _sender(bench: Bench, world: tuple[int, ...], wrong: Wrong) -> int:
    """Return who sent an element: the previous rank, or for all_to_all the rank whose part of the output it is in."""
    if wrong.collective is Collective.SEND_RECV:
        return world[(world.index(wrong.rank) - 1) % len(world)]
    count = next((one.count for one in bench.results if _is_case(one.size_bytes, one.dtype, wrong)), 0)
    return world[min(wrong.index * len(world) // count, len(world) - 1)] if count else wrong.rank


def _is_case(size_bytes: int, dtype: str, wrong: Wrong) -> bool:
    return (size_bytes, dtype) == (wrong.size_bytes, wrong.dtype)


def _low(ranks: tuple[int, ...], why: str) -> WrongDataBlame:
    return WrongDataBlame(ranks=ranks, confidence=Confidence.LOW, why=why)


def _ranks(wrongs: Sequence[Wrong]) -> tuple[int, ...]:
    return tuple(sorted({one.rank for one in wrongs}))
