"""What was seen when checkpoint files of several ranks or runs were compared, by the names of what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(str, Enum):
    """What a tensor or a value in a file is, as far as its place and its name tell."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"
    SETTING = "optimizer setting"
    VALUE = "value"
    """No tensor, and not of the optimizer: an epoch, a loss."""
    RANDOM = "random state"
    """Differs between ranks on purpose, as a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One of the files that were compared."""

    path: str
    rank: int | None
    """As its name says: ``ckpt_rank3.pt``."""
    size_bytes: int
    tensors: int
    values: int
    """What is no tensor: numbers, texts, truth values."""
    stripped: tuple[str, ...] = ()
    """Prefixes that names have in this file, and that were taken off: ``module.``."""
    below: str = ""
    """The key around the whole model in this file, where other files lack it: ``model.``."""
    beside: int = 0
    """How many tensors stand outside of that key. They were not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """By how much a tensor of one file is off that of another."""

    file: int
    against: int
    """Numbers of the files, from 0."""
    differing: int
    """Elements of which a bit differs."""
    of: int
    first: tuple[int, ...]
    """Index of the first of them."""
    largest: float | None
    """Of the absolute differences; None where no element that differs is finite on both sides."""
    relative: float | None
    """The largest difference against the larger of both values."""
    not_finite: int
    """How many of those that differ are inf or NaN on either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A tensor or value that is not the same in all files."""

    kind: Kind
    name: str
    """Where it stands, as ``model.fc.weight``; without the prefixes that were taken off."""
    sides: tuple[tuple[int, ...], ...]
    """Numbers of files with equal contents, the most files first; among equally many the first file first."""
    seen: tuple[str, ...]
    """By side: ``float32[3, 4]`` of a tensor, ``0.1`` of a value."""
    absent_in: tuple[int, ...] = ()
    """Files that have nothing of this name. They are no side."""
    apart: tuple[Apart, ...] = ()
    """The first file of each further side against that of the first one, where shape and dtype are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFacts:
    """All that was compared."""

    files: tuple[SavedFile, ...]
    tensors: int
    """How many names of tensors there are in all."""
    values: int
    unequal: tuple[Unequal, ...] = ()
    """In the order of the files."""
    untold: tuple[str, ...] = ()
    """Names of tensors of a kind that cannot be compared."""
