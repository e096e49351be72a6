"""Typed access to parsed JSON: each value is of the kind that was asked for, or the error names its place."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

Choice = TypeVar("Choice", bound=Enum)
Kind = TypeVar("Kind")
_MISSING = object()


class FormatError(Exception):
    """A value is missing, or of another kind than the format says. The text names the place."""


class Fields:
    """The fields of one JSON object; ``path`` says where in the document it stands, for errors."""

    def __init__(self, value: object, path: str) -> None:
        """Take any parsed JSON value; raises ``FormatError`` where it is not an object."""
        self.values: Mapping[str, Any] = _expect(value, dict, path)
        self.path = path

    def text(self, name: str) -> str:
        """Return a string."""
        return _expect(self._get(name), str, self._path(name))

    def text_or(self, name: str, default: str = "") -> str:
        """Return a string, or the default where an older version did not write the field."""
        return self.text(name) if name in self.values else default

    def number(self, name: str) -> int:
        """Return a whole number; true and false are none."""
        return _whole(self._get(name), self._path(name))

    def optional_text(self, name: str) -> str | None:
        """Return a string, or None for null."""
        return None if self._get(name) is None else self.text(name)

    def optional_number(self, name: str) -> int | None:
        """Return a whole number, or None for null."""
        return None if self._get(name) is None else self.number(name)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        return tuple(_expect(item, str, path) for item, path in self._items(name))

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        return tuple(_whole(item, path) for item, path in self._items(name))

    def each(self, name: str) -> tuple[Fields, ...]:
        """Return a list of objects."""
        return tuple(Fields(item, path) for item, path in self._items(name))

    def required(self, name: str) -> Fields:
        """Return an object."""
        return Fields(self._get(name), self._path(name))

    def optional(self, name: str) -> Fields | None:
        """Return an object, or None for null."""
        return None if self._get(name) is None else self.required(name)

    def one_of(self, name: str, choices: type[Choice]) -> Choice:
        """Return the member of an enumeration that has this text as its value."""
        text = self.text(name)
        for choice in choices:
            if choice.value == text:
                return choice
        known = ", ".join(str(choice.value) for choice in choices)
        raise FormatError(f"{self._path(name)} is {text!r}, which is none of {known}")

    def _get(self, name: str) -> object:
        value = self.values.get(name, _MISSING)
        if value is _MISSING:
            raise FormatError(f"{self._path(name)} is missing")
        return value

    def _items(self, name: str) -> list[tuple[object, str]]:
        items = _expect(self._get(name), list, self._path(name))
        return [(item, f"{self._path(name)}[{index}]") for index, item in enumerate(items)]

    def _path(self, name: str) -> str:
        return f"{self.path}.{name}"


def _whole(value: object, path: str) -> int:
    number = _expect(value, int, path)
    if not -(2**63) <= number < 2**63:
        raise FormatError(f"{path} has more than 64 bits")
    return number


def _expect(value: object, kind: type[Kind], path: str) -> Kind:
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise FormatError(f"{path} is {type(value).__name__}, not {kind.__name__}")
