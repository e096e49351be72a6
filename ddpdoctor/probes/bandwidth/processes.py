"""Watches the processes of the ranks on this host: whether they run, are stopped or gone, and how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.collect.proc import read_process
from ddpdoctor.collect.system import read_link, read_text

PROC = Path("/proc")
GONE = frozenset({"", "Z", "X"})
"""State letters of a process that has ended; "" if it no longer exists."""
FROZEN = frozenset({"T", "t"})
"""State letters of a process that a signal or a debugger has stopped."""
EXITED = "exit status "
"""Start of the description of a process that ended by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Which process a rank is. Two pids can be compared only if ``space`` is the same."""

    space: str
    """The boot id of the machine, and the pid namespace."""
    pid: int
    started_ticks: int


def read_home() -> Home | None:
    """Return which process this is, or None if /proc does not say."""
    own = read_process(os.getpid())
    boot, namespace = read_text(PROC / "sys/kernel/random/boot_id").strip(), read_link(PROC / "self/ns/pid")
    if own is None or not boot or not namespace:
        return None
    return Home(space=f"{boot} {namespace}", pid=own.pid, started_ticks=own.start_ticks)


def describe_end(wait_status: int) -> str:
    """Return how a process ended: "SIGKILL", "exit status 3"."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f"{EXITED}{code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class LocalRanks:
    """The processes of other ranks that this process can see."""

    def __init__(self, own: Home | None) -> None:
        """``own`` is this process. If it is None, no other process can be seen."""
        self._own = own
        self._homes: dict[int, Home] = {}
        self._pidfds: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        """How processes ended, by rank. It can be seen only for a moment, until their parent reaps them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that can be seen, in order."""
        return tuple(sorted(self._homes))

    def add(self, rank: int, home: Home) -> int | None:
        """Add a rank. Return a descriptor that becomes readable when it ends, or None if there is none.

        A rank on another machine or in another pid namespace is not added.
        """
        if self._own is None or home.space != self._own.space:
            return None
        self._homes[rank] = home
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a sandbox
            self._pidfds[rank] = os.pidfd_open(home.pid)
            return self._pidfds[rank]
        return None

    def states(self) -> dict[int, str]:
        """Return the state letter of each rank's process, "" if it is gone. Remember how processes ended."""
        return {rank: self._state(rank, home) for rank, home in self._homes.items()}

    def gone(self) -> frozenset[int]:
        """Return the ranks whose processes have ended."""
        return frozenset(rank for rank, state in self.states().items() if state in GONE)

    def unable(self) -> frozenset[int]:
        """Return the ranks whose processes cannot answer: they have ended or are stopped."""
        return frozenset(rank for rank, state in self.states().items() if state in GONE | FROZEN)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()

    def _state(self, rank: int, home: Home) -> str:
        seen = read_process(home.pid)
        if seen is None or seen.start_ticks != home.started_ticks:
            return ""
        if seen.state in GONE and rank not in self.ends:
            self.ends[rank] = describe_end(seen.exit_status or 0)
        return seen.state
