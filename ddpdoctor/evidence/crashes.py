"""Ends of processes that left no traceback: C++ exceptions, and signals as shells and libraries report them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.natures import classify
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import Exited, Failed, Trouble

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_TERMINATE = re.compile(r"terminate called after throwing an instance of '(?P<type>[^']{1,200})'")
_WHAT = re.compile(r"what\(\):  ?(?P<message>.+)")
_SHELL = re.compile(
    r"(?:line (?P<line>\d{1,7}):|^\[\d+\][+-]?)\s+(?P<pid>\d{1,9}) (?P<how>Segmentation fault|Bus error|Aborted|Killed"
    r"|Floating point exception|Illegal instruction)\b"
)
_ALONE = re.compile(
    r"^(?:(?P<how>Segmentation fault|Bus error|Aborted|Floating point exception|Illegal instruction)"
    r"(?: \(core dumped\))?|(?P<killed>Killed))$"
)
_OPEN_MPI = re.compile(
    r"^\[(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9})\] Signal: (?P<how>Segmentation fault|Bus error|Aborted) \(\d+\)"
)
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Aborted": "SIGABRT", "Killed": "SIGKILL",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
_GATE = ("what():", "terminate called", "fault", "us error", "Aborted", "Killed", "exception", "nstruction", "Segfault")
_NEAR = 6
_MOST = 4096
_WATCHDOG = ("Watchdog caught", "atchdog thread terminated")
"""ProcessGroupNCCL logs these before it ends the process."""


class CrashReader:
    """Finds processes that a C++ exception or a signal ended."""

    name = "crash"
    triggers = (b"terminate called", b"egmentation fault", b"us error", b"core dumped", b"Killed", b"rror")

    def __init__(self) -> None:
        self._thrown: dict[Hashable, tuple[int, str]] = {}
        """The type that was thrown last in each stream, and its line."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if not any(words in text for words in _GATE):
            return ()
        if (terminate := _TERMINATE.search(text)) is not None:
            if len(self._thrown) > _MOST:
                self._thrown.clear()
            self._thrown[line.stream] = (line.number, terminate["type"])
        if (what := _WHAT.search(text)) is not None:
            return self._what(line, what["message"])
        return _signal(line)

    def end(self) -> Iterable[Fact]:
        """Return nothing, because no fact needs a second line."""
        return ()

    def _what(self, line: Line, message: str) -> list[Fact]:
        number, thrown = self._thrown.pop(line.stream, (-_NEAR, ""))
        kind = thrown if line.number - number <= _NEAR else ""
        if any(words in message for words in _WATCHDOG):
            return []
        reading = classify(kind, message)
        short = kind.rpartition("::")[2] or "C++ exception"
        return [
            Failed(
                type=short, message=quote(message), nature=reading.nature, peers=reading.peers,
                peer_hosts=reading.peer_hosts, memory=reading.memory or short == "bad_alloc", **origin_of(line),
            )
        ]  # fmt: skip


def _signal(line: Line) -> list[Fact]:
    text = line.text
    common = origin_of(line)
    if "Unexpected bus error encountered in worker" in text:
        problem = "a DataLoader worker ran out of shared memory"
        fix = (
            "give the container more (`--shm-size`, or an emptyDir of medium Memory at /dev/shm), or use fewer workers"
        )
        return [Trouble(kind="shm", problem=problem, fix=fix, **common)]
    if "Segfault encountered" in text:
        return [Exited(signal="SIGSEGV", **common)]
    if (mpi := _OPEN_MPI.search(text)) is not None:
        common["who"] = replace(line.who, host=mpi["host"], pid=int(mpi["pid"]))
        return [Exited(signal=_SIGNALS[mpi["how"]], **common)]
    if (shell := _SHELL.search(text)) is not None:
        common["who"] = replace(line.who, pid=int(shell["pid"]))
        return [Exited(signal=_SIGNALS[shell["how"]], **common)]
    if (alone := _ALONE.match(text.strip())) is not None:
        return [Exited(signal=_SIGNALS[alone["how"] or alone["killed"]], **common)]
    return []
