"""``ddpdoctor config``: shows which options files and environment variables set, and where each value comes from."""

from __future__ import annotations

import contextlib
import datetime as dt
import grp
import importlib
import json
import os
import pwd
import shlex
import stat
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from ddpdoctor.cli.options import FORMAT, VERBS, Argument, Declared, Option, declared_by, load_verb
from ddpdoctor.model.errors import ExitStatus, UserError
from ddpdoctor.report.lines import clean

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

PROJECT_FILE = "pyproject.toml"
PROJECT_TABLE = "tool.ddpdoctor"
USER_FILE = Path("ddpdoctor") / "config.toml"
MAX_BYTES = 1 << 20  # our choice: a longer file is not a configuration
CLOSENESS = 0.5  # the least similarity, on difflib's scale from 0 to 1, at which a name is suggested for an unknown one
# Keys that run, send or write something, or say where to. They come from the user only: a project's file is shared.
ACTING = frozenset([
    "on-finding", "model", "dataset", "batch", "step", "python", "open",  # runs something
    "webhook", "otlp", "log-findings", "slurm", "kubectl", "namespace", "container", "master-addr", "rdzv-endpoint",
    "report-dir", "output", "html", "plot", "metrics-file", "exclude-file", "folder", "dump",  # writes a file
    "yes", "with-source",  # gives the user's consent
])  # fmt: skip
CONFIG_VERB = "config"  # it shows a wrong file's error itself
IGNORE = "ignore"
IGNORE_KEYS = ("code", "reason", "until")
IGNORE_HELP = 'Write [[{table}ignore]] with code = "DD114", reason = "why", until = 2027-01-31.'
DEFAULT = "default"
SECRET = {"webhook"}  # keys whose value is a secret: whoever has the URL can post
FileSetting = tuple[Any, str]  # the value that a file gives to an option, and the name of the file


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
    prefix: str  # how its tables are named in a project's file: "tool.ddpdoctor."; empty in the user's


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What is not used from a file, why, and what the user can do."""

    path: Path
    what: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}. {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The files' settings, the most important file first."""

    looked_for: tuple[Path, ...]
    user_file: Path | None
    notes: tuple[Note, ...]  # the files that are not used
    tables: tuple[ConfigTable, ...]
    ignored: tuple[IgnoredCode, ...]
    today: dt.date

    def left_out(self, verb: str, kind: type[Any]) -> tuple[Note, ...]:
        """Return a note for each option of a command that a project's file must not set."""
        keys = {key_of(option) for option in declared_by(kind) if isinstance(option.option, Option)} & ACTING
        return tuple(
            Note(
                path=table.path, what=f"{key} in [{name}] of {table.path} is not used",
                reason="a project's file cannot set what runs, sends or writes something",
                remedy=f"Give --{key}, or put it into {self.user_file or 'the file of ddpdoctor config'}.",
            )
            for table in self.tables if table.prefix
            for found, name in ((table.table, PROJECT_TABLE), (table.table.get(verb, {}), f"{PROJECT_TABLE}.{verb}"))
            for key in sorted(keys & found.keys())
        )  # fmt: skip

    def settings_of(self, verb: str, kind: type[Any]) -> dict[str, FileSetting]:
        """Return the settings for a command's options by field. Raises ``UserError`` for a wrong value."""
        options = [option for option in declared_by(kind) if isinstance(option.option, Option)]
        found: dict[str, FileSetting] = {}
        for table in reversed(self.tables):
            own = table.table.get(verb, {})
            for option in options:
                if table.prefix and key_of(option) in ACTING:
                    continue
                for keys, name in ((table.table, table.prefix.rstrip(".")), (own, f"{table.prefix}{verb}")):
                    if key_of(option) in keys and not (keys is table.table and key_of(option) == IGNORE):
                        value = _read_value(option, keys[key_of(option)], f"{table.path}: [{name}] {key_of(option)}")
                        found[option.field] = (value, str(table.path))
        active = [ignored.code for ignored in self.ignored if not ignored.is_expired(self.today)]
        if active and "ignore" in {option.field for option in options}:
            given, _ = found.get("ignore", ([], ""))
            found["ignore"] = ([*given, *active], self.ignored[0].source)
        return found


def key_of(option: Declared) -> str:
    """Return an option's key in a file: its name without the leading dashes."""
    return option.names[0].partition("/")[0].lstrip("-")


