"""What differs between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Topic(str, Enum):
    """What a difference is about. The order is how telling a difference usually is, the most telling first."""

    VERDICT = "verdict"
    VERSION = "version"
    VARIABLE = "variable"
    SETTING = "setting"
    MACHINE = "machine"
    MODEL = "model"
    DATA = "data"
    BANDWIDTH = "bandwidth"
    PACE = "pace"
    """A symptom more often than a cause, so it comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One thing that differs. A side is empty if that run does not have it."""

    topic: Topic
    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    """The path that the user gave."""
    ended: str
    """How it ended: "hung", "no problem found"."""
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifferences:
    """Two runs and what differs between them, the most telling first."""

    first: ComparedRun
    second: ComparedRun
    differences: tuple[RunDifference, ...]
    compared: tuple[str, ...]
    """The topics that both runs have facts about."""
    not_compared: tuple[str, ...]
    """The topics that only one of them has facts about."""
