"""The desync report of ProcessGroupNCCL (TORCH_NCCL_DESYNC_DEBUG, or TORCH_DISTRIBUTED_DEBUG=DETAIL). Group ranks.

It is one text of many lines, of which only the first has a prefix of torch's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.natures import numbers
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Absent, Differ, Operation, Shown, Who
from ddpdoctor.model.torch_names import op_type_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_RANKS = r"\[(?P<ranks>\d[\d, ]{0,100000})\]"
_BEGINS = re.compile(r"- \[(?P<rank>\d{1,9})\] Timeout at collective: (?P<op>\w{1,60}), #(?P<seq>\d{1,12})")
_NEVER = re.compile(rf"ranks {_RANKS} are the lagging ranks that caused this timeout")
_INSIDE = re.compile(rf"{_RANKS} joined but didn't finish collective #(?P<seq>\d{{1,12}})")
_BEHIND = re.compile(
    rf"{_RANKS} finished collective #(?P<done>\d{{1,12}}), but didn't join collective #(?P<seq>\d{{1,12}})"
)
_NUMBER = re.compile(r"^\s*#(?P<seq>\d{1,12}) (?P<state>started|finished) ranks:")
_STATE = re.compile(rf"^\s*{_RANKS} (?P<state>started|finished) (?P<op>\w{{1,60}})")
_NEAR = 4
"""A report belongs to a head with a group if it starts within this many lines."""
_MOST_REPORTS = 64
_LONGEST = 2000
"""Our choice: no report has this many lines, including lines of other processes in between."""


@dataclass(slots=True)
class _Report:
    rank: int
    operation: Operation
    line: Line
    seq: int = 0
    """The number of the snapshot's part that is being read."""
    started: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """The ranks inside an operation, by its number and name."""


class DesyncReports:
    """Reads the reports of all ranks in one stream of lines."""

    def __init__(self) -> None:
        self._reports: dict[Hashable, _Report] = {}
        self._group: tuple[int, str, str] = (-_NEAR, "", "")
        """The line of the last head with a group, and that group."""

    @property
    def is_open(self) -> bool:
        """Whether a report is being read."""
        return bool(self._reports)

    def note_group(self, line: Line, key: str, words: str) -> None:
        """Note the group of a head, because a report begins in the next line."""
        self._group = (line.number, key, words)

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if "Timeout at collective: " in text and (begins := _BEGINS.search(text)) is not None:
            return self._begin(line, begins)
        report = self._reports.get(line.stream)
        if report is None:
            return ()
        return self._read_on(line, report)

    def _read_on(self, line: Line, report: _Report) -> Iterable[Fact]:
        text = line.text
        if (never := _NEVER.search(text)) is not None:
            return _absent(line, report, never["ranks"], report.operation)
        if (behind := _BEHIND.search(text)) is not None:
            return _absent(line, report, behind["ranks"], _at(report, int(behind["seq"])))
        if (inside := _INSIDE.search(text)) is not None:
            return self._inside(line, report, inside)
        return self._snapshot(line, report)

    def end(self) -> Iterable[Fact]:
        """Return the facts of snapshots that the log cuts off."""
        return [fact for stream in list(self._reports) for fact in self._close(stream)]

    def _begin(self, line: Line, begins: re.Match[str]) -> Iterable[Fact]:
        near = line.number - self._group[0] <= _NEAR
        key, words = self._group[1:] if near else ("", "")
        operation = Operation(
            op=op_type_name(begins["op"]), seq=int(begins["seq"]), group=key, group_words=words
        )  # fmt: skip
        found = [*self._close(line.stream)]
        if len(self._reports) < _MOST_REPORTS:
            self._reports[line.stream] = _Report(int(begins["rank"]), operation, line)
        return found

    def _inside(self, line: Line, report: _Report, inside: re.Match[str]) -> Iterable[Fact]:
        """Ranks inside the lowest number are suspects only if another has passed it."""
        seq = int(inside["seq"])
        if report.operation.seq is None or seq >= report.operation.seq:
            return ()
        return _absent(line, report, inside["ranks"], report.operation, certain=False)

    def _snapshot(self, line: Line, report: _Report) -> Iterable[Fact]:
        if (number := _NUMBER.search(line.text)) is not None:
            report.seq = int(number["seq"]) if number["state"] == "started" else 0
            return ()
        if (state := _STATE.search(line.text)) is not None:
            if report.seq and state["state"] == "started":
                report.started.setdefault(report.seq, {})[state["op"]] = numbers(state["ranks"])
            return ()
        return self._close(line.stream) if line.number - report.line.number > _LONGEST else ()

    def _close(self, stream: Hashable) -> Iterable[Fact]:
        report = self._reports.pop(stream, None)
        if report is None:
            return ()
        return [_differ(report, seq, sides) for seq, sides in report.started.items() if len(sides) > 1]


def _at(report: _Report, seq: int) -> Operation:
    """Return the operation with a number. Only the operation in the report is known by name."""
    own = report.operation
    return own if own.seq == seq else Operation(seq=seq, group=own.group, group_words=own.group_words)


def _absent(line: Line, report: _Report, ranks: str, operation: Operation, *, certain: bool = True) -> list[Fact]:
    own = report.operation
    waiters = (report.rank,) if not own.group else ()
    common: dict[str, Any] = {"spot": line.spot(), "time": line.time, "said": quote(line.text)}
    return [
        Absent(
            who=Who(rank=rank) if not own.group else Who(group=own.group, group_rank=rank),
            operation=operation, waiters=waiters, certain=certain, expected=True, shown=Shown.WORDS, **common,
        )
        for rank in numbers(ranks)
    ]  # fmt: skip


def _differ(report: _Report, seq: int, sides: dict[str, tuple[int, ...]]) -> Differ:
    own = report.operation
    ordered = sorted(sides.items(), key=lambda side: -len(side[1]))
    most, second = len(ordered[0][1]), len(ordered[1][1])
    odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks)) if most > second else None
    return Differ(
        spot=report.line.spot(), time=report.line.time, said=quote(report.line.text),
        sides=tuple(
            (ranks, Operation(op=op_type_name(op), seq=seq, group=own.group, group_words=own.group_words))
            for op, ranks in ordered
        ),
        odd=odd, aspect="operation", settled=True,
    )  # fmt: skip
