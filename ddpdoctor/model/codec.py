"""Converts frozen dataclasses to plain JSON values and back, by their type hints (``docs/design/0008-codec.md``).

The name of a field in JSON is its own, or ``metadata["json"]``: a field that got a better name keeps the old one in
files, so that saved runs are still read. A field with ``metadata["omit"]`` is left out where it has its default. A
report holds records in its plain data until it is written: decoding leaves them as they are, so that one reader serves
a new report and one from a file. Hosts may run different versions, so unknown fields are dropped and missing ones take
their default. Any other value that does not match its hint raises ``WrongValue``. Nothing is executed.
"""

from __future__ import annotations

import importlib
import math
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ddpdoctor.model
from ddpdoctor.model.reading import Unread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Convert = Callable[[Any], Any]

Kind = TypeVar("Kind")

UNREAD_TAG = "~unread"
# Counts and times fit into 64 bits. JSON has no limit, and larger numbers would raise errors far from here.
INTEGERS = range(-(2**63), 2**64)
_MOST_LEVELS = 40  # Our choice for plain JSON. The deepest data of a report, the facts of a node, has a dozen levels.
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_OWN_DEFAULT = object()
_EMPTY = {str: "", int: 0, float: 0.0, bool: False}
_NAMES = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "nothing",
    list: "a list",
    dict: "an object",
}


class WrongValue(Exception):  # noqa: N818 - says what it is
    """A value has the wrong type: "gpus.devices[3].uuid: a text was expected, and it is a number"."""

    def __init__(self, message: str) -> None:
        """Keep the message. Each caller adds its part of the place with ``within``."""
        super().__init__(message)
        self.message = message
        self.place = ""

    def within(self, place: str) -> WrongValue:
        self.place = place + self.place
        return self

    def __str__(self) -> str:
        return f"{self.place.removeprefix('.')}: {self.message}" if self.place else self.message


def encode(value: Any) -> Any:
    """Convert a dataclass, or plain data that holds some, to values that ``json.dumps`` accepts."""
    kind: Any = type(value)
    return _encode_any(value) if kind in {dict, list, tuple} else _encoder(kind)(value)


def decode(kind: type[Kind], plain: Any) -> Kind:
    """Build an instance of a dataclass from the result of ``json.loads``. Raises ``WrongValue``."""
    hint: Any = kind
    made: Kind = _STRICT.of(hint)(plain)
    return made


@cache
def _encoder(hint: Any) -> Convert:
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return lambda value: value if math.isfinite(value) else str(float(value))
    if hint in _PLAIN:
        return _encode_any if hint is Any else lambda value: value
    if origin is tuple and members[1:] == (...,):
        encode_each = _encoder(members[0])
        return lambda value: [encode_each(part) for part in value]
    if origin is tuple:
        encode_members = [_encoder(member) for member in members]
        return lambda value: [encode(part) for encode, part in zip(encode_members, value, strict=True)]
    if origin is dict:
        if members[0] is not str:
            raise TypeError(f"{hint!r}: the names of an object are texts")
        encode_one = _encoder(members[1])
        return lambda value: {name: encode_one(part) for name, part in value.items()}
    if origin in {typing.Union, types.UnionType}:
        kinds: list[tuple[Any, Convert]] = [
            ((float, int) if member is float else typing.get_origin(member) or member, _encoder(member))
            for member in members
        ]

        def encode_union(value: Any) -> Any:
            for kind, encode_one in kinds:
                if isinstance(value, kind):
                    return {UNREAD_TAG: encode_one(value)} if kind is Unread else encode_one(value)
            raise TypeError(f"{type(value)} is not one of {hint!r}")

        return encode_union
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value: value.value
    if is_dataclass(hint):
        return partial(_encode_record, hint)
    raise TypeError(f"{hint!r} cannot be sent")


