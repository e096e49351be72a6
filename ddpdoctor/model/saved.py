"""Saved files: checkpoints, what differs between two, and the names of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# Keys under which scripts save a model. Not "module": that is a prefix by DDP, and DD713 reports it.
MODEL_KEYS = frozenset({"model", "model_state_dict", "state_dict", "net", "app"})
MAX_DEPTH = 2  # how many keys may surround a state dict: {"model": ...}, {"state": {"model": ...}}


def align_names(files: Sequence[Collection[str]]) -> tuple[str, ...]:
    """Return the prefix to remove from each file's names so that they match; all empty if names match already."""
    none = ("",) * len(files)
    if len(files) < 2 or not all(files) or len(set().union(*files)) < sum(map(len, files)):
        return none
    smallest = min(files, key=len)
    matched, found = 0, none
    for prefix in _prefixes(smallest):
        wanted = _below(smallest, prefix)
        fits = []
        for names in files:  # the prefix that holds most of the wanted names; the shortest wins a tie
            counts = {start: len(_below(names, start) & wanted) for start in _prefixes(names)}
            best = prefix if names is smallest else max(counts, key=counts.__getitem__)
            fits.append((best, counts[best]))
        total = sum(count for _, count in fits) if all(count for _, count in fits) else 0
        if total > matched:
            matched, found = total, tuple(chosen for chosen, _ in fits)
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

    ZIP = "torch"  # what ``torch.save`` has written since 1.6: a zip archive with a pickle and one record per storage
    LEGACY = "torch, old format"  # by ``torch.save`` before 1.6, and on request: pickles, then storages
    SAFETENSORS = "safetensors"
    FOLDER = "distributed checkpoint"  # a folder of ``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp``
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

    name: str  # its path in the file: "model.layers.0.weight"
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.": "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class OddValues:
    """How many values of a tensor are NaN or infinite."""

    name: str
    of: int
    nan: int
    above: int  # +inf
    below: int  # -inf
    plain: int  # number of finite values that are not zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A record whose bytes differ from what was written."""

    record: str
    tensors: tuple[str, ...] = ()  # The tensors in it. Empty if it holds something else, or if that is not known.


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A state dict of a model in a file."""

    where: str  # the key that holds it, such as "model"; empty if it is the whole file
    tensors: tuple[TensorIn, ...]  # named as in the state dict itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a file holds, according to its own index."""

    tensors: tuple[TensorIn, ...] = ()
    weights: tuple[Weights, ...] = ()
    parts: tuple[StatePart, ...] = ()
    empty_optimizer: bool = False  # there is optimizer state, but no step had been made
    globals: tuple[str, ...] = ()  # functions and classes that it names, beyond those that plain tensors need


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeen:
    """A checkpoint file, or a folder that is one checkpoint."""

    path: str
    size_bytes: int
    form: Form
    state: ReadState
    detail: str = ""  # a phrase about what was not read
    checksums: Checksums = Checksums.NOT_READ
    damaged: tuple[Damage, ...] = ()
    lost: tuple[str, ...] = ()  # the incomplete tensors of a truncated file
    contents: Contents | None = None  # None if its index could not be read
    refused: tuple[str, ...] = ()  # functions and classes that make ``torch.load(weights_only=True)`` refuse the file
    refusal: str = ""  # another reason of ``torch.load`` to refuse it
    missing: tuple[str, ...] = ()  # files that it names but that do not exist or are too small
    values: tuple[OddValues, ...] | None = None  # with NaN or infinite values; None: not read
    unseen: tuple[str, ...] = ()  # tensors whose values could not be read
    # A digest of each tensor's values, by name. None if files are not compared.
    digests: dict[str, str] | None = field(default=None, metadata={"json": "prints"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The model that the user wants to load a file into."""

    function: str  # ``package.module:function``
    tensors: tuple[TensorIn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """A file beside a checkpoint that shows a failed write."""

    path: str
    kind: str  # a phrase: "a temporary file", "10 % of the size of its neighbors"
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A set of files that belong together, with some missing."""

    pattern: str  # name of the files, with a wildcard for the number: "step200_rank*.pt"
    missing: tuple[str, ...]
    why: str  # a phrase that says how that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Everything that was inspected."""

    files: tuple[FileSeen, ...]
    expected: Expected | None = None
    copies: tuple[tuple[int, ...], ...] = ()  # groups of positions in ``files``: the files of a group should be equal
    same_asked: bool = False  # the user said so; else they only have the same name in different folders
    leftovers: tuple[Leftover, ...] = ()
    gaps: tuple[Gap, ...] = ()


class Kind(str, Enum):
    """What a tensor or a value in a file is, judging by its path and name."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"
    SETTING = "optimizer setting"
    VALUE = "value"  # not a tensor and not of the optimizer, such as an epoch or a loss
    RANDOM = "random state"  # usually differs between ranks on purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """One of the files that were compared."""

    path: str
    rank: int | None  # the rank in its file name, such as ``ckpt_rank3.pt``
    size_bytes: int
    tensors: int
    values: int  # number of contents that are not tensors: numbers, texts, booleans
    stripped: tuple[str, ...] = ()  # prefixes that were removed from the names in this file: ``module.``
    below: str = ""  # the key that holds the whole model in this file but not in other files: ``model.``
    beside: int = 0  # How many tensors are outside that key. They were not compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """How far a tensor of one file differs from that of another."""

    file: int
    against: int  # both are positions of files, from 0
    differing: int  # number of elements that are not bitwise equal
    of: int
    first: tuple[int, ...]  # index of the first differing element
    largest: float | None  # the largest absolute difference, or None if no differing element is finite in both files
    relative: float | None  # the largest difference, divided by the larger of the two values
    not_finite: int  # how many differing elements are inf or NaN in either file


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A tensor or value that is not equal in all files."""

    kind: Kind
    name: str  # its path, such as ``model.fc.weight``, without the removed prefixes
    # Sets of files with equal contents, the largest set first. Sets of equal size are sorted by first file.
    sides: tuple[tuple[int, ...], ...]
    seen: tuple[str, ...]  # one per side: ``float32[3, 4]`` for a tensor, ``0.1`` for a value
    absent_in: tuple[int, ...] = ()  # Files without this name. They are not a side.
    apart: tuple[Apart, ...] = ()  # the first file of each other side against the first side's, if comparable


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffFacts:
    """The whole comparison."""

    files: tuple[SavedFile, ...]
    tensors: int  # number of different tensor names in all files
    values: int
    unequal: tuple[Unequal, ...] = ()  # in the order of the files
    # Names of tensors that cannot be compared because of their type.
    incomparable: tuple[str, ...] = field(default=(), metadata={"json": "untold"})
