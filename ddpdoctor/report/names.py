"""Formats ranks, hosts and places in code: "ranks 0-6, 9", "node[1-3, 7]"."""

from __future__ import annotations

import re
from datetime import datetime
from typing import TYPE_CHECKING

from ddpdoctor.model.words import first_names, format_numbers, grouped

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.findings import Finding, Place

MAX_HOSTS = 8
"""Longer lists are cut. The report file has all hosts."""


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
    written = [_write_family(part, families[part]) if part in families else part for part in parts]
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
    """Return how sure a finding is: ``confidence low``."""
    return f"confidence {finding.confidence.value}"


def blamed_by(finding: Finding, *, hosts: bool = True) -> str:
    """Return the ranks and hosts that a finding blames: ``rank 3 on node1``. Empty if it blames none."""
    where = f"on {format_hosts(finding.hosts)}" if hosts and finding.hosts else ""
    return " ".join(part for part in (format_ranks(finding.ranks), where) if part)


def path_from(file: str, cwd: Path | None) -> str:
    """Return a path relative to ``cwd`` if it is below it, else the path itself."""
    return file if cwd is None else file.removeprefix(f"{cwd}/")


def _write_family(name: str, numbers: list[int]) -> str:
    return f"{name}{numbers[0]}" if len(numbers) == 1 else f"{name}[{format_numbers(numbers)}]"
