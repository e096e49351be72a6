"""Waits for a call that may hang, and no longer than it is worth."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")


def within(limit_s: float, call: Callable[[], Value], otherwise: Value) -> Value:
    """Return what ``call`` returns, or ``otherwise`` where it raises OSError or takes longer than the limit.

    The call runs on a daemon thread, which is left behind where it hangs.
    """
    found: list[Value] = []

    def run() -> None:
        try:
            found.append(call())
        except OSError:
            return

    thread = threading.Thread(target=run, name="ddpdoctor-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else otherwise
