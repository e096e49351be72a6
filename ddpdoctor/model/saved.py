"""Saved files: checkpoints, what differs between two, and the names of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


MODEL_KEYS = frozenset({"model", "model_state_dict", "state_dict", "net", "app"})
"""Keys under which scripts save a model. Not "module": that is a prefix by DDP, and DD713 reports it."""
MAX_DEPTH = 2
"""How many keys may surround a state dict: {"model": ...}, {"state": {"model": ...}}."""


def align_names(files: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return for each file the prefix to remove from its names so that they match those of the other files.

    All prefixes are empty if any two files already share a name, or if no prefix helps.
    """
    none = ("",) * len(files)
    if len(files) < 2 or not all(files) or len(set().union(*files)) < sum(map(len, files)):
        return none
    smallest = min(files, key=len)
    matched, found = 0, none
    for prefix in _prefixes(smallest):
        wanted = _below(smallest, prefix)
        fits = []
        for names in files:  # the prefix that holds most of the wanted names; the shortest wins a tie
            counts = {one: len(_below(names, one) & wanted) for one in _prefixes(names)}
            best = prefix if names is smallest else max(counts, key=counts.__getitem__)
            fits.append((best, counts[best]))
        total = sum(count for _, count in fits) if all(count for _, count in fits) else 0
        if total > matched:
            matched, found = total, tuple(one for one, _ in fits)
    return found


def _prefixes(names: Collection[str]) -> list[str]:
    found = {""}
    for name in names:
        parts = name.split(".")[:-1]
        found |= {".".join(parts[:depth]) + "." for depth in range(1, min(len(parts), MAX_DEPTH) + 1)}
    return sorted(found, key=lambda prefix: (len(prefix), prefix))


def _below(names: Collection[str], prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


class Form(str, Enum):
    """How a file is laid out."""

    ZIP = "torch"
    """What ``torch.save`` has written since 1.6: a zip archive with a pickle and one record per storage."""
    LEGACY = "torch, old format"
    """What ``torch.save`` wrote before 1.6, and still writes on request: pickles, then the storages."""
    SAFETENSORS = "safetensors"
    FOLDER = "distributed checkpoint"
    """A folder of ``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp``."""
    FOREIGN = "no checkpoint"


class ReadState(str, Enum):
    """How far a file could be read."""

    WHOLE = "whole"
    EMPTY = "empty"
    CUT = "cut off"
    FOREIGN = "something else"
    UNREADABLE = "unreadable"


class Checksums(str, Enum):
    """Whether contents could be compared with checksums."""

    CHECKED = "checked"
    NONE = "the format has none"
    NOT_WRITTEN = "they were not written"
    NOT_READ = "not read"


class StatePart(str, Enum):
    """A part of the training state that a resume needs."""

    MODEL = "model"
    OPTIMIZER = "optimizer state"
    SCHEDULER = "scheduler state"
    SCALER = "gradient scaler state"
    RANDOM = "random state"
    PROGRESS = "epoch or step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIn:
    """A tensor in a file."""

    name: str
    """Its path in the file: "model.layers.0.weight"."""
    shape: tuple[int, ...]
    dtype: str
    """torch's name without "torch.": "float32"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddValues:
    """How many values of a tensor are NaN or infinite."""

    name: str
    of: int
    nan: int
    above: int
    """+inf."""
    below: int
    """-inf."""
    plain: int
    """Number of finite values that are not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A record whose bytes differ from what was written."""

    record: str
    tensors: tuple[str, ...] = ()
    """The tensors in it. Empty if it holds something else, or if that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A state dict of a model in a file."""

    where: str
    """The key that holds it, such as "model"; empty if it is the whole file."""
    tensors: tuple[TensorIn, ...]
    """Named as in the state dict itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a file holds, according to its own index."""

    tensors: tuple[TensorIn, ...] = ()
    weights: tuple[Weights, ...] = ()
    parts: tuple[StatePart, ...] = ()
    empty_optimizer: bool = False
    """There is optimizer state, but no step had been made."""
    globals: tuple[str, ...] = ()
    """Functions and classes that it names, beyond those that plain tensors need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeen:
    """A checkpoint file, or a folder that is one checkpoint."""

    path: str
    size_bytes: int
    form: Form
    state: ReadState
    detail: str = ""
    """A phrase about what was not read."""
    checksums: Checksums = Checksums.NOT_READ
    damaged: tuple[Damage, ...] = ()
    lost: tuple[str, ...] = ()
    """The incomplete tensors of a truncated file."""
    contents: Contents | None = None
    """None if its index could not be read."""
    refused: tuple[str, ...] = ()
    """Functions and classes that make ``torch.load(weights_only=True)`` refuse the file."""
    refusal: str = ""
    """Another reason of ``torch.load`` to refuse it."""
    missing: tuple[str, ...] = ()
    """Files that it names but that do not exist or are too small."""
    values: tuple[OddValues, ...] | None = None
    """Tensors that hold NaN or infinite values. None if the values were not read."""
    unseen: tuple[str, ...] = ()
    """Tensors whose values could not be read."""
    digests: dict[str, str] | None = field(default=None, metadata={"json": "prints"})
    """A digest of each tensor's values, by name. None if files are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The model that the user wants to load a file into."""

    function: str
    """``package.module:function``."""
    tensors: tuple[TensorIn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file beside a checkpoint that shows a failed write."""

    path: str
    kind: str
    """A phrase: "a temporary file", "10 % of the size of its neighbors"."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A set of files that belong together, with some missing."""

    pattern: str
    """Name of the files, with a wildcard for the number: "step200_rank*.pt"."""
    missing: tuple[str, ...]
    why: str
    """A phrase that says how that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Everything that was inspected."""

    files: tuple[FileSeen, ...]
    expected: Expected | None = None
    copies: tuple[tuple[int, ...], ...] = ()
    """Groups of positions in ``files``: the files of a group should be equal."""
    same_asked: bool = False
    """The user said that they should be equal. If False, they only have the same name in different folders."""
    leftovers: tuple[Leftover, ...] = ()
    gaps: tuple[Gap, ...] = ()


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
