"""What a rank had under each number of a process group: recorded calls, and phases in which C++ made collectives."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.model.call_log import kind_of, pack_calls

from ddpdoctor.rules.progress.groups import TAKES_NO_NUMBER, default_name, native_group, native_seq, own_state
from ddpdoctor.rules.progress.states import NATIVE_PHASES, Activity, RankState, is_collective_op

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from ddpdoctor.model.facts import Call, CallKind
    from ddpdoctor.model.stacks import Frame

MAX_GAP = 4096
"""Most numbers in a row that one phase may take; more means a damaged record."""


class TimelineEntry(NamedTuple):
    """What one rank has under one number of a group: its recorded call, or the phase in which C++ makes the call."""

    rank: int
    kind: CallKind
    native: bool
    """C++ made the collective, in the phase ``kind``."""
    place: int
    """Index of the call or phase."""
    unrecorded: bool = False
    """C++ made it outside every known phase, as compiled code does: only torch's own counter shows it."""

    @property
    def site(self) -> Frame | None:
        """The user's line."""
        return self.kind.site

    @property
    def key(self) -> Hashable:
        """The operation and the line. Patterns are made of these."""
        return key_of(self.kind)


class Event(NamedTuple):
    """A record of a group that has a number."""

    place: int
    kind: CallKind
    number: int
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCalls:
    """The collectives of one rank in one group, by number."""

    rank: int
    entries: Mapping[int, TimelineEntry]
    first_places: Mapping[Hashable, int]
    """Index of the first call or phase for each ``key_of``, whether or not it took a number."""


def key_of(kind: CallKind) -> Hashable:
    """Return the operation and the line, of which call patterns are made; for a backward the line does not count."""
    site = kind.site
    return (kind.op, None if kind.op in NATIVE_PHASES or site is None else (site.file, site.line))


def line_key(kind: CallKind) -> Hashable:
    """Return the operation and the line, also for DDP's phases."""
    site = kind.site
    return (kind.op, None if site is None else (site.file, site.line))


def read_timeline(state: RankState, name: str, most: int) -> GroupCalls:
    """Return what a rank has under the numbers of a group, as far as its last ``most`` records show.

    A DDP phase records how many collectives the group had begun at its start. C++ took the numbers between that one and
    the group's next record.
    """
    rank = state.rank.rank
    entries: dict[int, TimelineEntry] = {}
    count = 0
    phase: Event | None = None
    cursor: int | None = None
    events = read_events(state, name, most)
    for at, event in enumerate(events):
        if event.kind.op == TAKES_NO_NUMBER and event.ended_ns and not event.kind.failed:
            continue
        # A new_group that has returned was called by all ranks.
        makes_group = event.kind.op == "new_group" and not event.ended_ns
        collective = makes_group or is_collective_op(event.kind.op)
        before = event.number - 1 if collective else event.number
        if phase is not None and cursor is not None and before > cursor:
            count += _fill(entries, rank, phase, cursor, before)
        if phase is not None and phase.ended_ns and phase.ended_ns <= event.started_ns:
            phase = None
        if collective:
            entries.setdefault(event.number, TimelineEntry(rank, event.kind, native=False, place=event.place))
        elif event.kind.op in NATIVE_PHASES:
            phase, count = event, 0
        if cursor is None or event.number > cursor:
            cursor = event.number
        if event.kind.failed and not _failed_inside(event, islice(events, at + 1, None)):
            break
    if phase is not None and cursor is not None:
        begun = _last_begun(state, name)
        waits = state.doing is Activity.NATIVE and native_group(state) == name
        last = cursor + max(0, _usual(entries, phase) - count) * waits if begun is None else begun
        _fill(entries, rank, phase, cursor, last)
    _add_pending_on_device(entries, state, name)
    return GroupCalls(rank=rank, entries=entries, first_places=_first_places(events))


