"""Converts times from another host's CLOCK_MONOTONIC to that of the reporting host."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.call_log import CallLog
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen
from ddpdoctor.model.facts import BeforeCall, Call, Child, HelperError, Job, Raised, Rank, Save
from ddpdoctor.model.stacks import StackSample
from ddpdoctor.model.steps import Speed, StepParts, StepTimes

if TYPE_CHECKING:
    from typing import TypeVar

    Timed = TypeVar("Timed", Job, Rank)

TIMED: frozenset[Any] = frozenset({
    BeforeCall, Call, Child, EpochCall, EpochSeen, HelperError, Job, LoaderSeen, Raised, Rank, Save, Speed, StackSample,
    StepParts, StepTimes,
})  # fmt: skip
"""The records with times, or with records that have times. Times are their fields that end in "_ns"."""
_HOLDERS = TIMED | {CallLog, tuple}


def shift_times(record: Timed, ahead_ns: int) -> Timed:
    """Return a job or a rank with its times moved to the reporting host's clock; its own is ``ahead_ns`` ahead."""
    shifted: Timed = _shift(record, ahead_ns) if ahead_ns else record
    return shifted


def _shift(value: Any, ahead_ns: int) -> Any:
    if isinstance(value, CallLog):
        return value.shifted(ahead_ns)
    if isinstance(value, tuple):
        return tuple(_shift(one, ahead_ns) for one in value) if value and type(value[0]) in TIMED else value
    times, others = _names(type(value))  # type: ignore[arg-type]
    old = {name: getattr(value, name) for name in (*times, *others)}
    new = {name: _shift_time(old[name], ahead_ns) for name in times}
    new |= {name: _shift(old[name], ahead_ns) for name in others if type(old[name]) in _HOLDERS}
    return replace(value, **{name: one for name, one in new.items() if one is not old[name]})


def _shift_time(time_ns: Any, ahead_ns: int) -> Any:
    """Move a time, or several; None and 0 mean that it is not known."""
    if isinstance(time_ns, tuple):
        return tuple(one - ahead_ns for one in time_ns)
    if isinstance(time_ns, array):
        return array("q", [one - ahead_ns for one in time_ns])
    return time_ns and time_ns - ahead_ns


@cache
def _names(kind: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a record's times, and of its other fields."""
    names = [one.name for one in fields(kind)]
    times = tuple(name for name in names if name.endswith("_ns"))
    return times, tuple(name for name in names if name not in times)
