"""Ranks that failed only because they had waited as long as torch lets them: a hang that has ended by itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .watchdog import NEARLY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .failures import Failure
    from .states import State

_LIMIT = re.compile(r"(?:waiting |in |Timeout\(ms\)=|timeout: )(\d+) ?(?:ms\b|(?=[,)]))")
"""Of Gloo "Timed out waiting 4000ms for recv operation", of the monitored barrier "failed to pass monitoredBarrier in
4000 ms", of NCCL's watchdog "Timeout(ms)=600000)"."""


def all_gave_up(failures: Iterable[Failure], states: Mapping[int, State]) -> bool:
    """Return whether every rank was in a call that needs others, and one of them in fact waited for its time limit.

    The text alone does not tell: Gloo says "failed to pass monitoredBarrier in 1800000 ms" at once where a peer died.
    """
    if not all(state.waiting for state in states.values()):
        return False
    return any(_waited_the_limit(failure) for failure in failures)


def _waited_the_limit(failure: Failure) -> bool:
    if failure.call is None:
        return False
    if failure.error is None:
        return failure.call.device_state is not None and failure.timed_out
    match = _LIMIT.search(failure.error.message)
    return match is not None and failure.time_ns - failure.call.started_ns >= NEARLY * int(match[1]) * 1e6
