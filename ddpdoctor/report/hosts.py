"""Lists of hosts in words: those that differ in a number are drawn together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.report.ranks import format_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_HOSTS = 8
"""Longer lists are cut; the report file has them all."""


def format_hosts(hosts: Iterable[str]) -> str:
    """Write hosts in order, numbers drawn together: ``node[1-3, 7], login``. Zero-padded numbers stay as they are."""
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
    if len(written) > MAX_HOSTS:
        return f"{', '.join(written[:MAX_HOSTS])} and {len(written) - MAX_HOSTS} more"
    return ", ".join(written)


def _write_family(name: str, numbers: list[int]) -> str:
    return f"{name}{numbers[0]}" if len(numbers) == 1 else f"{name}[{format_numbers(numbers)}]"
