"""Compares reports of NCCL's RAS that stand in several files: whether the job moved between them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import Absent, Hint, Moving, Reached, Shown, Waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.evidence import Fact

RAS = "ras"
"""The kind of note that every report gives."""
_OF_COUNTS = frozenset({"ras-ahead", "ras-unnamed"})


def join_reports(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """Return the facts with what the last two reports say together. Counts differ for an instant in any job."""
    sources = list(dict.fromkeys(fact.spot.source for fact in facts if isinstance(fact, Hint) and fact.kind == RAS))
    if len(sources) < 2:
        return tuple(facts)
    former, last = (_numbers(facts, source) for source in sources[-2:])
    stale = [fact for fact in facts if _is_of_counts(fact) and fact.spot.source in sources[:-1]]
    left = [fact for fact in facts if not any(fact is one for one in stale)]
    if former and (former.keys().isdisjoint(last) or any(last[key] > former[key] for key in former.keys() & last)):
        spot = next(fact.spot for fact in reversed(facts) if fact.spot.source == sources[-1])
        moved = Moving(spot=spot, said="the counts of operations grew between two reports")
        return (*(fact for fact in left if not _is_of_counts(fact)), moved)
    stood = former.keys() & last.keys()
    return tuple(replace(fact, certain=True) if stood and isinstance(fact, Absent) else fact for fact in left)


def _numbers(facts: Iterable[Fact], source: str) -> dict[str, int]:
    """Return the lowest number of each operation in which ranks of a communicator differ."""
    found: dict[str, int] = {}
    for fact in facts:
        if fact.spot.source != source or not _is_of_counts(fact):
            continue
        if isinstance(fact, Reached) and fact.enqueued is not None:
            found[fact.group] = min(found.get(fact.group, fact.enqueued), fact.enqueued)
        elif isinstance(fact, Waiting) and fact.operation.seq is not None:
            found[fact.operation.words()] = fact.operation.seq
    return found


def _is_of_counts(fact: Fact) -> bool:
    if isinstance(fact, Absent):
        return fact.shown is Shown.COUNTS
    if isinstance(fact, Reached):
        return fact.group.startswith("comm ")
    if isinstance(fact, Waiting):
        return fact.operation.group.startswith("comm ") and not fact.timed_out and not fact.in_init
    return isinstance(fact, Hint) and fact.kind in _OF_COUNTS