def read_config(cwd: Path, env: Mapping[str, str]) -> Config:
    """Read a project's file, then the user's. Raises ``UserError`` for a wrong one that no other user can write."""
    # os.path, because pathlib raises for a folder that may not be entered.
    project = next((up / PROJECT_FILE for up in (cwd, *cwd.parents) if os.path.isfile(up / PROJECT_FILE)), None)  # noqa: PTH113
    # A relative path, which the XDG base directory specification says to ignore, would lead into the project.
    homes = (env.get("XDG_CONFIG_HOME", ""), env["HOME"] + "/.config" if env.get("HOME") else "")
    user = next((Path(home) / USER_FILE for home in homes if os.path.isabs(home)), None)  # noqa: PTH117 - "" is none
    looked_for = tuple(path for path in (project or cwd / PROJECT_FILE, user) if path is not None)
    tables: list[ConfigTable] = []
    notes: list[Note] = []
    for path in looked_for:
        if not os.path.exists(path):  # noqa: PTH110 - it may be in a folder that may not be entered
            continue
        distrust = find_distrust(path, with_ancestors=path != user)
        if distrust is None:
            table = _read_table(path)
            tables += [] if table is None else [table]
            continue
        from ddpdoctor.recorder.storage.files import read_plain

        try:  # most projects' files have no settings at all
            content = b"" if path.name != PROJECT_FILE else read_plain(os.path.realpath(path), MAX_BYTES)
        except OSError:
            continue
        if path.name != PROJECT_FILE or PROJECT_TABLE.encode() in content:
            reason, remedy = distrust
            elsewhere = f"copy the settings into {user}" if user not in {None, path} else "give the options themselves"
            notes.append(
                Note(
                    path=path, what=f"the settings in {path} are not used", reason=reason,
                    remedy=f"{remedy}, or {elsewhere}." if remedy else f"If you trust them, {elsewhere}.",
                )
            )  # fmt: skip
    for table in tables:  # each key must be a verb or an option
        for verb in table.table.keys() & VERBS.keys():
            _check_keys(table.table[verb], _keys_of(verb), f"[{table.prefix}{verb}]", table)
        if not table.table.keys() <= {*VERBS, IGNORE}:
            shared = {key for verb in VERBS for key in _keys_of(verb)}
            name = table.prefix and f"[{table.prefix.rstrip('.')}]"
            _check_keys(table.table, {*VERBS, *shared, IGNORE}, name, table)
    ignored = tuple(entry for table in tables for entry in _read_ignored(table))
    today = dt.date.today()  # noqa: DTZ011 - an expiry date is meant in local time
    return Config(
        looked_for=looked_for, user_file=user, notes=tuple(notes), tables=tuple(tables), ignored=ignored, today=today
    )


def find_distrust(path: Path, *, with_ancestors: bool) -> tuple[str, str] | None:
    """Return why others may have written a file, and what would change that, or None if no other user can have.

    The file and its folder must belong to this user or root, and no other user may write them. ``with_ancestors``: no
    other user may move a folder above, or a link on the way. A sticky folder such as /tmp is fine there.
    """
    real = Path(os.path.realpath(path))
    above = [*path.absolute().parents, *real.parents] if with_ancestors else []
    for place in dict.fromkeys([path, real, path.absolute().parent, real.parent, *above]):
        try:
            seen = place.lstat()
        except OSError as error:
            return f"{place} cannot be checked ({error.strerror})", ""
        name = "it" if place == path else "the file that it links to" if place == real else f"the folder {place}"
        is_own = place in {path, real, path.absolute().parent, real.parent}
        # A host's folders have owners that a container does not know, and no user of the container can move them.
        is_unmapped = False
        with contextlib.suppress(OSError, ValueError):  # one user ID stands for all that this namespace does not know
            mapped = Path("/proc/self/uid_map").read_text().split()
            other = int(Path("/proc/sys/kernel/overflowuid").read_text())
            is_unmapped = seen.st_uid == other and mapped != ["0", "0", "4294967295"]
        if is_own if is_unmapped else seen.st_uid not in {os.geteuid(), 0}:
            owner = "a user that this container does not know" if is_unmapped else _user_name(seen.st_uid)
            by_sudo = os.environ.get("SUDO_UID") == str(seen.st_uid)
            reason = f"{name} belongs to {owner}, and ddpdoctor runs as {_user_name(os.geteuid())}"
            return reason, "Run ddpdoctor without sudo" if by_sudo else ""
        others = seen.st_mode & stat.S_IWOTH
        if seen.st_mode & stat.S_IWGRP and not _is_private(place, seen):
            others |= stat.S_IWGRP
        if others and not stat.S_ISLNK(seen.st_mode) and (is_own or not seen.st_mode & stat.S_ISVTX):
            can_change = seen.st_uid == os.geteuid() and not seen.st_mode & stat.S_ISVTX
            return f"other users may write {name}", f"Run `chmod go-w {shlex.quote(str(place))}`" if can_change else ""
    return None


