"""When DDP's reduction of gradients held up a backward: C++ makes it inside the backward, so no call shows it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from ddpdoctor.model.call_log import pack_calls
from ddpdoctor.model.steps import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.facts import Rank

StepKey = tuple[str, int]
"""A step: the group whose members end it together, and its number."""


def find_reductions(rank: Rank, from_ns: int) -> dict[int, tuple[StepKey, int]]:
    """Return, by the start of each backward since a time, its step and when the wait for its reduction began."""
    times = rank.step_times
    if times is None or not times.waits_us:
        return {}
    log = pack_calls(rank.recent_calls)
    calls = log[bisect_left(log.started_ns, from_ns) :]
    backwards = {which for which, kind in enumerate(calls.kinds) if kind.op == "backward"}
    columns = zip(calls.which, calls.started_ns, calls.ended_ns, strict=True)
    seen = [(start_ns, end_ns) for which, start_ns, end_ns in columns if which in backwards]
    starts_ns = [start_ns for start_ns, _ in seen]
    found: dict[int, tuple[StepKey, int]] = {}
    for number, ended_ns, wait_us in zip(times.numbers, times.ended_ns, times.waits_us[Phase.BACKWARD], strict=False):
        at = bisect_right(starts_ns, ended_ns) - 1
        if at >= 0 and wait_us:
            start_ns, end_ns = seen[at]
            found[start_ns] = ((times.group, number), max(start_ns, end_ns - wait_us * 1000))
    return found


def last_to_reduce(ranks: Iterable[Rank], from_ns: int) -> dict[StepKey, int]:
    """Return when the last rank was done with the computation of each step's backward."""
    latest: dict[StepKey, int] = {}
    for rank in ranks:
        for key, began_ns in find_reductions(rank, from_ns).values():
            latest[key] = max(latest.get(key, 0), began_ns)
    return latest
