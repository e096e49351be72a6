"""Finds how processes ended, from their parent, the kernel, their own records or the launcher's exit status."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ddpdoctor.collect.run.agent_log import End
from ddpdoctor.collect.run.evidence import read_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from ddpdoctor.collect.run.sources import Source
    from ddpdoctor.collect.run.watched import WatchedJob
    from ddpdoctor.recorder.storage.ring_reading import RingContent

SHELL_SIGNAL = 128
"""A shell adds this to the signal's number when a signal ended its command."""
LAST_SIGNAL = 64
SIGTERM = 15
ASKED_TOGETHER_NS = 30_000_000
"""One launcher sends SIGTERM to its ranks within this time. Our choice: a rank takes 16 ms to write its stack."""
SAME_SIGNAL_NS = 1_000_000_000
"""A signal to the whole process group reaches ranks at most this much sooner than ``wrap``. Our choice."""
_FATAL = {
    "Segmentation fault": 11,
    "Aborted": 6,
    "Bus error": 7,
    "Floating-point exception": 8,
    "Illegal instruction": 4,
}  # fmt: skip
"""Faulthandler's names for the signals on which it dumps."""


def find_ends(
    sources: Iterable[Source],
    contents: Mapping[int, RingContent],
    folder: Path,
    watch: WatchedJob,
    known: Mapping[int, End],
) -> dict[int, End]:
    """Return how processes ended, by pid; ``known`` comes from their parents, and the rest is inferred."""
    ends = dict(known)
    unexplained = []
    for source in sources:
        row = watch.of(source.pid)
        shell = known.get(source.stands_for or 0)
        gone_ns = row.ended_ns or (shell.at if shell else None)
        if source.pid in ends or gone_ns is None:
            continue
        code = row.code
        if code is None:
            code = _code_of(contents.get(source.pid), folder, shell)
        if code is None:
            unexplained.append((source.pid, gone_ns))
        else:
            ends[source.pid] = End(pid=source.pid, code=code, at=gone_ns)
    signal = _signal_in(watch.launcher_status)
    if len(unexplained) == 1 and signal is not None:
        pid, gone_ns = unexplained[0]
        ends[pid] = End(pid=pid, code=-signal, at=gone_ns)
    return ends


def stop_of_others(sources: Iterable[Source], ends: Mapping[int, End], watch: WatchedJob) -> int | None:
    """Return when a launcher that does not log it began to stop the ranks, or None if it did not.

    If one rank gets SIGTERM before any other has ended, somebody killed it, and the launcher then stopped the others.
    """
    terminated, others = [], []
    for source in sources:
        end = ends.get(source.pid)
        if end is not None and end.code == -SIGTERM:
            terminated.append(watch.of(source.pid).asked_to_end_ns or end.at)
        elif end is not None and end.code != 0:
            others.append(end.at)
    terminated.sort()
    if not terminated:
        return None
    if others and min(others) < terminated[0]:
        return terminated[0]
    if len(terminated) == 1:
        return None
    return terminated[1] if terminated[1] - terminated[0] > ASKED_TOGETHER_NS else terminated[0]


def interruption_ns(sources: Iterable[Source], ends: Mapping[int, End], watch: WatchedJob) -> int | None:
    """Return when somebody interrupted the job, or None if nobody did.

    Ctrl-C and ``scancel`` send the signal to the whole process group, so ranks may die of it before ``wrap`` acts.
    """
    noted = watch.interrupted_ns
    if not noted:
        return None
    times_ns = [noted]
    for source in sources:
        end, row = ends.get(source.pid), watch.of(source.pid)
        if end is not None and end.code == -SIGTERM:
            times_ns.append(min(filter(None, (row.asked_to_end_ns, row.ended_ns, end.at))))
    return min(time_ns for time_ns in times_ns if time_ns > noted - SAME_SIGNAL_NS)


def _code_of(content: RingContent | None, folder: Path, shell: End | None) -> int | None:
    """Return the exit status or signal from what the process left behind, or from the shell that waited for it."""
    if content is None:
        return _of_shell(shell)
    name = f"{content.pid}-{content.start_ticks}"
    fatal = re.search(r"^Fatal Python error: (.*)$", read_text(folder / "evidence" / f"{name}.dump"), re.MULTILINE)
    if fatal is not None and fatal.group(1) in _FATAL:
        return -_FATAL[fatal.group(1)]
    if read_text(folder / "evidence" / f"{name}.term"):
        return -SIGTERM
    left = _left_by_itself(content)
    return left if left is not None else _of_shell(shell)


def _left_by_itself(content: RingContent) -> int | None:
    """Return the exit status of a process that raised, called ``exit``, or reached the end of its script."""
    if any(n.get("k") == "raised" and n.get("uncaught") and n.get("main") for n in content.notes):
        return 1
    leaving = next((note for note in reversed(content.notes) if note.get("k") == "exit"), None)
    if leaving is not None:
        asked = str(leaving.get("status"))
        return int(asked) if asked.isdecimal() else int(asked not in ("None", "False"))
    return 0 if content.cells["main_ended_ns"] or content.cells["exited_ns"] else None


def _of_shell(shell: End | None) -> int | None:
    if shell is None:
        return None
    signal = _signal_in(shell.code)
    return -signal if signal is not None else shell.code


def _signal_in(status: int | None) -> int | None:
    """Return the signal that a shell's or a process's status stands for, or None."""
    if status is None or status == 0:
        return None
    if status < 0:
        return -status
    return status - SHELL_SIGNAL if SHELL_SIGNAL < status <= SHELL_SIGNAL + LAST_SIGNAL else None