def _is_private(place: Path, seen: os.stat_result) -> bool:
    """Return whether a group is root's or this user's own, which many systems make for each user.

    With an access control list, the bits of the group are what any user in the list may do at most.
    """
    with contextlib.suppress(OSError):  # most have none
        return not os.getxattr(place, "system.posix_acl_access", follow_symlinks=False)
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(seen.st_gid)
        if group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and {*group.gr_mem} <= {user.pw_name}:
            return True
    return seen.st_gid == 0


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def read_declared(verb: str, kind: type[Any], *, says: bool = True) -> tuple[Declared, ...]:
    """Return a verb's options with defaults from the files; ``says``: print what is not used. Raises ``UserError``."""
    if verb == CONFIG_VERB:
        return declared_by(kind)
    try:
        cwd = Path.cwd()
    except FileNotFoundError:  # it was removed
        cwd = Path("/")
    config = read_config(cwd, os.environ)
    settings = config.settings_of(verb, kind) if config.tables else {}
    left_out = config.left_out(verb, kind) if config.tables else ()
    notes = [str(note) for note in (*config.notes, *left_out)]
    if hasattr(kind, "ignore"):
        for entry in config.ignored:
            if entry.is_expired(config.today):
                what = f"{entry.code} was ignored until {entry.until} ({entry.source})"
                notes.append(f"{what}; its findings count again")
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    if says and notes and rank == "0":  # of all ranks, the first says it
        from ddpdoctor.cli.output import say

        for note in notes:
            say(sys.stderr, clean(note))
    declared = {option.field: option for option in declared_by(kind)}
    for field, (value, _) in settings.items():
        option = declared[field]
        if option.type is bool:  # it gets a second form that turns it off
            name = option.names[0]
            negative = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name[2:]}"
            option = replace(option, names=(f"{name}/{negative}", *option.names[1:]))
        declared[field] = replace(option, default=value)
    return tuple(declared.values())


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a hint with names spelled like ``name``, else ``otherwise``, or all names."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, cutoff=CLOSENESS)
    return f"Did you mean {', '.join(near)}?" if near else otherwise or f"Known: {', '.join(names)}."


def _read_table(path: Path) -> ConfigTable | None:
    from ddpdoctor.recorder.storage.files import read_plain

    is_project = path.name == PROJECT_FILE
    try:
        text = read_plain(os.path.realpath(path), MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"{path} cannot be read: {reason}", help="Fix the file, or move it away.") from error
    if is_project and PROJECT_TABLE not in text:
        return None
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        whole = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}", help="Fix the file.") from error
    table = whole.get("tool", {}).get("ddpdoctor") if is_project else whole
    if not table:
        return None
    prefix = f"{PROJECT_TABLE}." if is_project else ""
    if not isinstance(table, dict):
        raise UserError(f"{path}: {PROJECT_TABLE} is not a table", help=f"Write [{PROJECT_TABLE}].")
    return ConfigTable(path=path, table=table, prefix=prefix)


def _keys_of(verb: str) -> list[str]:
    return [key_of(option) for option in declared_by(load_verb(verb).Options) if isinstance(option.option, Option)]


def _check_keys(keys: Any, known: Iterable[str], name: str, table: ConfigTable) -> None:
    if not isinstance(keys, dict):
        what = f"{table.path}: {name.strip('[]')}"
        raise UserError(f"{what} is not a table", help=f"Write {name} and options below it.")
    for key in keys:
        if key not in known:
            raise UserError(f"{table.path}{name and f': {name}'} has the unknown key {key}", help=nearest(key, known))


def _read_value(option: Declared, value: Any, name: str) -> Any:
    """Return a value as the command line would give it. Raises ``UserError`` if the option does not take it."""
    if option.type is bool:
        if not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}", help="Write true or false.")
        return value
    parts = value if option.is_repeatable and isinstance(value, list) else [value]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, str | int | float):
            raise UserError(f"{name} is {part!r}, which the option does not take", help="Write a text or a number.")
        option.parse(part, name)
    return [*map(str, parts)] if option.is_repeatable else str(value)


