"""Expands Slurm's short forms: lists of hosts ("n[1-3,07-09],login") and of counts per node ("4(x2),1")."""

from __future__ import annotations

import re

MAX_ENTRIES = 65_536
"""Slurm's own limit for a host list (MAX_RANGE, 64k in a default build). A longer list is a damaged value."""

_SPAN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?")
_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]\s]*\])+")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of SLURM_JOB_NODELIST or SLURM_STEP_NODELIST in order. Raises ValueError if it is malformed.

    Numbers are padded to the width of the range's first: "n[08-10]" is n08, n09, n10. A name may have several ranges.
    """
    hosts: list[str] = []
    for part in _split(text):
        hosts += _expand_host(part, MAX_ENTRIES - len(hosts))
    if not hosts:
        raise ValueError("the list of hosts is empty")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the numbers of SLURM_TASKS_PER_NODE, one per node. Raises ValueError if it is malformed."""
    counts: list[int] = []
    for part in text.strip().split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"not a list of counts such as 4(x2),1: {_short(text)}")
        times = int(found[2] or 1)
        if len(counts) + times > MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} nodes: {_short(text)}")
        counts += [int(found[1])] * times
    return tuple(counts)


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    text = text.strip()
    parts: list[str] = []
    place = 0
    while place < len(text):
        found = _HOST.match(text, place)
        if found is None:
            raise ValueError(f"not a list of hosts such as n[1-3],login: {_short(text)}")
        parts.append(found[0])
        place = found.end()
        if place < len(text):
            if text[place] != "," or place + 1 == len(text):
                raise ValueError(f"not a list of hosts such as n[1-3],login: {_short(text)}")
            place += 1
    return parts


def _expand_host(part: str, space: int) -> list[str]:
    """Expand the ranges of one name. The last range varies fastest."""
    names = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
        ends = [literal] if literal else _numbers(ranges, space)
        if len(names) * len(ends) > space:
            raise ValueError(f"more than {MAX_ENTRIES} hosts: {_short(part)}")
        names = [name + end for name in names for end in ends]
    return names


def _numbers(ranges: str, space: int) -> list[str]:
    """Expand the text in brackets: "1-3,07"."""
    found: list[str] = []
    for part in ranges.split(","):
        span = _SPAN.fullmatch(part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f"not a range of numbers such as 1-3,07: [{_short(ranges)}]")
        first, last = int(span[1]), int(span[2] or span[1])
        if len(found) + last - first + 1 > space:
            raise ValueError(f"more than {MAX_ENTRIES} hosts: [{_short(ranges)}]")
        found += [f"{number:0{len(span[1])}d}" for number in range(first, last + 1)]
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
