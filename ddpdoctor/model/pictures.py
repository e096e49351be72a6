"""What pictures of a job are drawn from, beside its timeline: who waited for whom, and the source at the fault."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRanks:
    """Ranks in the same state at the same line that wait for the same ranks. Those that others wait for count too."""

    ranks: tuple[int, ...]
    state: str
    """As in the table of ranks."""
    place: str
    """The user's line: "/home/me/train.py:61 in main". Empty if it is unknown."""
    blamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """Who waits for whom. Links are pairs of positions in ``classes``: the first waits for the second."""

    classes: tuple[WaitingRanks, ...]
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExcerpt:
    """Lines of a user's file around the one that is blamed, without secrets."""

    file: str
    first: int
    """The number of the first line."""
    lines: tuple[str, ...]
    blamed: int
    """The number of the blamed line."""
