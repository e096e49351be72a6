"""Reads defaults of options from ``pyproject.toml`` and the user's ``config.toml``.

The command line wins over variables, variables over files, and the project's file over the user's.
"""

from __future__ import annotations

import datetime as dt
import importlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ddpdoctor.cli.options import Declared, Option, declared_by
from ddpdoctor.model.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PROJECT_FILE = "pyproject.toml"
PROJECT_TABLE = "tool.ddpdoctor"
USER_FILE = Path("ddpdoctor") / "config.toml"
MAX_BYTES = 1 << 20
"""Our choice: a longer file is not a configuration."""
CLOSENESS = 0.5
"""The least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one."""
CONFIG_VERB = "config"
"""It shows a wrong file's error itself."""
IGNORE = "ignore"
IGNORE_KEYS = ("code", "reason", "until")
IGNORE_HELP = 'Write [[{table}ignore]] with code = "DD114", reason = "why", until = 2027-01-31.'


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSetting:
    """The value that a file gives to an option: a text, an int, a bool, or a list of texts."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredCode:
    """A code whose findings are left out until a date, that day included."""

    code: str
    reason: str
    until: dt.date
    source: str

    def is_expired(self, today: dt.date) -> bool:
        """Return whether its findings count again."""
        return today > self.until


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTable:
    """The settings of one file: a mapping with a table per command, and options that several commands share."""

    path: Path
    table: dict[str, Any]
    prefix: str
    """How its tables are named in the file: "tool.ddpdoctor." or empty."""

    @property
    def source(self) -> str:
        """Return the file's name for messages."""
        return str(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The files' settings, the most important file first."""

    looked_for: tuple[Path, ...]
    tables: tuple[ConfigTable, ...]
    ignored: tuple[IgnoredCode, ...]
    today: dt.date

    def settings_of(self, verb: str, kind: type[Any]) -> dict[str, FileSetting]:
        """Return the settings for a command's options by field. Raises ``UserError`` for a wrong value."""
        options = [one for one in declared_by(kind) if isinstance(one.option, Option)]
        found: dict[str, FileSetting] = {}
        for table in reversed(self.tables):
            own = table.table.get(verb, {})
            for one in options:
                for keys, name in ((table.table, table.prefix.rstrip(".")), (own, f"{table.prefix}{verb}")):
                    if key_of(one) in keys and not (keys is table.table and key_of(one) == IGNORE):
                        value = _read_value(one, keys[key_of(one)], f"{table.source}: [{name}] {key_of(one)}")
                        found[one.field] = FileSetting(value=value, source=table.source)
        active = [one.code for one in self.ignored if not one.is_expired(self.today)]
        if active and "ignore" in {one.field for one in options}:
            given = found["ignore"].value if "ignore" in found else []
            found["ignore"] = FileSetting(value=[*given, *active], source=self.ignored[0].source)
        return found


def key_of(one: Declared) -> str:
    """Return an option's key in a file: its name without the leading dashes."""
    return one.names[0].partition("/")[0].lstrip("-")


def find_files(cwd: Path, env: Mapping[str, str]) -> tuple[Path, ...]:
    """Return where settings are looked for: the nearest ``pyproject.toml`` upwards, then the user's file."""
    # os.path, because pathlib raises for a folder that may not be entered.
    project = next((up / PROJECT_FILE for up in (cwd, *cwd.parents) if os.path.isfile(up / PROJECT_FILE)), None)  # noqa: PTH113
    home = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    user = Path(home) / USER_FILE if home else None
    return tuple(path for path in (project or cwd / PROJECT_FILE, user) if path is not None)


def read_config(cwd: Path, env: Mapping[str, str]) -> Config:
    """Read the files that exist. Raises ``UserError`` for one that cannot be read or holds an unknown key."""
    looked_for = find_files(cwd, env)
    tables = tuple(table for path in looked_for if (table := _read_table(path)) is not None)
    for table in tables:
        _check_table(table)
    return Config(
        looked_for=looked_for,
        tables=tables,
        ignored=tuple(one for table in tables for one in _read_ignored(table)),
        today=dt.date.today(),  # noqa: DTZ011 - an expiry date is meant in local time
    )


def read_declared(verb: str) -> tuple[Declared, ...]:
    """Return a command's options with the values of the files as defaults. Raises ``UserError`` for a wrong file."""
    from ddpdoctor.cli.listing import load_verb

    kind = load_verb(verb).Options
    config = read_config(_working_folder(), os.environ) if verb != CONFIG_VERB else None
    settings = config.settings_of(verb, kind) if config is not None and config.tables else {}
    if config is not None and "ignore" in kind.__slots__:
        _say_expired(config, os.environ)
    return tuple(
        _with_default(one, settings[one.field].value) if one.field in settings else one for one in declared_by(kind)
    )


def _working_folder() -> Path:
    """Return the working folder, or the root if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


def _say_expired(config: Config, env: Mapping[str, str]) -> None:
    """Say which ignored codes count again; of the ranks of a launcher, only the first says it."""
    if env.get("RANK", env.get("SLURM_PROCID", "0")) != "0":
        return
    for one in config.ignored:
        if one.is_expired(config.today):
            from ddpdoctor.cli.output import say

            say(sys.stderr, f"{one.code} was ignored until {one.until} ({one.source}); its findings count again")


def _with_default(one: Declared, value: Any) -> Declared:
    """Return an option with another default. A flag gets a second form that turns it off."""
    changed = replace(one, default=value)
    if not one.is_flag or not isinstance(one.option, Option):
        return changed
    name = one.names[0]
    negative = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name[2:]}"
    return replace(changed, option=one.option.but(names=(f"{name}/{negative}", *one.names[1:])))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that names what is spelled like ``name``, or all that there is."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, cutoff=CLOSENESS)
    return f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(names)}."


def _read_table(path: Path) -> ConfigTable | None:
    """Return a file's settings, or None if it does not exist or has none."""
    from ddpdoctor.recorder.storage.files import read_plain

    is_project = path.name == PROJECT_FILE
    if not os.path.exists(path):  # noqa: PTH110 - it may be in a folder that may not be entered
        return None
    try:
        text = read_plain(path, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}", help="Correct the file, or move it away.") from error
    if is_project and PROJECT_TABLE not in text:
        return None
    whole = _parse(path, text)
    table = whole.get("tool", {}).get("ddpdoctor") if is_project else whole
    if not table:
        return None
    prefix = f"{PROJECT_TABLE}." if is_project else ""
    if not isinstance(table, dict):
        raise UserError(f"{path}: {PROJECT_TABLE} is not a table", help=f"Write [{PROJECT_TABLE}].")
    return ConfigTable(path=path, table=table, prefix=prefix)


def _parse(path: Path, text: str) -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        parsed: dict[str, Any] = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}", help="Correct the file.") from error
    return parsed