def _add_pending_on_device(entries: dict[int, TimelineEntry], state: RankState, name: str) -> None:
    """Add what the device has not completed, if no record or phase has its number."""
    for call in state.rank.open_calls:
        if call.device_state is not None and call.seq is not None and call.group == name:
            entry = TimelineEntry(
                state.rank.rank, kind_of(call), native=False, place=call.index, unrecorded=call.native
            )
            entries.setdefault(call.seq, entry)


def _failed_inside(event: Event, later: Iterable[Event]) -> bool:
    """Return whether a phase failed because of a call inside it: a hook or a custom function calls in backward."""
    inside = takewhile(lambda one: one.started_ns < event.ended_ns, later)
    return event.kind.op in NATIVE_PHASES and any(one.kind.failed for one in inside)


def _first_places(events: list[Event]) -> dict[Hashable, int]:
    """Return the index of the first call of each kind."""
    kinds = {id(event.kind): event for event in reversed(events)}
    found: dict[Hashable, int] = {}
    for event in sorted(kinds.values(), key=lambda event: event.place):
        found.setdefault(key_of(event.kind), event.place)
    return found


def _fill(entries: dict[int, TimelineEntry], rank: int, phase: Event, cursor: int, last: int) -> int:
    """Give a phase the numbers after ``cursor`` up to ``last``; return how many."""
    if last - cursor > MAX_GAP:
        return 0
    entry = TimelineEntry(rank, phase.kind, native=True, place=phase.place)
    for number in range(cursor + 1, last + 1):
        entries.setdefault(number, entry)
    return max(0, last - cursor)


def _usual(entries: Mapping[int, TimelineEntry], phase: Event) -> int:
    """Return how many numbers such a phase took the last time, at least one."""
    same = [e.place for e in entries.values() if e.native and e.kind.op == phase.kind.op and e.place != phase.place]
    return max(1, same.count(same[-1])) if same else 1


def _last_begun(state: RankState, name: str) -> int | None:
    """Return the last number that the group's counter says was begun, or None if the process did not answer."""
    group = own_state(state.rank, name)
    if group is None or not group.backend or group.enqueued < 0:
        return None
    waits = state.doing is Activity.NATIVE and native_group(state) == name
    return native_seq(state, name) if waits else group.enqueued


def read_events(state: RankState, name: str, most: int) -> list[Event]:
    """Return the records of a group that have a number, in the order in which they began."""
    log = pack_calls(state.rank.recent_calls)[-most:]
    taken = [_uses(kind, name, state) for kind in log.kinds]
    chosen = [taken[which] and number >= 0 for which, number in zip(log.which, log.numbers, strict=True)]
    kinds = [log.kinds[which] for which in compress(log.which, chosen)]
    columns = (compress(column, chosen) for column in (log.numbers, log.started_ns, log.ended_ns))
    found = list(map(Event, compress(log.indexes, chosen), kinds, *columns))
    on_host = (call for call in state.rank.open_calls if call.device_state is None)  # the others were recorded before
    still_open = [_open_event(call, state, name) for call in on_host]
    found += [event for event in still_open if event is not None]
    return sorted(found, key=attrgetter("place"))


def _uses(kind: CallKind, name: str, state: RankState) -> bool:
    """Return whether records of a kind have numbers of this group; without a name it is the default group."""
    if kind.op == "work_wait":
        return False
    return kind.group == name or (not kind.group and name == default_name(state.rank))


def _open_event(call: Call, state: RankState, name: str) -> Event | None:
    kind = kind_of(call)
    if not _uses(kind, name, state):
        return None
    number = call.seq if call.seq is not None else call.begun
    if call.op == "new_group" and number is not None:
        number += 1
    if number is None and is_collective_op(call.op):
        number = _next_number(state, name)
    return None if number is None else Event(call.index, kind, number, call.started_ns, 0)


def _next_number(state: RankState, name: str) -> int | None:
    """Return the number of a pending call that torch does not count, such as monitored_barrier."""
    group = own_state(state.rank, name)
    return group.enqueued + 1 if group is not None and group.backend and group.enqueued >= 0 else None
