"""Every time that a rank's facts hold is brought to another clock, and nothing else is changed."""

import dataclasses
import types
import typing
from enum import Enum

from ddpdoctor.collect.run.clock_shift import shift_times
from ddpdoctor.model.call_log import CallLog, pack_calls
from ddpdoctor.model.codec import _find_class, _modules_by_class
from ddpdoctor.model.facts import Call, Rank

AHEAD = 1_000_000


def fill(kind, name="", above=()):
    """Return a value of a type: every time is 5 s, and every tuple and optional has something in it.

    A record that may hold another of its own type holds one, and that holds none.
    """
    if above.count(kind) > 1:
        return None
    inner = [one for one in typing.get_args(kind) if one not in {type(None), Ellipsis}]
    if dataclasses.is_dataclass(kind):
        names = {**vars(typing), **{name: _find_class(name) for name in _modules_by_class()}}
        hints = typing.get_type_hints(kind, localns=names)
        above = (*above, kind)
        return kind(**{field.name: fill(hints[field.name], field.name, above) for field in dataclasses.fields(kind)})
    if inner:
        is_one = typing.get_origin(kind) in {typing.Union, types.UnionType}
        return fill(inner[0], name, above) if is_one else tuple(fill(one, name, above) for one in inner)
    if issubclass(kind, Enum):
        return next(iter(kind))
    return 5 * 10**9 if name.endswith("_ns") else {bool: True, int: 3, float: 1.5, str: "text"}[kind]


def times(value, path=""):
    """Return every field that is named as a time, by its place."""
    if dataclasses.is_dataclass(value):
        found = {}
        for field in dataclasses.fields(value):
            inner, place = getattr(value, field.name), f"{path}.{field.name}"
            several = inner if isinstance(inner, tuple) else (inner,)
            is_time = field.name.endswith("_ns")
            found |= {f"{place}[{i}]": one for i, one in enumerate(several)} if is_time else times(inner, place)
        return found
    if isinstance(value, (tuple, list, CallLog)):
        return {place: one for i, item in enumerate(value) for place, one in times(item, f"{path}[{i}]").items()}
    return {}


def test_every_time_is_shifted_and_all_else_stays():
    rank = fill(Rank)
    shifted = shift_times(rank, AHEAD)
    before, after = times(rank), times(shifted)
    assert {
        ".speed.kept.ended_ns[0]",
        ".started_ns[0]",
        ".open_calls[0].ended_ns[0]",
        ".step_times.ended_ns[0]",
        ".samples[0].time_ns[0]",
        ".helper_errors[0].error.first.time_ns[0]",
    } <= set(before)
    assert after == {place: moment - AHEAD for place, moment in before.items()}
    assert shift_times(shifted, -AHEAD) == rank


def test_packed_calls_stay_packed_and_open_ones_open():
    call = fill(Call)
    rank = dataclasses.replace(fill(Rank), recent_calls=pack_calls([call, dataclasses.replace(call, ended_ns=None)]))
    calls = shift_times(rank, AHEAD).recent_calls
    assert isinstance(calls, CallLog)
    assert [one.ended_ns for one in calls] == [call.ended_ns - AHEAD, None]


def test_a_clock_that_is_far_ahead_gives_times_before_the_boot_of_this_host():
    rank = dataclasses.replace(fill(Rank), recent_calls=pack_calls([fill(Call)]))
    assert shift_times(rank, 10**10).recent_calls[0].started_ns == 5 * 10**9 - 10**10
