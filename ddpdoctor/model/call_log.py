"""Thousands of recorded calls of a rank, packed as columns of numbers. What calls have in common is stored once."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, overload

from ddpdoctor.model.facts import PHASES, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddpdoctor.model.stacks import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What calls from one line with one operation, group, dtype and shape share. See ``Call`` for the fields."""

    op: str
    api: str
    group: str
    dtype: str | None
    shape: tuple[int, ...] | None
    tensors: int
    peer: int | None
    redop: str | None
    site: Frame | None
    is_async: bool
    failed: bool
    thread_is_main: bool

    @property
    def numbered(self) -> bool:
        """Whether a number above zero is the sequence number of a collective within its group."""
        return bool(self.group) and self.op not in PHASES


class CallLog(Sequence[Call]):
    """Calls in the order in which they began. A ``Call`` is built on access and is not kept.

    Each column has one entry per call. ``which`` is the position in ``kinds``. ``numbers`` is the call's number within
    the group; for a phase, it is how many collectives had begun (negative if unknown). Times are in nanoseconds.
    ``ended_ns`` is 0 while a call is open.
    """

    def __init__(
        self,
        *,
        kinds: tuple[CallKind, ...],
        which: array[int],
        indexes: array[int],
        numbers: array[int],
        started_ns: array[int],
        ended_ns: array[int],
    ) -> None:
        self.kinds = kinds
        self.which = which
        self.indexes = indexes
        self.numbers = numbers
        self.started_ns = started_ns
        self.ended_ns = ended_ns

    def __len__(self) -> int:
        """Return the number of calls."""
        return len(self.which)

    @overload
    def __getitem__(self, at: int) -> Call: ...

    @overload
    def __getitem__(self, at: slice) -> CallLog: ...

    def __getitem__(self, at: int | slice) -> Call | CallLog:
        """Return one call, or a packed slice of calls."""
        if isinstance(at, slice):
            return self._of_columns([column[at] for column in self._columns()])
        kind = self.kinds[self.which[at]]
        number = self.numbers[at]
        return Call(
            index=self.indexes[at],
            op=kind.op,
            api=kind.api,
            group=kind.group,
            seq=number if kind.numbered and number > 0 else None,
            dtype=kind.dtype,
            shape=kind.shape,
            tensors=kind.tensors,
            peer=kind.peer,
            redop=kind.redop,
            site=kind.site,
            started_ns=self.started_ns[at],
            ended_ns=self.ended_ns[at] or None,
            is_async=kind.is_async,
            failed=kind.failed,
            thread_is_main=kind.thread_is_main,
            begun=number if kind.op in PHASES and kind.op != "work_wait" and number >= 0 else None,
            awaits=number if kind.op == "work_wait" and number > 0 else None,
        )

    def __iter__(self) -> Iterator[Call]:
        """Build the calls one after the other."""
        return map(self.__getitem__, range(len(self)))

    def ended(self) -> CallLog:
        """Return the calls that have ended."""
        columns = [column[:] for column in self._columns()]
        for at in reversed(self._open_places):
            for column in columns:
                del column[at]
        return self._of_columns(columns)

    def open(self) -> tuple[Call, ...]:
        """Return the calls that have not ended."""
        return tuple(map(self.__getitem__, self._open_places))

    @cached_property
    def _open_places(self) -> list[int]:
        found: list[int] = []
        try:
            while True:
                found.append(self.ended_ns.index(0, found[-1] + 1 if found else 0))
        except ValueError:
            return found

    @cached_property
    def counts(self) -> dict[CallKind, int]:
        """The number of calls of each kind."""
        return {self.kinds[which]: count for which, count in Counter(self.which).items()}

    @cached_property
    def last(self) -> dict[CallKind, int]:
        """The position of the last call of each kind."""
        return {self.kinds[which]: at for which, at in dict(zip(self.which, range(len(self)), strict=True)).items()}

    def of_kinds(self, wanted: Callable[[CallKind], bool]) -> tuple[Call, ...]:
        """Return the calls whose kind is wanted."""
        places = {place for place, kind in enumerate(self.kinds) if wanted(kind)}
        return tuple(self[at] for at, which in enumerate(self.which) if which in places) if places else ()

    def last_of_kinds(self, wanted: Callable[[CallKind], bool]) -> Call | None:
        """Return the last call whose kind is wanted."""
        at = max((at for kind, at in self.last.items() if wanted(kind)), default=None)
        return None if at is None else self[at]

    def _columns(self) -> tuple[array[int], ...]:
        return self.which, self.indexes, self.numbers, self.started_ns, self.ended_ns

    def _of_columns(self, columns: list[array[int]]) -> CallLog:
        which, indexes, numbers, started_ns, ended_ns = columns
        return CallLog(
            kinds=self.kinds, which=which, indexes=indexes, numbers=numbers, started_ns=started_ns, ended_ns=ended_ns
        )


def pack_calls(calls: Sequence[Call]) -> CallLog:
    """Return calls packed. A ``CallLog`` is returned unchanged."""
    if isinstance(calls, CallLog):
        return calls
    places: dict[CallKind, int] = {}
    which = array("L", [places.setdefault(kind_of(call), len(places)) for call in calls])
    return CallLog(
        kinds=tuple(places),
        which=which,
        indexes=array("Q", [call.index for call in calls]),
        numbers=array("q", [_number(call) for call in calls]),
        started_ns=array("Q", [call.started_ns for call in calls]),
        ended_ns=array("Q", [call.ended_ns or 0 for call in calls]),
    )


def kind_of(call: Call) -> CallKind:
    """Return the part of a call that it can share with others."""
    return CallKind(
        op=call.op, api=call.api, group=call.group, dtype=call.dtype, shape=call.shape, tensors=call.tensors,
        peer=call.peer, redop=call.redop, site=call.site, is_async=call.is_async, failed=call.failed,
        thread_is_main=call.thread_is_main,
    )  # fmt: skip


def _number(call: Call) -> int:
    known: Iterable[int | None] = (call.seq, call.begun, call.awaits)
    return next((number for number in known if number is not None), -1)
