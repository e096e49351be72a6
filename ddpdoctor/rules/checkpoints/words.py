"""Phrases that rules over checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.words import count_of, first_names

if TYPE_CHECKING:
    from collections.abc import Sequence


def some(names: Sequence[str], noun: str) -> str:
    """Return "1 tensor (a)", "9 tensors (a, b, c, d and 5 more)"."""
    return f"{count_of(len(names), noun)} ({first_names(names)})"
