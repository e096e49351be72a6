"""Types for unknown facts, which rules cannot mistake for healthy values, and a pause of garbage collection."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Value = TypeVar("Value")


class Why(str, Enum):
    """Why a fact is missing. The first four make a check skipped, the last two make it inconclusive."""

    ABSENT = "absent"  # this machine has no such thing
    DENIED = "denied"  # it exists, but this process may not read it
    NOT_ASKED = "not-asked"  # it is only read with an option
    NEEDLESS = "needless"  # nothing that runs here depends on it
    TIMEOUT = "timeout"  # it did not answer within its limit
    ERROR = "error"  # reading it failed unexpectedly


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """An unknown fact. ``reason`` is a phrase for users: "no NVIDIA driver found"."""

    why: Why
    reason: str


class NotRead(Exception):  # noqa: N818 - an answer that ends a rule early, and no error
    """A rule needs an unknown fact. The rule engine turns this into an outcome."""

    def __init__(self, unread: Unread) -> None:
        super().__init__(unread.reason)
        self.unread = unread


def need(reading: Value | Unread) -> Value:
    """Return the value. Raises ``NotRead`` if it is unknown, which makes the check skipped or inconclusive."""
    if isinstance(reading, Unread):
        raise NotRead(reading)
    return reading


def known(reading: Value | Unread) -> Value | None:
    """Return the value, or None if it is unknown. For facts that a rule does not need."""
    return None if isinstance(reading, Unread) else reading


NOT_ASKED = Unread(why=Why.NOT_ASKED, reason="not read for the checks that were chosen")


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn garbage collection off. Each collection would visit all objects that are kept, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
