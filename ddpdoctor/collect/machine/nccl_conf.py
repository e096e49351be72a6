"""Reads the files from which NCCL takes variables in addition to the environment."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.node import ConfFile
from ddpdoctor.model.variables import hide_login, is_listed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.collect.node import ReadingPlan
    from ddpdoctor.collect.system import System

SYSTEM_FILE = "/etc/nccl.conf"
USER_FILE = ".nccl.conf"
FILE_VARIABLE = "NCCL_CONF_FILE"
FIRST_BY_HOME = "2.30.3"
LAST_BY_DATABASE = "2.29.7"
"""Up to this release, NCCL takes ~ from the password database; from the one above, it takes ~ from HOME. We saw this
by running the releases under strace."""
LONGEST = 1023
"""How many bytes of a name or value NCCL keeps (src/misc/param.cc, setEnvFile)."""
MOST_BYTES = 1 << 20
"""Our choice: a larger file is not a settings file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a file may be; a file that the user named (``wanted``) is reported even if it is missing."""

    path: str
    wanted: bool = False
    since: str = ""
    until: str = ""


@dataclass(slots=True)
class _Content:
    """The settings in a file, and its bad lines."""

    values: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    bad: list[int] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)


def read_conf_files(system: System, plan: ReadingPlan) -> tuple[ConfFile, ...]:  # noqa: ARG001 - all collectors get both
    """Read NCCL's files as NCCL does, in order of precedence.

    NCCL reads ``$NCCL_CONF_FILE``, or else ``~/.nccl.conf``, and then ``/etc/nccl.conf``, and sets only variables that
    are not set yet (``initEnvFunc`` and ``setEnvFile`` in src/misc/param.cc). So the environment wins over the user's
    file, which wins over the machine's. If HOME and the password database differ, we read both homes, because NCCL's
    version decides which counts.
    """
    found = [file for place in _places(system) if (file := _read_file(system, place)) is not None]
    users = {name for file in found if file.path != SYSTEM_FILE for name in file.variables}
    return tuple(_hide(file, users) if file.path == SYSTEM_FILE else file for file in found)


def _hide(file: ConfFile, names: set[str]) -> ConfFile:
    return replace(file, hidden_by_file=tuple(name for name in file.variables if name in names))


def _places(system: System) -> Iterator[_Place]:
    chosen = system.env.get(FILE_VARIABLE, "")
    if chosen:
        yield _Place(path=chosen, wanted=True)
    else:
        yield from _homes(system)
    if chosen != SYSTEM_FILE:
        yield _Place(path=SYSTEM_FILE)


def _homes(system: System) -> Iterator[_Place]:
    try:
        database = posixpath.normpath(system.calls.home())
    except OSError:
        database = ""
    home = system.env.get("HOME", "") and posixpath.normpath(system.env["HOME"])
    differ = bool(home and database and home != database)
    if home:
        yield _Place(path=posixpath.join(home, USER_FILE), since=FIRST_BY_HOME if home != database else "")
    if database and (differ or not home):
        yield _Place(path=posixpath.join(database, USER_FILE), until=LAST_BY_DATABASE if differ else "")


def _read_file(system: System, place: _Place) -> ConfFile | None:
    path = system.path(place.path) if place.path.startswith("/") else place.path
    empty = ConfFile(
        path=place.path, variables={}, hidden_by_env=(), hidden_by_file=(), bad_lines=(), since=place.since,
        until=place.until,
    )  # fmt: skip
    try:
        with open(path, "rb") as stream:  # noqa: PTH123 - NCCL also opens relative names, from the working folder
            text = stream.read(MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return replace(empty, unread="there is no such file") if place.wanted else None
    except OSError as error:
        return replace(empty, unread=(error.strerror or "it cannot be read").lower())
    content = _parse(text)
    return replace(
        empty,
        variables={name: hide_login(value) if is_listed(name) else "" for name, value in content.values.items()},
        hidden_by_env=tuple(name for name in content.values if name in system.env),
        bad_lines=tuple(content.bad),
        lines=content.lines,
        repeated_lines=tuple(content.repeated),
    )


def _parse(text: str) -> _Content:
    """Parse lines as NCCL does: "#" starts a comment only in the first column, and white space is not stripped."""
    content = _Content()
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or not name or name != "".join(name.split()):
            content.bad.append(number)
        elif name in content.values:
            content.repeated.append(number)
        else:
            content.values[name] = value[:LONGEST]
            content.lines[name] = number
    return content
