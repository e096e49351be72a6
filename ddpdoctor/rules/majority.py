"""Finds the hosts or ranks that differ from the majority, and describes them in one phrase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import grouped, majority_of, name_list, rank_list
from ddpdoctor.rules.answers import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from ddpdoctor.model.node import Node

Value = TypeVar("Value", bound="Hashable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Voice(Generic[Value]):
    """The value on one host or rank. None: unknown, so it is left out."""

    host: str
    value: Value | None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Generic[Value]):
    """All with the same value. Each host appears once, in the order of arrival; ranks are sorted."""

    value: Value
    hosts: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Generic[Value]):
    """A disagreement. ``majority`` is the value of more than half, or None; then the minorities are all sides."""

    majority: Side[Value] | None
    minorities: tuple[Side[Value], ...]  # the smallest first; among equal ones, the one that was received first

    @property
    def sides(self) -> tuple[Side[Value], ...]:
        """Return all sides, the majority last."""
        return self.minorities if self.majority is None else (*self.minorities, self.majority)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that differ from the majority, or all hosts if there is none."""
        return tuple(dict.fromkeys(host for side in self.minorities for host in side.hosts))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that differ from the majority, or all ranks if there is none."""
        return tuple(sorted({rank for side in self.minorities for rank in side.ranks}))

    @property
    def confidence(self) -> Confidence:
        """Return how sure the blame is: low without a majority."""
        return Confidence.HIGH if self.majority is not None else Confidence.LOW


def compare(voices: Iterable[Voice[Value]]) -> Split[Value] | None:
    """Return how the values differ, or None if all known values are equal."""
    by_value = grouped((voice.value, voice) for voice in voices if voice.value is not None)
    if len(by_value) < 2:
        return None
    sides = tuple(
        Side(
            value=value,
            hosts=tuple(dict.fromkeys(voice.host for voice in said)),
            ranks=tuple(sorted({rank for voice in said for rank in voice.ranks})),
        )
        for value, said in sorted(by_value.items(), key=lambda side: len(side[1]))
    )
    if majority_of(by_value.values()):
        return Split(majority=sides[-1], minorities=sides[:-1])
    return Split(majority=None, minorities=sides)


def compare_nodes(said: Iterable[tuple[Node, Value | None]]) -> Split[Value] | None:
    """Return which nodes differ from which, by the value of each."""
    return compare(Voice(host=node.host, ranks=node.ranks, value=value) for node, value in said)


def disagreement(split: Split[Any], summary: str, fix: str, **fields: Any) -> Problem:
    """Return a problem of the hosts that differ from the majority; ``fields`` are other fields of ``Problem``."""
    return Problem(summary=summary, fix=fix, confidence=split.confidence, hosts=split.hosts, **fields)


def describe(
    split: Split[Value], noun: str, *, words: Callable[[Value], str] = str, by_rank: bool = False, sign: str = " "
) -> str:
    """Return "torch 2.11.0 on node3, 2.13.0 on 15 others".

    ``sign`` comes between noun and value: "=" for a variable. By rank: "NCCL_ALGO=Ring on rank 3, Tree on 7 others".
    """
    parts = []
    for side in split.sides:
        names = rank_list(side.ranks) if by_rank and side.ranks else name_list(side.hosts)
        count = len(side.ranks if by_rank and side.ranks else side.hosts)
        is_most = side is split.majority and count > 1
        parts.append(f"{words(side.value)} on {f'{count} others' if is_most else names}")
    return f"{noun}{sign}{', '.join(parts)}"
