"""Facts about checkpoint files: their form, damage, contents by name, and neighboring files. No judgment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


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
