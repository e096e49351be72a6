"""Reads errors of torch's collectives: which ranks differ, are late or are lost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.evidence.fingerprints import MARK, Mismatches
from ddpdoctor.evidence.launches import begins_run
from ddpdoctor.evidence.natures import numbers
from ddpdoctor.evidence.store_errors import MARKS as STORE_MARKS
from ddpdoctor.evidence.store_errors import StoreErrors
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import MOST_RANKS, Absent, Differ, Failed, Nature, Operation, Shown, Waiting, Who

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_MARKS = (
    MARK, "onitoredBarrier", "DDP expects same model", "appears not to match", "op.preamble.length <= op.nbytes",
    *STORE_MARKS,
)  # fmt: skip
_NOT_PASSED = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\]: Ranks? (?P<ranks>\d[\d, ]{0,100000}?) failed to pass monitoredBarrier"
    r" in (?P<ms>\d{1,12})"
)
_INNOCENT = re.compile(r"Rank (?P<rank>\d{1,9}) successfully reached monitoredBarrier, but received errors")
_PARAMETERS = re.compile(
    r"Rank (?P<one>\d{1,9}) has (?P<count>\d{1,20}) params, while rank (?P<other>\d{1,9}) has inconsistent"
    r" (?P<others>-?\d{1,20}) params"
)
_SIZES = re.compile(
    r"params\[(?P<number>\d{1,9})\] in this process with sizes \[(?P<sizes>[\d, ]{0,200})\] appears not to match"
    r" sizes of the same param in process (?P<other>\d{1,9})"
)
_LENGTHS = re.compile(r"op\.preamble\.length <= op\.nbytes\.? ?(?P<sent>\d{1,20}) vs (?P<expected>\d{1,20})")
_CONSTRUCTOR = "DistributedDataParallel()"
_MOST_PARAMETERS = 10**8
"""Our choice: no model has more tensors. A victim reads memory that was never set."""


class CollectiveErrorReader:
    """Finds errors of collectives, of the store and of the rendezvous."""

    name = "errors of collectives"
    triggers = (
        b"rror", b"imeout", b"imed out", b"onitoredBarrier", b"server socket has failed", b"failed on SocketImpl",
        b"store based barrier", b"store-based barrier",
    )  # fmt: skip

    def __init__(self) -> None:
        self._mismatches = Mismatches()
        self._store = StoreErrors()
        self._holds = False
        """Whether a fact waits for later lines that may add to it."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if self._holds and begins_run(text):
            return self.end()
        mark = next((mark for mark in _MARKS if mark in text), None)
        if mark is None:
            return ()
        if mark == MARK:
            self._mismatches.add(line)
            self._holds = True
            return ()
        if mark in STORE_MARKS:
            self._holds = True
            return self._store.read(line)
        return _READERS[mark](line)

    def end(self) -> Iterable[Fact]:
        """Return the facts that still wait for later lines."""
        self._holds = False
        return [*self._mismatches.facts(), *self._store.end()]


def _monitored_barrier(line: Line) -> list[Fact]:
    """Read which ranks a monitored barrier misses. Only rank 0 of the group reports it."""
    operation = Operation(op="monitored_barrier")
    common = origin_of(line)
    if (innocent := _INNOCENT.search(line.text)) is not None:
        who = line.who if line.who.rank is not None else Who(rank=int(innocent["rank"]))
        return [Waiting(operation=operation, timed_out=True, **{**common, "who": who})]
    match = _NOT_PASSED.search(line.text)
    if match is None:
        return []
    limit_s = int(match["ms"]) / 1000
    rank = line.who.rank if line.who.rank is not None else int(match["rank"])
    of_world = rank == int(match["rank"])  # else these are ranks of a smaller group
    waiting = Waiting(operation=operation, timed_out=True, limit_s=limit_s, **{**common, "who": _rank(line, rank)})
    late = numbers(match["ranks"])
    common.pop("who")
    absent = [
        Absent(
            who=Who(rank=one) if of_world else Who(group="unknown", group_rank=one), operation=operation,
            waiters=(rank,), shown=Shown.WORDS, **common,
        )
        for one in late
    ]  # fmt: skip
    return [waiting, *absent]


def _rank(line: Line, rank: int) -> Who:
    return line.who if line.who.rank is not None else Who(rank=rank, host=line.who.host, pid=line.who.pid)


def _parameters(line: Line) -> list[Fact]:
    """Read how many parameters two ranks have. For a rank that ended, the number is 0 or random memory."""
    match = _PARAMETERS.search(line.text)
    if match is None or int(match["one"]) >= MOST_RANKS or int(match["other"]) >= MOST_RANKS:
        return []
    one, other = int(match["one"]), int(match["other"])
    count, others = int(match["count"]), int(match["others"])
    if not 0 < count < _MOST_PARAMETERS:
        return []
    if not 0 < others < _MOST_PARAMETERS:
        message = "another rank had ended when the models were compared"
        common = origin_of(line, _rank(line, one))
        return [Failed(type="RuntimeError", message=message, nature=Nature.PEER_LOST, peers=(other,), **common)]
    sides = tuple(
        ((rank,), Operation(op=_CONSTRUCTOR, group_words=f"a model with {size} parameters"))
        for rank, size in ((one, count), (other, others))
    )
    return [_differ(line, sides, "number")]


def _sizes(line: Line) -> list[Fact]:
    """Read which parameter has another shape than on rank 0."""
    match = _SIZES.search(line.text)
    if match is None:
        return []
    shape = tuple(map(int, re.findall(r"\d{1,18}", match["sizes"])))
    words = f"a model whose parameter {match['number']} has this shape"
    own = Operation(op=_CONSTRUCTOR, group_words=words, shape=shape)
    other = Operation(op=_CONSTRUCTOR, group_words=f"a model whose parameter {match['number']} has another shape")
    ranks = (line.who.rank,) if line.who.rank is not None else ()
    return [_differ(line, ((ranks, own), ((int(match["other"]),), other)), "shape")]


def _lengths(line: Line) -> list[Fact]:
    """Read that Gloo got more bytes than this rank expected. That does not tell which rank is wrong."""
    match = _LENGTHS.search(line.text)
    if match is None:
        return []
    ranks = (line.who.rank,) if line.who.rank is not None else ()
    own = Operation(op=f"a collective of {match['expected']} bytes")
    other = Operation(op=f"a collective of {match['sent']} bytes")
    return [_differ(line, ((ranks, own), ((), other)), "shape")]


def _differ(line: Line, sides: tuple[tuple[tuple[int, ...], Operation], ...], aspect: str) -> Differ:
    common = origin_of(line)
    common.pop("who")
    return Differ(sides=sides, aspect=aspect, **common)


_READERS = {
    "onitoredBarrier": _monitored_barrier,
    "DDP expects same model": _parameters,
    "appears not to match": _sizes,
    "op.preamble.length <= op.nbytes": _lengths,
}
