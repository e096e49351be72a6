"""Which values of a variable do harm: the grammar of the column ``danger`` in model/variables.tsv.

A condition is a word. For some words, a colon and the text to compare with follow: ``is:1``, ``nonzero``, ``zero``
(numbers as NCCL reads them), ``true``, ``false`` (as torch reads them), ``on`` (anything but off), ``set`` (anything),
``words:TRACE``, ``level:LOC``, ``debug-level:DETAIL``, ``forced``, ``fixed-path``, ``stray``. "info " before the
condition means that it is not worth a warning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.rules.variable_values import FALSE_WORDS, OFF_WORDS, TRUE_WORDS, read_number

if TYPE_CHECKING:
    from collections.abc import Callable


Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableContext:
    """What else matters: the installed versions, the other variables, the machine."""

    versions: dict[str, Version]
    """Versions of nccl and torch, if known."""
    variables: dict[str, str]
    ranks_here: int
    under_wrap: bool
    active_port: bool
    """An RDMA port is ACTIVE."""
    no_rdma: bool
    """There is no RDMA device."""


def does_harm(condition: str, value: str, context: VariableContext) -> bool:
    """Say whether a value meets a condition."""
    word, _, rest = condition.partition(":")
    return CONDITIONS[word](value, rest, context)


def _is_forced(value: str, _rest: str, _context: VariableContext) -> bool:
    """Whether a list names what to use, and not (with "^") what to exclude."""
    elements = [part.rpartition(":")[2].strip() for part in value.split(";")]
    return any(element and not element.startswith("^") for element in elements)


def _is_fixed_path(value: str, _rest: str, context: VariableContext) -> bool:
    own = "%p" in value or value.startswith(("/dev/", "/proc/")) or not value.strip()
    return not own and context.ranks_here > 1


def _is_stray(value: str, _rest: str, context: VariableContext) -> bool:
    """Whether TORCHELASTIC_USE_AGENT_STORE is set without torchrun, which also sets a run id."""
    return value == "True" and "TORCHELASTIC_RUN_ID" not in context.variables


CONDITIONS: dict[str, Callable[[str, str, VariableContext], bool]] = {
    "is": lambda value, rest, _: read_number(value) == int(rest),
    "nonzero": lambda value, _rest, _: read_number(value) != 0,
    "zero": lambda value, _rest, _: value.strip()[:1] == "0" and read_number(value) == 0,
    "true": lambda value, _rest, _: value.lower() in TRUE_WORDS,
    "false": lambda value, _rest, _: value.lower() in FALSE_WORDS,
    "on": lambda value, _rest, _: value.strip().lower() not in OFF_WORDS | {""},
    "set": lambda value, _rest, _: bool(value.strip()),
    "words": lambda value, rest, _: value.strip().upper() == rest,
    "level": lambda value, rest, _: value in {rest, "0"},
    "debug-level": lambda value, rest, _: value.upper() == rest,
    "forced": _is_forced,
    "fixed-path": _is_fixed_path,
    "stray": _is_stray,
}
"""By the word that a condition begins with: whether a value, with the words after that one, meets it."""
