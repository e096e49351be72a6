"""What was seen of checkpoint files: their form, damage, contents by name, and neighbours. No judgement."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Form(str, Enum):
    """How a file is laid out."""

    ZIP = "torch"
    """What ``torch.save`` writes since 1.6: a zip archive of a pickle and of one record a storage."""
    LEGACY = "torch, old format"
    """What ``torch.save`` wrote before, and still does where it is asked to: pickles, then the storages."""
    SAFETENSORS = "safetensors"
    FOLDER = "distributed checkpoint"
    """A folder of ``torch.distributed.checkpoint``: ``.metadata`` and ``*.distcp``."""
    FOREIGN = "no checkpoint"


class State(str, Enum):
    """How far a file could be read."""

    WHOLE = "whole"
    EMPTY = "empty"
    CUT = "cut off"
    FOREIGN = "something else"
    UNREADABLE = "unreadable"


class Checksums(str, Enum):
    """Whether contents could be held to checksums."""

    CHECKED = "checked"
    NONE = "the format has none"
    NOT_WRITTEN = "they were not written"
    NOT_READ = "not read"


class Part(str, Enum):
    """What a resume needs beside the model."""

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
    """Where it stands: "model.layers.0.weight"."""
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it without "torch.": "float32"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OddValues:
    """How many values of a tensor are no ordinary numbers."""

    name: str
    of: int
    nan: int
    above: int
    """+inf."""
    below: int
    """-inf."""
    plain: int
    """Finite values that are not zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A record whose bytes are not those that were written."""

    record: str
    tensors: tuple[str, ...] = ()
    """Which lie in it; empty where it holds something else, or that cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A state dict of a model in a file."""

    where: str
    """Key under which it stands: "model", or empty where the file is nothing else."""
    tensors: tuple[TensorIn, ...]
    """Named as in the state dict itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a file holds, by its own index."""

    tensors: tuple[TensorIn, ...] = ()
    weights: tuple[Weights, ...] = ()
    parts: tuple[Part, ...] = ()
    empty_optimizer: bool = False
    """There is optimizer state, and no step had been made."""
    globals: tuple[str, ...] = ()
    """Functions and classes that it names, beside those that plain tensors need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSeen:
    """A checkpoint file, or a folder that is one checkpoint."""

    path: str
    size_bytes: int
    form: Form
    state: State
    detail: str = ""
    """Of what was not read: a phrase."""
    checksums: Checksums = Checksums.NOT_READ
    damaged: tuple[Damage, ...] = ()
    lost: tuple[str, ...] = ()
    """Of a file that is cut off: the tensors that are not whole any more."""
    contents: Contents | None = None
    """None where its index could not be read."""
    refused: tuple[str, ...] = ()
    """Functions and classes for which ``torch.load`` refuses it (weights_only=True)."""
    refusal: str = ""
    """What else ``torch.load`` says against it."""
    missing: tuple[str, ...] = ()
    """Files that it names and that are not there, or are too small."""
    values: tuple[OddValues, ...] | None = None
    """Tensors with values that are no ordinary numbers; None where they were not looked at."""
    unseen: tuple[str, ...] = ()
    """Tensors at whose values could not be looked."""
    prints: dict[str, str] | None = None
    """A digest of each tensor's values, by name; None where files are not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The model that a file is to be loaded into."""

    function: str
    """``package.module:function``."""
    tensors: tuple[TensorIn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What lies beside a checkpoint and tells of a write that did not end well."""

    path: str
    kind: str
    """A phrase: "a temporary file", "10 % of the size of its neighbours"."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Files that belong together and of which some are missing."""

    pattern: str
    """Name of the files, with the number left open: "step200_rank*.pt"."""
    missing: tuple[str, ...]
    why: str
    """How that is known: a phrase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """All that was looked at."""

    files: tuple[FileSeen, ...]
    expected: Expected | None = None
    copies: tuple[tuple[int, ...], ...] = ()
    """Positions in ``files`` of those that should be equal."""
    same_asked: bool = False
    """The user has said that they should; else they only have one name in different folders."""
    leftovers: tuple[Leftover, ...] = ()
    gaps: tuple[Gap, ...] = ()