def _check_table(table: ConfigTable) -> None:
    """Raise ``UserError`` for a key that is no command and no option."""
    from ddpdoctor.cli.listing import VERBS

    for verb in table.table.keys() & VERBS.keys():
        _check_keys(table.table[verb], _keys_of(verb), f"[{table.prefix}{verb}]", table)
    if table.table.keys() <= {*VERBS, IGNORE}:
        return
    shared = {key for verb in VERBS for key in _keys_of(verb)}
    _check_keys(table.table, {*VERBS, *shared, IGNORE}, f"[{table.prefix.rstrip('.')}]", table)


def _keys_of(verb: str) -> list[str]:
    from ddpdoctor.cli.listing import load_verb

    return [key_of(one) for one in declared_by(load_verb(verb).Options) if isinstance(one.option, Option)]


def _check_keys(keys: Any, known: Iterable[str], name: str, table: ConfigTable) -> None:
    if not isinstance(keys, dict):
        raise UserError(
            f"{table.source}: {name.strip('[]')} is not a table", help=f"Write {name} and options below it."
        )
    for key in keys:
        if key not in known:
            raise UserError(f"{table.source}: {name} has the unknown key {key}", help=nearest(key, known))


def _read_value(one: Declared, value: Any, name: str) -> Any:
    """Return a value as the command line would give it. Raises ``UserError`` if the option does not take it."""
    if one.is_flag:
        if not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}", help="Write true or false.")
        return value
    if one.is_repeatable:
        parts = value if isinstance(value, list) else [value]
        return [_read_one(one, part, name) for part in parts]
    return _read_one(one, value, name)


def _read_one(one: Declared, value: Any, name: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{name} is {value!r}, which the option does not take", help="Write a text or a number.")
    text = str(value)
    option = one.option
    choices = get_args(one.type)
    if choices and (text.upper() if isinstance(option, Option) and option.ignores_case else text) not in choices:
        raise UserError(f"{name} is {text!r}", help=f"Write one of {', '.join(map(str, choices))}.")
    if one.type is int and isinstance(option, Option) and option.parse is None:
        return _read_int(option, text, name)
    try:
        one.parse(text)
    except UserError as error:
        raise UserError(f"{name}: {error.message}", help=error.help) from error
    return text


def _read_int(option: Option, text: str, name: str) -> int:
    number = int(text) if text.lstrip("-").isdecimal() else None
    low, high = option.min, option.max
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise UserError(f"{name} is {text!r}, which the option does not take", help="See the command's --help.")
    return number


def _read_ignored(table: ConfigTable) -> tuple[IgnoredCode, ...]:
    """Return the ignored codes of a file. Raises ``UserError`` unless each has a code, a reason and a date."""
    entries = table.table.get(IGNORE, [])
    hint = IGNORE_HELP.format(table=table.prefix)
    if not isinstance(entries, list):
        raise UserError(f"{table.source}: {IGNORE} is not a list of tables", help=hint)
    return tuple(_read_ignore(entry, table, hint) for entry in entries)


def _read_ignore(entry: Any, table: ConfigTable, hint: str) -> IgnoredCode:
    name = f"{table.source}: [[{table.prefix}{IGNORE}]]"
    if not isinstance(entry, dict):
        raise UserError(f"{name} is not a list of tables", help=hint)
    for key in entry:
        if key not in IGNORE_KEYS:
            raise UserError(f"{name} has the unknown key {key}", help=nearest(key, IGNORE_KEYS))
    code, reason, until = (entry.get(key) for key in IGNORE_KEYS)
    if not (isinstance(code, str) and isinstance(reason, str) and reason.strip() and type(until) is dt.date):
        raise UserError(f"{name} needs a code, a reason and a date until which it holds", help=hint)
    from ddpdoctor.diagnose.pages import check_codes

    try:
        (known,) = check_codes((code,))
    except UserError as error:
        raise UserError(f"{name}: there is no code {code}", help=error.help) from error
    return IgnoredCode(code=known, reason=reason, until=until, source=table.source)