def _encode_any(value: Any) -> Any:
    """Convert tuples, enums and dataclasses to plain values, and NaN and infinities to null."""
    if is_dataclass(value):
        return encode(value)
    if isinstance(value, dict):
        return {str(key): _encode_any(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_any(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encode_record(kind: Any, record: Any) -> dict[str, Any]:
    held = [(getattr(record, name), *how) for name, *how in _encoded_fields(kind)]
    return {key: encode_one(value) for value, key, encode_one, without in held if value != without}


@cache
def _encoded_fields(kind: Any) -> list[tuple[str, str, Convert, Any]]:
    """Return name, key, encoder and value to leave out of each field. It is called late: a record may hold itself."""
    hints, found = field_hints(kind), []
    for field in fields(kind):
        without = field.default if "omit" in field.metadata else MISSING
        found.append((field.name, field.metadata.get("json", field.name), _encoder(hints[field.name]), without))
    return found


class Decoder:
    """Builds records from plain JSON by their type hints.

    With ``keys``, those of fields that have others than their names, it is lenient: a damaged value costs its field or
    its place in a tuple, and no other. A field that is missing or damaged takes its default, or the empty value of its
    type. A record that lacks a field without either, such as an enum, is damaged as a whole.
    """

    def __init__(self, keys: Mapping[Any, Mapping[str, str]] | None = None, own: Mapping[Any, Convert] = {}) -> None:
        """``own`` are functions of the caller for some hints."""
        self._keys = keys
        self._by_hint: dict[Any, Convert] = dict(own)
        self._fields = cache(self._read_fields)

    def of(self, hint: Any) -> Convert:
        if hint not in self._by_hint:
            origin, members, is_lenient = typing.get_origin(hint), typing.get_args(hint), self._keys is not None
            made: Convert
            if hint is bool and is_lenient:
                made = _DECODE_TRUTH
            elif hint in _PLAIN:
                made = _PLAIN[hint]
            elif origin is tuple:
                decoders = [self.of(member) for member in members if member is not ...]
                made = partial(_decode_tuple, decoders, is_endless=members[1:] == (...,), is_lenient=is_lenient)
            elif origin is dict:
                made = partial(_decode_dict, self.of(members[1]))
            elif origin in {typing.Union, types.UnionType}:
                is_known = is_lenient and type(None) in members
                by_json = {} if is_known else {kind: self.of(member) for kind, member in _by_json_kind(hint).items()}
                other = self.of(members[0] if is_known else Unread)
                made = partial(_decode_union, by_json, other, has_unread=Unread in members)
            elif isinstance(hint, type) and issubclass(hint, Enum):
                made = partial(_decode_enum, {member.value: member for member in hint})
            elif is_dataclass(hint):
                made = partial(self._record, hint)
            else:
                raise TypeError(f"{hint!r} cannot be received")
            self._by_hint[hint] = made
        return self._by_hint[hint]

    def record(self, kind: Any, plain: dict[str, Any], known: Mapping[str, Any], lost: list[str] | None = None) -> Any:
        """Build a record with the ``known`` fields; keys of damaged values that it can do without go to ``lost``."""
        made = dict(known)
        for name, key, decode_one, default in self._fields(kind, tuple(made)):
            if key in plain:
                try:
                    made[name] = decode_one(plain[key])
                    continue
                except WrongValue as wrong:
                    if self._keys is None or default is MISSING:
                        raise wrong.within(f".{key}") from None
                    if lost is not None:
                        lost.append(key)
            elif default is MISSING:
                raise WrongValue("it is missing").within(f".{key}")
            if default is not _OWN_DEFAULT:
                made[name] = default
        return kind(**made)

    def _record(self, kind: Any, plain: Any) -> Any:
        if type(plain) is kind:
            return plain
        if self._keys is not None and type(plain) is list and len(plain) == len(fields(kind)):
            plain = dict(zip((key for _, key, _, _ in self._fields(kind, ())), plain, strict=True))
        if type(plain) is not dict:
            raise _wrong("an object", plain)
        # An empty one says nothing, so it is a record only if no field is needed.
        return (self if plain else _STRICT).record(kind, plain, {})

    def _read_fields(self, kind: Any, known: tuple[str, ...]) -> list[tuple[str, str, Convert, Any]]:
        """Return name, key, decoder and default of each other field. It is called late: a record may hold itself."""
        keys, parts = (self._keys or {}).get(kind, {}), []
        for attr in (field for field in fields(kind) if field.name not in known):
            hint, default = field_hints(kind)[attr.name], attr.default
            if default is not MISSING or attr.default_factory is not MISSING:
                default = _OWN_DEFAULT
            elif self._keys is not None:
                is_optional = type(None) in typing.get_args(hint)
                empty = None if is_optional else _EMPTY.get(hint, MISSING)
                default = () if typing.get_origin(hint) is tuple else empty
            parts.append((attr.name, keys.get(attr.name, attr.metadata.get("json", attr.name)), self.of(hint), default))
        return parts


def _decode_tuple(decoders: list[Convert], plain: Any, *, is_endless: bool, is_lenient: bool) -> tuple[Any, ...]:
    if type(plain) is not list:
        raise _wrong("a list", plain)
    if not is_endless and len(plain) != len(decoders):
        raise WrongValue(f"{len(decoders)} values were expected, and there are {len(plain)}")
    made = []
    for at, value in enumerate(plain):
        try:
            made.append(decoders[0 if is_endless else at](value))
        except WrongValue as wrong:
            if not (is_endless and is_lenient):
                raise wrong.within(f"[{at}]") from None
    return tuple(made)


def _decode_dict(decode_one: Convert, plain: Any) -> dict[str, Any]:
    if type(plain) is not dict:
        raise _wrong("an object", plain)
    made = {}
    for name, value in plain.items():
        try:
            made[name] = decode_one(value)
        except WrongValue as wrong:
            raise wrong.within(f"[{_short_repr(name)}]") from None
    return made


def _decode_union(by_json: dict[type, Convert], decode_other: Convert, plain: Any, *, has_unread: bool) -> Any:
    """Decode by the JSON kind; without any, all but None is the other."""
    if has_unread and type(plain) is dict and UNREAD_TAG in plain:
        return decode_other(plain[UNREAD_TAG])
    if not by_json:
        return None if plain is None else decode_other(plain)
    json_kind = dict if is_dataclass(plain) else type(plain)
    if json_kind not in by_json:
        raise _wrong(" or ".join(sorted({_name(kind) for kind in by_json})), plain)
    return by_json[json_kind](plain)


def _decode_enum(values: dict[Any, Enum], plain: Any) -> Any:
    if type(plain) not in {str, int} or plain not in values:
        raise WrongValue(f"one of {', '.join(map(str, values))} was expected, and it is {_short_repr(plain)}")
    return values[plain]


_STRICT = Decoder()


def _decode_plain(kind: type, plain: Any, *, takes_all: bool = False) -> Any:
    if type(plain) is not kind and (plain is None or not takes_all):
        raise _wrong(_name(kind), plain)
    if kind is int and plain not in INTEGERS:
        raise WrongValue("it has more than 64 bits")
    return kind(plain) if takes_all else plain


def _decode_float(plain: Any) -> float:
    if type(plain) is float or (type(plain) is int and plain in INTEGERS):
        return float(plain)
    if type(plain) is str and plain in _NOT_FINITE:
        return _NOT_FINITE[plain]
    raise _wrong("a number", plain)


def _decode_any(plain: Any) -> Any:
    """Return plain JSON unchanged. Reject nesting so deep that copying or showing it would exhaust the stack."""
    level = [plain]
    for _ in range(_MOST_LEVELS):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [value for values in inner for value in values]
        if not level:
            return plain
    raise WrongValue("it is nested too deeply")


_PLAIN: dict[Any, Convert] = {
    Any: _decode_any,
    **{kind: partial(_decode_plain, kind) for kind in (str, int, bool, type(None))},
    float: _decode_float,
}
_DECODE_TRUTH = partial(_decode_plain, bool, takes_all=True)


def _by_json_kind(hint: Any) -> dict[type, Any]:
    """Return the members of a union by their JSON kind. ``Unread`` is left out because it has a tag."""
    by_json: dict[type, Any] = {}
    for member in typing.get_args(hint):
        if member is Unread:
            continue
        if member is float:
            json_kinds: tuple[type, ...] = (float, int, str)
        elif member in _PLAIN:
            json_kinds = (member,)
        elif isinstance(member, type) and issubclass(member, Enum):
            json_kinds = tuple({type(choice.value) for choice in member})
        else:
            json_kinds = (list,) if typing.get_origin(member) is tuple else (dict,)
        for kind in json_kinds:
            if kind in by_json:
                raise TypeError(f"{hint!r}: JSON cannot distinguish {by_json[kind]!r} from {member!r}")
            by_json[kind] = member
    return by_json


@cache
def field_hints(kind: Any) -> dict[str, Any]:
    """Return the type hints of a dataclass's fields. Names imported under TYPE_CHECKING are resolved too."""
    names: dict[str, Any] = {}
    while True:
        try:
            found = typing.get_type_hints(kind, localns=names)
        except NameError as missing:
            name = str(missing.name)
            module = _modules_by_class().get(name)
            if module is None:
                raise TypeError(f"unknown class {name} in ddpdoctor.model") from missing
            # Only its module is imported, because importing all is slow.
            names[name] = getattr(importlib.import_module(f"ddpdoctor.model.{module}"), name)
        else:
            return {field.name: found[field.name] for field in fields(kind)}


@cache
def _modules_by_class() -> dict[str, str]:
    """Return the module of each class. Class names are unique in ``ddpdoctor.model``."""
    sources = {path.stem: path.read_text() for folder in ddpdoctor.model.__path__ for path in Path(folder).glob("*.py")}
    classes = re.compile(r"^class (\w+)", re.MULTILINE)
    return {name: module for module, text in sources.items() for name in classes.findall(text)}


def _wrong(expected: str, plain: Any) -> WrongValue:
    return WrongValue(f"{expected} was expected, and it is {_name(type(plain))}")


def _name(kind: type) -> str:
    return _NAMES.get(kind, kind.__name__)


def _short_repr(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= 40 else text[:37] + "..."
