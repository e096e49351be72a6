"""Reads single lines of ProcessGroupNCCL: dump signals, a stuck watchdog, a lost store."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.natures import classify
from ddpdoctor.evidence.nccl_groups import DEFAULT_GROUP, who_of
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import (
    MOST_RANKS,
    Failed,
    Hint,
    Link,
    Operation,
    Reached,
    Seen,
    Size,
    Waiting,
    Who,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpdoctor.evidence.nccl_groups import NcclGroup
    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

MOST_WORKS = 10**9
"""A larger number is that of memory that was never set, as torch 2.3 prints it for a group that completed nothing."""
_DUMP = re.compile(
    r"Received a dump signal due to a collective timeout from .{0,600}?"
    r"Last enqueued NCCL work: (?P<enqueued>-?\d{1,20}).{1,120}?last completed NCCL work: (?P<completed>-?\d{1,20})"
)
_SOURCE = re.compile(r"due to a collective timeout from {1,2}rank (?P<rank>\d{1,9})\b")
_OPTIONS = re.compile(
    r"initialization options: ?size: (?P<size>\d{1,9}), global rank: (?P<rank>\d{1,9})"
    r"(?:.{0,400}?PG Name: (?P<name>[^\s,]{1,200}))?"
)
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d{1,9}) seconds|Heartbeat monitor timed out!")


def read_notes(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Return the fact of a single line."""
    for words, read in _NOTES.items():
        if words in line.text:
            return read(line, group)
    return ()


def work_number(digits: str | None) -> int | None:
    """Return a number of a work; 0 for none yet (-1), None for memory that was never set."""
    if digits is None or abs(int(digits)) > MOST_WORKS:
        return None
    return max(int(digits), 0)


def _dump_signal(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Read how far the default group has come: the numbers are its own, whatever group timed out."""
    numbers = _DUMP.search(line.text)
    if numbers is None:
        return _seen(line, group)
    who = replace(who_of(line, group), group="", group_rank=None)
    enqueued, completed = work_number(numbers["enqueued"]), work_number(numbers["completed"])
    found: list[Fact] = [
        Reached(group_words=DEFAULT_GROUP, enqueued=enqueued, completed=completed, **origin_of(line, who))
    ]
    if "from this local rank" in line.text:
        found.append(Waiting(operation=Operation(), timed_out=True, **origin_of(line, who)))
    elif (source := _SOURCE.search(line.text)) is not None:
        words = f"rank {source['rank']} ran into the time limit of a collective, as other ranks were told"
        found.append(Hint(words=words, kind="told-to-dump", **origin_of(line, who)))
    return found


def _options(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Read which rank starts a group, and how many ranks the group has."""
    options = _OPTIONS.search(line.text)
    if options is None or not int(options["rank"]) < MOST_RANKS or not 0 < int(options["size"]) <= MOST_RANKS:
        return _seen(line, group)
    is_default = options["name"] in {"0", DEFAULT_GROUP} if options["name"] else group is None or not group.key
    key = "" if is_default else options["name"] or (group.key if group is not None else "")
    who = replace(who_of(line, group), rank=int(options["rank"]), group="", group_rank=None)
    return [
        Seen(**origin_of(line, who)),
        Size(ranks=int(options["size"]), group=key, **origin_of(line, replace(who, rank=None))),
    ]


def _stuck(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    stuck = _STUCK.search(line.text)
    if stuck is None:
        return ()
    long = f" for {stuck['seconds']} s" if stuck["seconds"] else ""
    words = f"torch's watchdog thread was stuck{long}: a call of CUDA or NCCL does not return, or the GIL is held"
    return [Hint(words=words, kind="watchdog-stuck", **origin_of(line, who_of(line, group)))]


def _gil(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    words = "a thread held the GIL when torch wanted to end the process"
    return [Hint(words=words, kind="gil", **origin_of(line, who_of(line, group)))]


def _store_gone(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    problem = "the job's store did not answer any more: the process that serves it, rank 0 or its agent, had ended"
    fix = "look for what ended rank 0 and its launcher first"
    to = Who(rank=0)
    return [Link(to=to, problem=problem, fix=fix, victim=True, **origin_of(line, who_of(line, group)))]


def _aborted_elsewhere(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    """Read what torch before 2.2 says of another rank whose communicators were aborted."""
    reading = classify("", line.text)
    who, message = who_of(line, group), quote(line.text)
    return [
        Failed(type="NCCL error", message=message, nature=reading.nature, peers=reading.peers, **origin_of(line, who))
    ]


def _seen(line: Line, group: NcclGroup | None) -> Iterable[Fact]:
    return [Seen(**origin_of(line, who_of(line, group)))]


_NOTES: dict[str, Callable[[Line, NcclGroup | None], Iterable[Fact]]] = {
    "initialization options:": _options,
    "Received a dump signal": _dump_signal,
    "watchdog got stuck for": _stuck,
    "Heartbeat monitor timed out!": _stuck,
    "Could not acquire GIL within": _gil,
    'Failed to check the "should dump" flag on TCPStore': _store_gone,
    'TCPStore check for dump key "': _store_gone,
    "Found key in store: NCCLABORTEDCOMM": _aborted_elsewhere,
    "Observed flight recorder dump signal": _seen,
}
