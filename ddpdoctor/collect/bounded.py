"""Asks several things side by side, none for longer than a limit: what hangs in a call is left to itself."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Generic[Value]):
    """How a call ended. ``value`` is set where it returned; all is None where it did not answer in time."""

    value: Value | None
    error: OSError | None
    timed_out: bool
    duration_s: float


def ask_side_by_side(calls: Mapping[str, Callable[[], Value]], limit_s: float) -> dict[str, Reply[Value]]:
    """Make all calls at once and return what each said within the limit. What is no OSError is raised here."""
    running = {name: _Call(name, call) for name, call in calls.items()}
    started = time.monotonic()
    for one in running.values():
        one.start()
    return {name: one.reply(started + limit_s) for name, one in running.items()}


class _Call(threading.Thread, Generic[Value]):
    """One call. A daemon: getaddrinfo that waits for a dead server does not keep the process."""

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
        except Exception as defect:  # noqa: BLE001 - raised again where the reply is asked for
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
