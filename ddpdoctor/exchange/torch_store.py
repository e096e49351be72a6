"""A client of the launcher's own store, torch's TCPStore, which every rank of the job must reach anyway.

With both of torchrun's rendezvous, static and c10d, the agent of node 0 serves it at MASTER_ADDR:MASTER_PORT for as
long as that agent lives. With TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 must serve it, and this module then does.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.reach import reach
from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from ddpdoctor.model.launch import Launch

Given = TypeVar("Given")

CALL_LIMIT_S = 10.0
"""Our choice. torch's own calls have no limit if a connection stays open and nothing comes back."""


class TorchStore:
    """A client of a TCPStore. Its calls run in their own thread, so that a caller can give up on one that hangs."""

    def __init__(self, store: Any, prefix: str, call_limit_s: float = CALL_LIMIT_S) -> None:
        """Take a TCPStore; ``prefix`` separates ddpdoctor's keys from the launcher's and the job's."""
        self._store, self._prefix, self._limit_s = store, prefix, call_limit_s
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ddpdoctor-store", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        """Store a value under a key."""
        self._call(lambda: self._store.set(self._prefix + key, value))

    def look(self, key: str) -> bytes | None:
        """Return the value of a key, or None if it has none yet."""
        name = self._prefix + key
        return self._call(lambda: self._store.get(name) if self._store.check([name]) else None)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return self._call(lambda: int(self._store.add(self._prefix + key, amount)))

    def forget(self, key: str) -> None:
        """Remove a value."""
        self._call(lambda: self._store.delete_key(self._prefix + key))

    def close(self) -> None:
        """End the thread, which also closes the connection."""
        self._calls.put(None)

    def _call(self, call: Callable[[], Given]) -> Given:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, answers))
        try:
            answer = answers.get(timeout=self._limit_s)
        except queue.Empty:
            raise StoreError(f"the launcher's store did not answer within {self._limit_s:g} s") from None
        if isinstance(answer, Exception):
            raise StoreError(f"the launcher's store failed: {str(answer).partition(chr(10))[0]}") from answer
        given: Given = answer
        return given

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, answers = item
            try:
                answers.put(call())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
                answers.put(error)
        self._store = None


def open_torch_store(launch: Launch, limit_s: float) -> TorchStore:
    """Join the store of a job that torchrun started; raises ``StoreError`` with what was tried and seen.

    Imports torch. A plain connection is tried first, because torch's own error does not say what was in the way.
    """
    started = time.monotonic()
    serves = not launch.agent_store and launch.rank == 0
    if not serves:
        reach(launch.hosts, launch.port, limit_s, _hang_up)
    left_s = max(1.0, started + limit_s - time.monotonic())
    return TorchStore(_make_store(launch, left_s, serves=serves), f"ddpdoctor/{launch.run}/")


def _hang_up(connection: socket.socket) -> bool:
    connection.close()
    return True


def _make_store(launch: Launch, limit_s: float, *, serves: bool) -> Any:
    with _torch_is_quiet():
        from torch.distributed import TCPStore
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def make() -> None:
        try:
            made.put(
                TCPStore(
                    launch.hosts[0],
                    launch.port,
                    is_master=serves,
                    wait_for_workers=False,
                    multi_tenant=serves,
                    timeout=timedelta(seconds=limit_s),
                )
            )
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            made.put(error)

    threading.Thread(target=make, name="ddpdoctor-join", daemon=True).start()
    try:
        # If another kind of server accepts the connection and stays silent, torch hangs beyond its limit.
        store = made.get(timeout=limit_s + 2)
    except queue.Empty:
        store = TimeoutError("no answer")
    if isinstance(store, Exception):
        first_line = str(store).partition("\n")[0]
        raise StoreError(f"{launch.hosts[0]}:{launch.port} answers, and not as torchrun's store does: {first_line}")
    return store


@contextmanager
def _torch_is_quiet() -> Iterator[None]:
    """Silence torch's C++ log, whose level torch reads while it loads. A peer that leaves is no error here."""
    name = "TORCH_CPP_LOG_LEVEL"
    former = os.environ.get(name)
    os.environ[name] = "FATAL"
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = former
