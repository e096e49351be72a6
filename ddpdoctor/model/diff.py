"""The result of comparing checkpoint files of several ranks or runs, by the names of their contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(str, Enum):
    """What a tensor or a value in a file is, judging by its path and name."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"
    SETTING = "optimizer setting"
    VALUE = "value"
    """Not a tensor and not of the optimizer, such as an epoch or a loss."""
    RANDOM = "random state"
    """Usually differs between ranks on purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One of the files that were compared."""

    path: str
    rank: int | None
    """The rank in its file name, such as ``ckpt_rank3.pt``."""
    size_bytes: int
    tensors: int
    values: int
    """Number of contents that are not tensors: numbers, texts, booleans."""
    stripped: tuple[str, ...] = ()
    """Prefixes that were removed from the names in this file: ``module.``."""
    below: str = ""
    """The key that holds the whole model in this file but not in other files: ``model.``."""
    beside: int = 0
    """How many tensors are outside that key. They were not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far a tensor of one file differs from that of another."""

    file: int
    against: int
    """Both are positions of files, from 0."""
    differing: int
    """Number of elements that are not bitwise equal."""
    of: int
    first: tuple[int, ...]
    """Index of the first differing element."""
    largest: float | None
    """The largest absolute difference, or None if no differing element is finite in both files."""
    relative: float | None
    """The largest difference, divided by the larger of the two values."""
    not_finite: int
    """How many differing elements are inf or NaN in either file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A tensor or value that is not equal in all files."""

    kind: Kind
    name: str
    """Its path, such as ``model.fc.weight``, without the removed prefixes."""
    sides: tuple[tuple[int, ...], ...]
    """Sets of files with equal contents, the largest set first. Sets of equal size are sorted by first file."""
    seen: tuple[str, ...]
    """One per side: ``float32[3, 4]`` for a tensor, ``0.1`` for a value."""
    absent_in: tuple[int, ...] = ()
    """Files without this name. They are not a side."""
    apart: tuple[Apart, ...] = ()
    """Compares the first file of each other side with that of the first side, if shape and dtype are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFacts:
    """The whole comparison."""

    files: tuple[SavedFile, ...]
    tensors: int
    """Number of different tensor names in all files."""
    values: int
    unequal: tuple[Unequal, ...] = ()
    """In the order of the files."""
    incomparable: tuple[str, ...] = field(default=(), metadata={"json": "untold"})
    """Names of tensors that cannot be compared because of their type."""
