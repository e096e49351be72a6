"""Delivers signals to a thread, because Python runs handlers only in the main thread, which may be blocked in C++."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CaughtSignals:
    """A context manager for the main thread. Signals that would end the process wake another thread instead.

    A signal that is ignored stays ignored, such as SIGINT in a shell's background jobs.
    """

    def __init__(self) -> None:
        self._former: dict[signal.Signals, Any] = {}
        self._former_fd = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in CAUGHT:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, _leave_to_thread)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._selector.close()
        self._reader.close()
        self._writer.close()

    def listen_to(self, descriptor: int) -> None:
        """Also end ``wait`` when this descriptor becomes readable, once."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the other thread's ``wait``."""
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    def wait(self, limit_s: float) -> list[signal.Signals]:
        """Wait, and return the signals that have come; [] after the limit or a wake-up."""
        for key, _ in self._selector.select(limit_s):
            if key.fileobj is not self._reader:
                self._selector.unregister(key.fileobj)
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in CAUGHT]


def _leave_to_thread(_number: int, _frame: object) -> None:
    """Do nothing: Python has already written the number to the wakeup descriptor."""
