"""Prepares lines of text: names ranks, hosts and places; escapes what was collected, shortens paths, wraps."""

from __future__ import annotations

import math
import re
import textwrap
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.words import first_names, format_numbers, grouped

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.findings import Finding, Place

MIN_TEXT_WIDTH = 20  # below this width, wrapped text is worse than lines that are too long
# A command of GitHub Actions, which its runner obeys at the beginning of any printed line. A text is wrapped later, so
# it may come to stand there from behind any blank. https://github.com/actions/runner, ActionCommand.cs.
_GITHUB = re.compile(
    r"(?:^|(?<=\s))::(?=(?:error|warning|notice|debug|group|endgroup|add-mask|add-path|set-env|set-output|save-state|echo"
    r"|stop-commands|add-matcher|remove-matcher)\b)",
    re.IGNORECASE,
)
# The same for Azure Pipelines, TeamCity and older forms of GitHub's, which are obeyed anywhere in a line.
_AZURE = re.compile(r"##(?=(?:vso|teamcity)?\[)", re.IGNORECASE)
MAX_HOSTS = 8  # Longer lists are cut. The report file has all hosts.


def escape(text: str) -> str:
    """Escape all that cannot be printed but line breaks."""
    hidden = {char for char in text if not char.isprintable()} - {"\n"}
    return text.translate({ord(char): char.encode("unicode_escape", "backslashreplace").decode() for char in hidden})


def clean(text: str, cwd: Path | None = None) -> str:
    """Escape what controls a terminal or a CI runner, and make paths below ``cwd`` relative. Line breaks are kept."""
    shown = escape(text.replace("\t", "    "))
    if cwd is not None and cwd.parent != cwd:  # a path that only contains it is not changed
        shown = re.sub(rf"(?<![\w./~-]){re.escape(str(cwd))}/(?=[^\s/])", "", shown)
    if "::" in shown:
        shown = _GITHUB.sub(r"\\x3a:", shown)
    return _AZURE.sub(r"\\x23#", shown)


def cleaned(data: Any, cwd: Path | None = None) -> Any:
    """Clean all texts in plain data. A number that JSON does not know becomes None."""
    match data:
        case str():
            return clean(data, cwd)
        case float():
            return data if math.isfinite(data) else None
        case dict():
            return {name: cleaned(value, cwd) for name, value in data.items()}
        case list() | tuple():
            return [cleaned(value, cwd) for value in data]
        case _:
            return data


def printable(text: str) -> str:
    """Escape control and bidi characters, lone surrogates, NUL, and commands of a CI runner in a whole document.

    Collected data is untrusted. This is the last step of every format except JSON, which is ASCII.
    """
    return _AZURE.sub(r"\\x23#", escape(text))


def wrap(text: str, width: int | None, *, first: str = "", rest: str | None = None) -> list[str]:
    """Wrap between words, unless ``width`` is None. A word that is too long, such as a path, stays whole."""
    lines: list[str] = []
    hanging = " " * len(first) if rest is None else rest
    for part in text.splitlines() or [""]:
        start = hanging if lines else first
        if width is None or width - len(hanging) < MIN_TEXT_WIDTH:
            lines.append((start + part).rstrip())
        else:
            lines += textwrap.wrap(
                part,
                width,
                initial_indent=start,
                subsequent_indent=hanging,
                break_long_words=False,
                break_on_hyphens=False,
            ) or [start.rstrip()]
    return lines


def format_ranks(ranks: Iterable[int]) -> str:
    """Write ``rank 4`` or ``ranks 0-6, 9``. Empty for no rank."""
    known = set(ranks)
    return f"rank{'s' if len(known) > 1 else ''} {format_numbers(known)}" if known else ""


def format_hosts(hosts: Iterable[str]) -> str:
    """Write hosts in order and combine their numbers: ``node[1-3, 7], login``. Zero-padded numbers are not combined."""
    families: dict[str, list[int]] = {}
    parts: list[str] = []
    for host in dict.fromkeys(hosts):
        match = re.fullmatch(r"(.*?[^\d])(0|[1-9]\d*)", host)
        if match is None:
            parts.append(host)
            continue
        if match[1] not in families:
            parts.append(match[1])
        families.setdefault(match[1], []).append(int(match[2]))
    written = []
    for part in parts:
        numbers = families.get(part, [])
        written.append(f"{part}[{format_numbers(numbers)}]" if len(numbers) > 1 else part + "".join(map(str, numbers)))
    return first_names(written, MAX_HOSTS)


def format_time(stamp: str) -> str:
    """Write a time of a report to the second: "2026-01-02 03:04:05 UTC"."""
    try:
        time = datetime.fromisoformat(stamp.replace("Z", "+00:00"))
    except ValueError:  # a damaged or foreign file
        return stamp
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"


def format_place(place: Place) -> str:
    """Write a line of code: ``train.py:61 in main``."""
    function = f" in {place.function}" if place.function else ""
    return f"{place.file}:{place.line}{function}"


def merge_places(places: Iterable[Place]) -> tuple[str, ...]:
    """Write each line of code once: ``ranks 0, 2: train.py:61 in main``."""
    ranks = grouped((format_place(place), place.rank) for place in places)
    return tuple(f"{format_ranks(at)}: {line}" for line, at in ranks.items())


def title_of(finding: Finding, *, hosts: bool = True) -> str:
    """Return a finding's code and kind, and the ranks and hosts that it blames: ``DD601 stuck, rank 3 on node1``."""
    blamed = blamed_by(finding, hosts=hosts)
    return ", ".join(part for part in (f"{finding.code} {finding.kind}", blamed) if part)


def sureness_of(finding: Finding) -> str:
    return f"confidence {finding.confidence.value}"


def blamed_by(finding: Finding, *, hosts: bool = True) -> str:
    """Return the ranks and hosts that a finding blames: ``rank 3 on node1``. Empty if it blames none."""
    where = f"on {format_hosts(finding.hosts)}" if hosts and finding.hosts else ""
    return " ".join(part for part in (format_ranks(finding.ranks), where) if part)


def path_from(file: str, cwd: Path | None) -> str:
    return file if cwd is None else file.removeprefix(f"{cwd}/")
