"""Reads records from notes, answers and watch.json, field by field: a damaged value costs its field and no other.

A field that is missing or damaged takes its default, or the empty value of its type. A record that lacks a field
without either, such as an enum, is damaged as a whole. ``model/codec.py`` reads our own files more strictly.
"""

from __future__ import annotations

import typing
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model.codec import INTEGERS, WrongValue, decode, field_hints
from ddpdoctor.model.consistency import NonFinite
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen
from ddpdoctor.model.facts import AtError, ModelSeen, Raised, ReducerSaid, StoreSought
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.model.steps import DataParallelSeen, GradientTimes, HandReduced

if TYPE_CHECKING:
    from collections.abc import Iterable

Kind = TypeVar("Kind")

# The keys that recorders write, by field, where they differ from the field's name.
KEYS: dict[Any, dict[str, str]] = {
    Frame: {"file": "f", "line": "l", "function": "n", "user": "u"},
    Stack: {"is_main": "main", "is_daemon": "daemon"},
    StackSample: {"time_ns": "at"},
    Raised: {"time_ns": "at", "thread_is_main": "main", "in_call": "call", "from_child": "child", "passed_on_as": "as",
             "of_ranks": "ranks", "message": "text"},
    ModelSeen: {"site": "frame"},
    ReducerSaid: {"site": "frame"},
    NonFinite: {"is_nan": "nan", "in_a_row": "row", "where": "frame"},
    AtError: {"memory": "resident"},
    StoreSought: {"of_agent": "agent", "set_at": "set"},
    DataParallelSeen: {"site": "frame"},
    HandReduced: {"site": "frame"},
    GradientTimes: {"number": "n", "cap_bytes": "cap", "static_graph": "static", "bucket_view": "view",
                    "syncs_buffers": "buffers"},
    EpochCall: {"time_ns": "at"},
    EpochSeen: {"number": "p", "set_epoch": "e", "batches": "b", "drawn": "d", "total": "t", "xor": "x", "order": "o",
                "first": "f", "complete": "done", "batch_digests": "bp", "sample_digests": "sp", "backwards": "bw",
                "repeats": "re", "highest": "h", "split_after": "split", "begun_ns": "t0", "ended_ns": "t1"},
    LoaderSeen: {"number": "n", "dataset": "ds", "dataset_digest": "dp", "samples": "N", "batch_size": "bs",
                 "drop_last": "dl", "iterable": "it", "workers": "w", "part_of": "of"},
}  # fmt: skip
_EMPTY = {str: "", int: 0, float: 0.0, bool: False}


def read_record(kind: type[Kind], entry: Any, **known: Any) -> Kind:
    """Return a record from what was written; ``known`` are fields that the caller has read from elsewhere.

    Raises:
        WrongValue: a field that has neither a default nor an empty value is damaged.
    """
    written = entry if isinstance(entry, dict) else {}
    keys = _keys(kind)  # type: ignore[arg-type]
    found = {
        name: _read_or(hint, written.get(keys[name], MISSING), default)
        for name, (hint, default) in _fields(kind).items()  # type: ignore[arg-type]
        if name not in known
    }
    return kind(**found, **known)


def read_or_none(kind: type[Kind], entry: Any) -> Kind | None:
    """Return a record, or None if the entry is empty or damaged as a whole."""
    found: Kind | None = _read_or(kind, entry, None)
    return found


def read_all(kind: type[Kind], entries: Any) -> tuple[Kind, ...]:
    """Return the records in a list, without damaged ones."""
    return tuple(one for one in map(partial(read_or_none, kind), dicts(entries)) if one is not None)


def read_frame(entry: Any) -> Frame | None:
    """Return a frame, or None if the entry is empty or damaged."""
    return read_or_none(Frame, entry)


def find_note(notes: Iterable[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    """Return the first note of these kinds, or an empty one."""
    return next((note for note in notes if note.get("k") in kinds), {})


def whole_or_0(value: Any) -> int:
    """Return a number that was written, or 0 for anything else."""
    return value if isinstance(value, int) else 0


def dicts(value: Any) -> list[dict[str, Any]]:
    """Return the dicts in a list that was read as JSON, without damaged entries."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def damaged_fields(kind: Any, entry: dict[str, Any]) -> list[str]:
    """Return the keys whose values are damaged."""
    keys = _keys(kind)
    hints = {keys[name]: hint for name, (hint, _) in _fields(kind).items()}
    return [key for key, hint in hints.items() if key in entry and _read_or(hint, entry[key], MISSING) is MISSING]


def _read_or(hint: Any, value: Any, default: Any) -> Any:
    try:
        if value is not MISSING or default is WrongValue:
            return _read(hint, value)
    except WrongValue:
        if default is WrongValue:
            raise
    return default


def _read(hint: Any, value: Any) -> Any:
    is_right = value is not None if hint is bool else hint in _EMPTY and type(value) is hint
    if is_right and (hint is not int or value in INTEGERS):
        return hint(value)
    if hint is Frame:
        if isinstance(value, list) and len(value) == 3:
            return decode(Frame, {**dict(zip(("file", "line", "function"), value, strict=True)), "user": True})
        parts = [value.get(key) for key in KEYS[Frame].values()] if isinstance(value, dict) else []
        if [*map(type, parts)] == [str, int, str, int] and parts[1] in INTEGERS:
            return _share_frame(*parts)
    members, is_record = _parts_of(hint)
    if is_record and isinstance(value, list) and len(value) == len(_fields(hint)):
        value = dict(zip(_fields(hint), value, strict=True))
    if is_record and isinstance(value, dict) and value:
        return read_record(hint, value)
    if isinstance(value, list) and members[1:] == (...,):
        read = (_read_or(members[0], one, MISSING) for one in value)
        return tuple(one for one in read if one is not MISSING)
    if type(None) in members:
        return None if value is None else _read(members[0], value)
    return decode(hint, value)


@lru_cache(maxsize=4096)
def _share_frame(file: str, line: int, function: str, user: int) -> Frame:
    """Return a frame; thousands of ranks have equal ones."""
    return Frame(file=file, line=line, function=function, user=bool(user))


@cache
def _parts_of(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the types that a type is made of, and whether it is a record."""
    return typing.get_args(hint), is_dataclass(hint)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each field; the default is ``WrongValue`` if there is none."""
    found = {}
    for one in fields(kind):
        hint = field_hints(kind)[one.name]
        default: Any = one.default
        if default is MISSING and typing.get_origin(hint) is tuple:
            default = ()
        elif default is MISSING:
            default = None if type(None) in typing.get_args(hint) else _EMPTY.get(hint, WrongValue)
        found[one.name] = (hint, default)
    return found


@cache
def _keys(kind: Any) -> dict[str, str]:
    known = KEYS.get(kind, {})
    return {one.name: known.get(one.name, one.metadata.get("json", one.name)) for one in fields(kind)}
