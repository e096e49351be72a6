"""Makes several calls in parallel with a time limit, and leaves calls that hang behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[Value]):
    """How a call ended; ``value`` is set if it returned, and ``value`` and ``error`` are None if it timed out."""

    value: Value | None
    error: OSError | None
    timed_out: bool
    duration_s: float


def ask_side_by_side(
    calls: Mapping[str, Callable[[], Value]], limit_s: float | Mapping[str, float]
) -> dict[str, Reply[Value]]:
    """Make all calls at once, and return their replies within the limit, which may differ by call.

    Errors other than OSError are raised here.
    """
    running = {name: _Call(name, call) for name, call in calls.items()}
    started = time.monotonic()
    for one in running.values():
        one.start()
    limits = limit_s if isinstance(limit_s, Mapping) else dict.fromkeys(calls, limit_s)
    return {name: one.reply(started + limits[name]) for name, one in running.items()}


class _Call(threading.Thread, Generic[Value]):
    """One call, in a daemon thread: a getaddrinfo that waits for a dead server must not keep the process alive."""

    def __init__(self, name: str, call: Callable[[], Value]) -> None:
        super().__init__(name=f"ddpdoctor-{name}", daemon=True)
        self._call = call
        self._value: Value | None = None
        self._error: OSError | None = None
        self._defect: BaseException | None = None
        self._asked_at = time.monotonic()
        self._ended: float | None = None

    def run(self) -> None:
        self._asked_at = time.monotonic()
        try:
            self._value = self._call()
        except OSError as error:
            self._error = error
        except Exception as defect:  # noqa: BLE001 - reply() raises it again
            self._defect = defect
        self._ended = time.monotonic()

    def reply(self, deadline: float) -> Reply[Value]:
        self.join(max(0.0, deadline - time.monotonic()))
        ended = self._ended
        if ended is None:
            return Reply(value=None, error=None, timed_out=True, duration_s=time.monotonic() - self._asked_at)
        if self._defect is not None:
            raise self._defect
        return Reply(value=self._value, error=self._error, timed_out=False, duration_s=ended - self._asked_at)
