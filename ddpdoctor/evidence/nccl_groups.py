"""Finds the rank and the process group in a line of ProcessGroupNCCL."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.evidence import MOST_RANKS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Who

DEFAULT_GROUP = "default_pg"
"""torch's name for the default group."""
_GROUP = re.compile(
    r"\[PG (?:ID \d+ PG GUID )?(?P<name>[^\s(\]]{1,200}?)\s?(?:\((?P<desc>[^)]{0,200})\))? Rank (?P<rank>\d{1,9})\]"
)
_GROUP2 = re.compile(r"\[TC\](?:\[rank=(?P<rank>-?\d{1,9})\])?(?:\[name=(?P<name>[^\]]{0,200})\])?")
"""The same for nccl2."""
_RANK = re.compile(r"\[Rank (\d{1,9})\]")


@dataclass(frozen=True, slots=True)
class NcclGroup:
    """A group as a line names it, and the rank of the writer in it."""

    key: str
    words: str
    rank: int | None


def group_of(text: str) -> NcclGroup | None:
    """Return the group that a head names, or None."""
    match = _GROUP.search(text) or _GROUP2.search(text)
    if match is None:
        return None
    fields = match.groupdict()
    name, desc = fields["name"] or "", fields.get("desc") or ""
    rank = int(fields["rank"]) if fields["rank"] is not None and 0 <= int(fields["rank"]) < MOST_RANKS else None
    if DEFAULT_GROUP in {desc, name} or (name == "0" and not desc):
        return NcclGroup("", DEFAULT_GROUP, rank)
    kind = "PG GUID" if "PG GUID" in match[0] else "PG" if name else ""
    return NcclGroup(name, f"{kind} {name} ({desc})" if desc else f"{kind} {name}".strip(), rank)


def writer_of(line: Line, group: NcclGroup | None) -> Hashable:
    """Return an identity of the writing process: its global rank, or else its rank in some group."""
    if line.who.rank is not None:
        return line.who.rank
    spoken = _RANK.search(line.text)
    rank = int(spoken[1]) if spoken is not None else group.rank if group is not None else None
    return (line.stream, rank)


def who_of(line: Line, group: NcclGroup | None) -> Who:
    """Return the rank that a line is about. The rank in the default group is the global rank."""
    who = line.who
    if group is not None:
        rank = group.rank if who.rank is None and group.words == DEFAULT_GROUP else who.rank
        return replace(who, rank=rank, group=group.key, group_rank=group.rank)
    spoken = _RANK.search(line.text)
    if who.rank is None and spoken is not None and int(spoken[1]) < MOST_RANKS:
        return replace(who, group_rank=int(spoken[1]))
    return who
