"""With which value a variable does harm: the grammar of the column ``danger`` in model/variables.tsv.

A condition is a word, and for some a colon and what the value is held against: ``is:1``, ``nonzero``, ``zero`` (numbers
as NCCL reads them), ``true``, ``false`` (as torch reads them), ``on`` (anything but off), ``set`` (anything),
``words:TRACE``, ``level:LOC``, ``debug-level:DETAIL``, ``forced``, ``fixed-path``, ``stray``. "info " stands in front
where it is worth no warning.
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
    """What else counts: the versions that are installed, the other variables, the machine."""

    versions: dict[str, Version]
    """Of nccl and torch, where they are known."""
    variables: dict[str, str]
    ranks_here: int
    under_wrap: bool
    active_port: bool
    """An RDMA port is ACTIVE."""
    no_rdma: bool
    """There is no RDMA device."""


def does_harm(condition: str, value: str, context: VariableContext) -> bool:
    """Say whether a value fulfils a condition."""
    word, _, rest = condition.partition(":")
    return _CONDITIONS[word](value, rest, context)


def _is_forced(value: str, _rest: str, _context: VariableContext) -> bool:
    """Whether a list names what is to be used, and not with "^" what is not."""
    elements = [part.rpartition(":")[2].strip() for part in value.split(";")]
    return any(element and not element.startswith("^") for element in elements)


def _is_fixed_path(value: str, _rest: str, context: VariableContext) -> bool:
    own = "%p" in value or value.startswith(("/dev/", "/proc/")) or not value.strip()
    return not own and context.ranks_here > 1


def _is_stray(value: str, _rest: str, context: VariableContext) -> bool:
    """Whether TORCHELASTIC_USE_AGENT_STORE is set and torchrun, which sets a run id beside it, is not there."""
    return value == "True" and "TORCHELASTIC_RUN_ID" not in context.variables


_CONDITIONS: dict[str, Callable[[str, str, VariableContext], bool]] = {
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
CONDITIONS = frozenset(_CONDITIONS)
"""The words with which a condition may begin."""
