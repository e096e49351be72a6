"""Absence is typed: what could not be read says why, and a rule never mistakes it for a healthy value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

Value = TypeVar("Value")


class Why(str, Enum):
    """Why a fact is missing. The first four make a check skipped, the last two make it inconclusive."""

    ABSENT = "absent"
    """There is no such thing on this machine."""
    DENIED = "denied"
    """It is there, and this process may not read it."""
    NOT_ASKED = "not-asked"
    """An option would have it read."""
    NEEDLESS = "needless"
    """Nothing that runs here depends on it."""
    TIMEOUT = "timeout"
    """It did not answer within its limit."""
    ERROR = "error"
    """To read it failed in a way that nobody foresaw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A fact that is not known. ``reason`` is a phrase for people: "there is no NVIDIA driver"."""

    why: Why
    reason: str


class NotRead(Exception):  # noqa: N818 - an answer that ends a rule early, and no error
    """Ends a rule that needs a fact which is not known; the engine makes it an outcome."""

    def __init__(self, unread: Unread) -> None:
        """Keep what is missing and why."""
        super().__init__(unread.reason)
        self.unread = unread


def need(reading: Value | Unread) -> Value:
    """Return what was read; raises ``NotRead`` where it was not, which makes the check skipped or inconclusive."""
    if isinstance(reading, Unread):
        raise NotRead(reading)
    return reading


def known(reading: Value | Unread) -> Value | None:
    """Return what was read, or None: for what a rule can do without."""
    return None if isinstance(reading, Unread) else reading


NOT_ASKED = Unread(why=Why.NOT_ASKED, reason="not read for the checks that were chosen")
