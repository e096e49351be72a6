"""``ddpdoctor config``: shows which options files and environment variables set, and where each value comes from."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ddpdoctor.cli.config_files import key_of, nearest, read_config
from ddpdoctor.cli.listing import VERBS, load_verb
from ddpdoctor.cli.options import FORMAT, Argument, Option, declared_by
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.exit_status import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ddpdoctor.cli.config_files import Config, Note

DEFAULT = "default"
SECRET = {"webhook"}
"""Keys whose value is a secret: whoever has the URL can post."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the options that files and variables set, and where they are set."""

    verb: Annotated[str | None, Argument(metavar="[VERB]", help="Show only this command's options.")] = None
    show_all: Annotated[bool, Option(names=("--all",), help="Show defaults too.")] = False
    format: Annotated[Literal["text", "json"], FORMAT] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOption:
    """An option of a command, its value, and the file or variable that it comes from."""

    verb: str
    option: str
    value: str
    source: str


def run(options: Options) -> int:
    """Show the configuration. Raises ``UserError`` for a wrong file or an unknown command."""
    from ddpdoctor.cli.output import write

    config = read_config(Path.cwd(), os.environ)
    if options.verb is not None and options.verb not in VERBS:
        raise UserError(f"there is no command {options.verb}", help=nearest(options.verb, VERBS))
    names = VERBS if options.verb is None else [options.verb]
    shown = [one for name in names for one in _options_of(name, config, os.environ) if _is_shown(one, options)]
    left_out = [*config.notes, *(note for name in names for note in config.left_out(name, load_verb(name).Options))]
    draw = _draw_json if options.format == "json" else _draw_text
    write(sys.stdout, draw(shown, config, list(dict.fromkeys(left_out))))
    return ExitStatus.OK


def _is_shown(one: ShownOption, options: Options) -> bool:
    return options.show_all or one.source != DEFAULT


def _options_of(verb: str, config: Config, env: Mapping[str, str]) -> Iterator[ShownOption]:
    """Yield a command's options with the value that counts unless the command line gives another."""
    kind = load_verb(verb).Options
    set_by_file = config.settings_of(verb, kind)
    for one in declared_by(kind):
        if not isinstance(one.option, Option):
            continue
        value, source = one.default, DEFAULT
        if one.field in set_by_file:
            value, source = set_by_file[one.field].value, set_by_file[one.field].source
        if one.option.variable and env.get(one.option.variable):
            value, source = env[one.option.variable], one.option.variable
        if key_of(one) in SECRET and value:
            value = "(set, not shown)"
        yield ShownOption(verb=verb, option=one.names[0].partition("/")[0], value=_write_value(value), source=source)


def _write_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _draw_json(shown: list[ShownOption], config: Config, left_out: list[Note]) -> str:
    plain = {
        "files": [{"path": str(path), "exists": os.path.isfile(path)} for path in config.looked_for],  # noqa: PTH113
        "left_out": [
            {"path": str(note.path), "what": note.what, "reason": note.reason, "remedy": note.remedy}
            for note in left_out
        ],
        "options": [
            {"verb": one.verb, "option": one.option, "value": one.value, "source": one.source} for one in shown
        ],
        "ignored": [
            {
                "code": one.code, "reason": one.reason, "until": one.until.isoformat(),
                "expired": one.is_expired(config.today), "source": one.source,
            }
            for one in config.ignored
        ],
    }  # fmt: skip
    return json.dumps(plain, indent=2) + "\n"


def _draw_text(shown: list[ShownOption], config: Config, left_out: list[Note]) -> str:
    from ddpdoctor.report.lines import clean

    unused = {note.path for note in config.notes}
    lines = ["files, the first wins:"]
    for path in config.looked_for:
        state = "  (not used)" if path in unused else "" if os.path.isfile(path) else "  (does not exist)"  # noqa: PTH113
        lines.append(f"  {clean(str(path))}{state}")
    lines += [f"  {clean(str(note))}" for note in left_out]
    rows = [(one.verb, one.option, one.value, one.source) for one in shown]
    heads = ("command", "option", "value", "from")
    lines += ["", *(_table(heads, rows) if rows else ["No option is set by a file or a variable."])]
    if config.ignored:
        expired = {one: " (expired)" if one.is_expired(config.today) else "" for one in config.ignored}
        rows = [(one.code, f"{one.until}{expired[one]}", one.reason, one.source) for one in config.ignored]
        lines += ["", *_table(("ignored", "until", "reason", "from"), rows)]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    from ddpdoctor.report.lines import clean

    cells = [heads, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
