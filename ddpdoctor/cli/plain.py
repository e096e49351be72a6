"""Reads a command line without Typer, because importing Typer takes up to 0.3 s.

Typer handles everything else: help, invalid values, unknown options, and settings from environment variables.
"""

from __future__ import annotations

from collections import deque
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, get_args

from ddpdoctor.cli.options import Argument, Option, build
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.cli.options import Declared

NOT_PLAIN = object()
"""Marks a value that Typer must handle."""


def read_launch(kind: type[Any], words: Iterable[str], env: Mapping[str, str], declared: Sequence[Declared]) -> Any:
    """Return the options of a command that starts a job, or None if Typer is needed. Raises ``UserError``."""
    from ddpdoctor.launch.command_line import HELP_OPTIONS, split_command

    own = {name: not one.is_flag for one in declared for names in one.names for name in names.split("/")}
    split = split_command(words, own)
    return None if HELP_OPTIONS & set(split.own) else read_plain(kind, split.own, env, declared, split=split)


def read_plain(
    kind: type[Any], words: Iterable[str], env: Mapping[str, str], declared: Sequence[Declared], **others: Any
) -> Any:
    """Return a command's options, or None if Typer is needed.

    ``declared`` are its options with their defaults. ``others`` are fields that do not come from the command line.
    """
    if any(isinstance(one.option, Option) and env.get(one.option.variable or "") for one in declared):
        return None
    texts = _read_texts(deque(words), declared)
    if texts is None:
        return None
    try:
        values = {one.field: _convert(one, texts.get(one.field, one.default)) for one in declared}
    except UserError:
        return None
    return None if NOT_PLAIN in values.values() else build(kind, values | others)


def _read_texts(words: deque[str], declared: Iterable[Declared]) -> dict[str, Any] | None:
    """Return the text given for each field, or None if an option is unknown or there are too many words."""
    options, arguments = _by_name(declared), deque(one for one in declared if isinstance(one.option, Argument))
    texts: dict[str, Any] = {}
    while words:
        name, attached, text = words.popleft().partition("=")
        if not name.startswith("-"):
            if not arguments:
                return None
            one, text = arguments[0], name + attached + text
            if not one.is_repeatable:
                arguments.popleft()
        elif name in options:
            one, value = options[name]
            if not one.is_flag and not attached and not words:
                return None
            text = value if one.is_flag else text if attached else words.popleft()
            if one.is_flag and attached:
                return None
        else:
            return None
        texts[one.field] = [*texts.get(one.field, []), text] if one.is_repeatable else text
    return texts


def _by_name(declared: Iterable[Declared]) -> dict[str, tuple[Declared, Any]]:
    """Return each option by each of its names, with its value if it is a flag."""
    return {
        name: (one, not number)
        for one in declared
        if isinstance(one.option, Option)
        for names in one.names
        for number, name in enumerate(names.split("/"))
    }


def _convert(one: Declared, text: Any) -> Any:
    """Convert a text to a value, or to ``NOT_PLAIN`` if Typer would reject it."""
    if isinstance(text, list):
        values = [_convert(one, part) for part in text]
        return NOT_PLAIN if NOT_PLAIN in values else values
    if not isinstance(text, str):
        return NOT_PLAIN if text is MISSING else text
    if isinstance(one.option, Argument) or one.option.parse is not None:
        return one.parse(text) if text else NOT_PLAIN
    text = text.upper() if one.option.ignores_case else text
    choices = get_args(one.type)
    if one.type is int:
        return _convert_int(one.option, text)
    return one.parse(text) if text and text in (choices or [text]) else NOT_PLAIN


def _convert_int(option: Option, text: str) -> Any:
    if not (text.isascii() and text.isdecimal()):
        return NOT_PLAIN
    number = int(text)
    is_within = (option.min is None or option.min <= number) and (option.max is None or number <= option.max)
    return number if is_within else NOT_PLAIN
