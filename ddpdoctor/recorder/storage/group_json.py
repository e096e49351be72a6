"""Parses JSON in which ranks name the members of their groups: the same thousands of numbers on every rank.

Such a list is parsed once, and all ranks share the result.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, List, Optional, Tuple

from .files import parse_json

MOST_BYTES = 4 * 2**20
"""Our choice: 40 groups of 16,384 ranks. Larger files are parsed as they are."""
LONG_BYTES = 512
"""Our choice: a shorter list is parsed faster than looked up."""
MOST_LISTS = 1024
"""Our choice: how many different lists are kept. A mesh of 16,384 ranks has 128 large groups in each of two dimensions.
"""
_BEFORE, _AFTER = b'"ranks": [', b', "backend":'
"""What stands around the members in an entry of ``groups_now``."""


def parse_group_json(data: bytes) -> Any:
    """Parse JSON like ``parse_json``; long lists of members in ``groups`` become tuples that others may share.

    Raises:
        ValueError: see ``parse_json``.
    """
    if len(data) > MOST_BYTES:
        return parse_json(data)
    first, *parts = data.split(_BEFORE)
    lists: List[Tuple[int, ...]] = []
    kept = [first]
    for part in parts:
        numbers, _, rest = part.partition(b"]")
        members = _members(numbers) if len(numbers) >= LONG_BYTES and rest.startswith(_AFTER) else None
        if members is None:
            kept.append(_BEFORE + part)
        else:
            lists.append(members)
            kept.append(b'"ranks": -%d%s' % (len(lists), rest))
    parsed = parse_json(b"".join(kept))
    for entry in parsed if isinstance(parsed, list) else [parsed]:
        groups = entry.get("groups") if lists and isinstance(entry, dict) else None
        for group in groups if isinstance(groups, list) else ():
            _fill(group, lists)
    return parsed


def _fill(group: Any, lists: List[Tuple[int, ...]]) -> None:
    """Put a list back in its place, which has its number below zero."""
    number = group.get("ranks") if isinstance(group, dict) else None
    if isinstance(number, int) and 0 < -number <= len(lists):
        group["ranks"] = lists[-number - 1]


@lru_cache(maxsize=MOST_LISTS)
def _members(numbers: bytes) -> Optional[Tuple[int, ...]]:
    """Return the numbers of a list, or None if it is damaged or has anything else in it."""
    try:
        parsed = parse_json(b"[%s]" % numbers)
    except ValueError:
        return None
    sound = set(map(type, parsed)) == {int} and min(parsed) >= 0 and max(parsed) < 2**63
    return tuple(parsed) if sound else None
