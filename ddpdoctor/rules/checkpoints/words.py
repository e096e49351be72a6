"""Phrases that rules over checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.rank_words import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_NAMED = 4


def some(names: Sequence[str], noun: str) -> str:
    """Return "1 tensor (a)", "9 tensors (a, b, c, d and 5 more)"."""
    return f"{count_of(len(names), noun)} ({listed(names)})"


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:MOST_NAMED])
    return f"{shown} and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else shown
