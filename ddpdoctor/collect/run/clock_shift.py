"""Converts times from another host's CLOCK_MONOTONIC to that of the reporting host."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.call_log import CallLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.model.facts import BeforeCall, Call, Child, Raised, Rank
    from ddpdoctor.model.stacks import Look

Kind = TypeVar("Kind")


def shift_rank(rank: Rank, ahead_ns: int) -> Rank:
    """Return a rank with its times moved to the reporting host's clock; its own clock is ``ahead_ns`` ahead."""
    if ahead_ns == 0:
        return rank
    return replace(
        rank,
        ended_ns=_shift(rank.ended_ns, ahead_ns),
        started_ns=_shift(rank.started_ns, ahead_ns),
        main_ended_ns=_shift(rank.main_ended_ns, ahead_ns),
        before_call=_shift_before(rank.before_call, ahead_ns),
        frozen_since_ns=_shift(rank.frozen_since_ns, ahead_ns),
        last_progress_ns=_shift(rank.last_progress_ns, ahead_ns),
        open_calls=tuple(_shift_call(call, ahead_ns) for call in rank.open_calls),
        recent_calls=_shift_calls(rank, ahead_ns),
        looks=_shift_looks(rank.looks, ahead_ns),
        children=tuple(_shift_child(child, ahead_ns) for child in rank.children),
        raised=tuple(_shift_raised(raised, ahead_ns) for raised in rank.raised),
        handled=None if rank.handled is None else _shift_raised(rank.handled, ahead_ns),
        loaders=None if rank.loaders is None else tuple(_shift_loader(one, ahead_ns) for one in rank.loaders),
    )


def _shift(moment_ns: int | None, ahead_ns: int) -> int | None:
    return None if moment_ns is None else moment_ns - ahead_ns


def _shift_before(before: BeforeCall | None, ahead_ns: int) -> BeforeCall | None:
    return before and replace(before, until_ns=before.until_ns and before.until_ns - ahead_ns)


def _shift_call(call: Call, ahead_ns: int) -> Call:
    return replace(call, started_ns=call.started_ns - ahead_ns, ended_ns=_shift(call.ended_ns, ahead_ns))


def _shift_calls(rank: Rank, ahead_ns: int) -> CallLog | tuple[Call, ...]:
    calls = rank.recent_calls
    if not isinstance(calls, CallLog):
        return tuple(_shift_call(call, ahead_ns) for call in calls)
    return CallLog(
        kinds=calls.kinds,
        which=calls.which,
        indexes=calls.indexes,
        numbers=calls.numbers,
        started_ns=array("q", [moment - ahead_ns for moment in calls.started_ns]),
        ended_ns=array("q", [moment - ahead_ns if moment else 0 for moment in calls.ended_ns]),
    )


def _shift_looks(looks: Iterable[Look], ahead_ns: int) -> tuple[Look, ...]:
    return tuple(replace(look, time_ns=look.time_ns - ahead_ns) for look in looks)


def _shift_child(child: Child, ahead_ns: int) -> Child:
    return replace(child, looks=_shift_looks(child.looks, ahead_ns))


def _shift_raised(raised: Raised, ahead_ns: int) -> Raised:
    return replace(raised, time_ns=raised.time_ns - ahead_ns)


def _shift_loader(loader: LoaderSeen, ahead_ns: int) -> LoaderSeen:
    epochs = tuple(
        replace(epoch, begun_ns=epoch.begun_ns - ahead_ns, ended_ns=_shift(epoch.ended_ns, ahead_ns))
        for epoch in loader.epochs
    )
    strays = tuple(replace(one, time_ns=one.time_ns - ahead_ns) for one in loader.stray_calls)
    return replace(loader, epochs=epochs, stray_calls=strays)