def _read_ignored(table: ConfigTable) -> tuple[IgnoredCode, ...]:
    """Return the ignored codes of a file. Raises ``UserError`` unless each has a code, a reason and a date."""
    entries = table.table.get(IGNORE, [])
    hint = IGNORE_HELP.format(table=table.prefix)
    if not isinstance(entries, list):
        raise UserError(f"{table.path}: {IGNORE} is not a list of tables", help=hint)
    name = f"{table.path}: [[{table.prefix}{IGNORE}]]"
    found = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise UserError(f"{name} is not a list of tables", help=hint)
        for key in entry:
            if key not in IGNORE_KEYS:
                raise UserError(f"{name} has the unknown key {key}", help=nearest(key, IGNORE_KEYS))
        code, reason, until = (entry.get(key) for key in IGNORE_KEYS)
        if not (isinstance(code, str) and isinstance(reason, str) and reason.strip() and type(until) is dt.date):
            raise UserError(f"{name} needs a code, a reason and a date until which it holds", help=hint)
        from ddpdoctor.diagnose.files import check_codes

        try:
            (known,) = check_codes((code,))
        except UserError as error:
            raise UserError(f"{name}: unknown code {code}", help=error.help) from error
        found.append(IgnoredCode(code=known, reason=reason, until=until, source=str(table.path)))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Show the options that files and variables set, and where they are set."""

    verb: Annotated[str | None, Argument(metavar="[VERB]", help="Show only this command's options.")] = None
    show_all: Annotated[bool, Option(names=("--all",), help="Show defaults too.")] = False
    format: Annotated[Literal["text", "json"], FORMAT] = "text"


class ShownOption(NamedTuple):
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
        raise UserError(f"unknown command: {options.verb}", help=nearest(options.verb, VERBS))
    names = VERBS if options.verb is None else [options.verb]
    found = [option for name in names for option in _options_of(name, config, os.environ)]
    shown = [option for option in found if options.show_all or option.source != DEFAULT]
    left_out = [*config.notes, *(note for name in names for note in config.left_out(name, load_verb(name).Options))]
    draw = _draw_json if options.format == "json" else _draw_text
    write(sys.stdout, draw(shown, config, list(dict.fromkeys(left_out))))
    return ExitStatus.OK


def _options_of(verb: str, config: Config, env: Mapping[str, str]) -> Iterator[ShownOption]:
    """Yield a command's options with the value that counts unless the command line gives another."""
    kind = load_verb(verb).Options
    set_by_file = config.settings_of(verb, kind)
    for option in declared_by(kind):
        if not isinstance(option.option, Option):
            continue
        value, source = option.default, DEFAULT
        if option.field in set_by_file:
            value, source = set_by_file[option.field]
        if option.option.variable and env.get(option.option.variable):
            value, source = env[option.option.variable], option.option.variable
        if key_of(option) in SECRET and value:
            value = "(set, not shown)"
        if isinstance(value, bool):
            value = "on" if value else "off"
        elif isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        shown = "" if value is None else str(value)
        yield ShownOption(verb, option.names[0].partition("/")[0], shown, source)


def _draw_json(shown: list[ShownOption], config: Config, left_out: list[Note]) -> str:
    plain = {
        "files": [{"path": str(path), "exists": os.path.isfile(path)} for path in config.looked_for],  # noqa: PTH113
        "left_out": [{**asdict(note), "path": str(note.path)} for note in left_out],
        "options": [option._asdict() for option in shown],
        "ignored": [
            {"code": entry.code, "reason": entry.reason, "until": entry.until.isoformat(), "source": entry.source}
            | {"expired": entry.is_expired(config.today)}
            for entry in config.ignored
        ],
    }
    return json.dumps(plain, indent=2) + "\n"


def _draw_text(shown: list[ShownOption], config: Config, left_out: list[Note]) -> str:
    unused = {note.path for note in config.notes}
    lines = ["files, the first wins:"]
    for path in config.looked_for:
        state = "  (not used)" if path in unused else "" if os.path.isfile(path) else "  (does not exist)"  # noqa: PTH113
        lines.append(f"  {clean(str(path))}{state}")
    lines += [f"  {clean(str(note))}" for note in left_out]
    heads = ("command", "option", "value", "from")
    lines += ["", *(_text_table(heads, shown) if shown else ["No option is set by a file or a variable."])]
    if config.ignored:
        expired = {entry: " (expired)" if entry.is_expired(config.today) else "" for entry in config.ignored}
        rows = [(entry.code, f"{entry.until}{expired[entry]}", entry.reason, entry.source) for entry in config.ignored]
        lines += ["", *_text_table(("ignored", "until", "reason", "from"), rows)]
    return "\n".join(lines) + "\n"


def _text_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [heads, *([clean(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
