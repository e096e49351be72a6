"""Reads a plain command line of ``wrap`` without Typer, whose import would keep the ranks waiting for 0.15 s.

Whatever is not plain (help, a value that is refused, a setting from a variable) is left to Typer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from ddpdoctor.cli.options import Option, build, declared_by
from ddpdoctor.cli.wrap import Options
from ddpdoctor.launch.command.command_line import HELP_OPTIONS, split_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.cli.options import Declared


def read_plain(arguments: list[str], env: Mapping[str, str]) -> Options | None:
    """Take the arguments after ``wrap`` apart; None where Typer is needed. Raises ``UserError``."""
    declared = {one.names[0]: one for one in declared_by(Options)}
    if any(isinstance(one.option, Option) and env.get(one.option.variable or "") for one in declared.values()):
        return None
    split = split_command(arguments, {name: not one.is_flag for name, one in declared.items()})
    texts = None if HELP_OPTIONS & set(split.own) else _read_texts(split.own, declared)
    return None if texts is None else build(Options, _parse(texts, declared.values()) | {"split": split})


def _read_texts(words: Iterable[str], declared: Mapping[str, Declared]) -> dict[str, Any] | None:
    """Return what was given for each field; None where a value is not among its choices, or is empty."""
    texts: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, attached, text = word.partition("=")
        one = declared[name]
        if one.is_flag:
            texts[one.field] = True
            continue
        text = text if attached else next(rest, "")
        text = text.upper() if isinstance(one.option, Option) and one.option.ignores_case else text
        if not text or text not in (get_args(one.type) or [text]):
            return None
        texts[one.field] = [*texts.get(one.field, []), text] if one.is_repeatable else text
    return texts


def _parse(texts: Mapping[str, Any], declared: Iterable[Declared]) -> dict[str, Any]:
    values = {one.field: texts.get(one.field, one.default) for one in declared}
    return values | {one.field: one.parse(values[one.field]) for one in declared if isinstance(values[one.field], str)}
