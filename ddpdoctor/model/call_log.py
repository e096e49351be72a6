"""Thousands of recorded calls of a rank, packed as columns of numbers. What calls have in common is stored once."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, overload

from ddpdoctor.model.facts import PHASES, Call, CallKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SHARED = tuple(one.name for one in fields(CallKind))


class CallLog(Sequence[Call]):
    """Calls in the order in which they began. A ``Call`` is built on access and is not kept.

    The columns are ``which``, ``indexes``, ``numbers``, ``started_ns`` and ``ended_ns``, each with one entry per call.
    ``which`` is the position in ``kinds``. ``numbers`` is the call's number within the group; for a phase, it is how
    many collectives had begun (negative if unknown). Times are in nanoseconds.
    ``ended_ns`` is 0 while a call is open. ``ahead_ns`` is how far the clock of the columns is ahead of that of the
    calls: logs of a job with thousands of ranks share their columns with the rings instead of copying them.
    """

    def __init__(self, kinds: tuple[CallKind, ...], columns: Iterable[Sequence[int]], ahead_ns: int = 0) -> None:
        self.kinds = kinds
        self.ahead_ns = ahead_ns
        self._columns = tuple(columns)
        self.which, self.indexes, self.numbers, self._started_ns, self._ended_ns = self._columns

    @property
    def started_ns(self) -> Sequence[int]:
        """When each call began."""
        ahead_ns = self.ahead_ns
        return [time_ns - ahead_ns for time_ns in self._started_ns] if ahead_ns else self._started_ns

    @property
    def ended_ns(self) -> Sequence[int]:
        """When each call ended, or 0."""
        ahead_ns = self.ahead_ns
        return [time_ns and time_ns - ahead_ns for time_ns in self._ended_ns] if ahead_ns else self._ended_ns

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
            return CallLog(self.kinds, (column[at] for column in self._columns), self.ahead_ns)
        kind = self.kinds[self.which[at]]
        number, ended_ns, is_phase = self.numbers[at], self._ended_ns[at], kind.op in PHASES
        return Call(
            **shared_fields(kind),
            index=self.indexes[at],
            seq=number if kind.group and not is_phase and number > 0 else None,
            started_ns=self._started_ns[at] - self.ahead_ns,
            ended_ns=ended_ns - self.ahead_ns if ended_ns else None,
            begun=number if is_phase and kind.op != "work_wait" and number >= 0 else None,
            awaits=number if kind.op == "work_wait" and number > 0 else None,
        )

    def __iter__(self) -> Iterator[Call]:
        """Build the calls one after the other."""
        return map(self.__getitem__, range(len(self)))

    def ended(self) -> CallLog:
        """Return the calls that have ended."""
        places, before = self._open_places, len(self) - len(self._open_places)
        if not places or places[0] == before:  # the first entries of each column, without a copy
            views = (memoryview(one) if isinstance(one, array) else one for one in self._columns)
            return CallLog(self.kinds, (view[:before] for view in views), self.ahead_ns)
        chosen = bytearray(b"\1") * len(self)
        for at in places:
            chosen[at] = 0
        columns = (array("q", compress(column, chosen)) for column in self._columns)
        return CallLog(self.kinds, columns, self.ahead_ns)

    def open(self) -> tuple[Call, ...]:
        """Return the calls that have not ended."""
        return tuple(map(self.__getitem__, self._open_places))

    def shifted(self, ahead_ns: int) -> CallLog:
        """Return the calls by another clock; that of this log is ``ahead_ns`` ahead of it."""
        return CallLog(self.kinds, self._columns, self.ahead_ns + ahead_ns)

    @cached_property
    def _open_places(self) -> list[int]:
        ended_ns = self._ended_ns if isinstance(self._ended_ns, array) else array("q", self._ended_ns)
        found: list[int] = []
        try:
            while True:
                found.append(ended_ns.index(0, found[-1] + 1 if found else 0))
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


def pack_calls(calls: Sequence[Call]) -> CallLog:
    """Return calls packed. A ``CallLog`` is returned unchanged."""
    if isinstance(calls, CallLog):
        return calls
    places: dict[CallKind, int] = {}
    which = array("L", [places.setdefault(kind_of(call), len(places)) for call in calls])
    known = ((call.seq, call.begun, call.awaits) for call in calls)
    columns = (
        which,
        array("Q", [call.index for call in calls]),
        array("q", [next((one for one in numbers if one is not None), -1) for numbers in known]),
        array("Q", [call.started_ns for call in calls]),
        array("Q", [call.ended_ns or 0 for call in calls]),
    )
    return CallLog(tuple(places), columns)


def kind_of(call: Call) -> CallKind:
    """Return the part of a call that it can share with others."""
    return CallKind(**shared_fields(call))


def shared_fields(kind: CallKind) -> dict[str, Any]:
    """Return the fields that a call shares with others of its kind."""
    return {name: getattr(kind, name) for name in _SHARED}
