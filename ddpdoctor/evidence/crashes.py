"""Ends of processes that left no traceback: C++ exceptions, and signals as shells and libraries report them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.evidence.natures import classify
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import MOST_RANKS, Exited, Failed, Trouble
from ddpdoctor.model.facts import signal_name

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
    r"(?:^|(?:it/s|s/it)[^\]]{0,80}\]\s*)"  # a progress bar ends without a line end
    r"(?:(?P<how>Segmentation fault|Bus error|Aborted|Floating point exception|Illegal instruction)"
    r"(?: \(core dumped\))?|(?P<killed>Killed))$"
)
_OPEN_MPI = re.compile(
    r"^\[(?P<host>[\w.-]{1,253}):(?P<pid>\d{1,9})\] Signal: (?P<how>Segmentation fault|Bus error|Aborted) \(\d+\)"
)
_REPORTED = (
    re.compile(r"Child process with PID (?P<pid>\d{1,9}) terminated with code (?P<code>-?\d{1,5})\b"),  # Lightning
    re.compile(
        r"process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,9}) on node (?P<host>[\w.-]{1,253})"
        r" (?:exited on signal (?P<signal>\d{1,2})|exiting)"
    ),
    re.compile(r"MPI_A(?:BORT|bort) was invoked on rank (?P<rank>\d{1,7}) in communicator MPI_COMM_WORLD"),
)
"""How a launcher reports the process that ended first, with its rank."""
_FIRST = re.compile(
    r"Process name: \[\[\d{1,9},\d{1,9}\],(?P<rank>\d{1,7})\]"
    r"|RANK (?P<number>\d{1,7}) PID (?P<pid>\d{1,9}) RUNNING AT (?P<host>[\w.-]{1,253})"
)
_END = re.compile(
    r"(?:KILLED BY SIGNAL: (?P<signal>\d{1,2})|(?:EXIT (?:CODE|STATUS)|Exit code):\s+(?P<code>\d{1,5}))\b"
)
"""The two lines in which Open MPI's and Intel's mpirun report that process."""
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Aborted": "SIGABRT", "Killed": "SIGKILL",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
_GATE = (
    "what():", "terminate called", "fault", "us error", "Aborted", "Killed", "exception", "nstruction", "Segfault",
    "Child process with", "process rank ", "MPI_ABORT was", "Process name: [[", "RUNNING AT ", "KILLED BY SIGNAL",
    "EXIT ", "Exit code:",
)  # fmt: skip
_OF_SHELLS = frozenset({6, 7, 9, 11, 15})
_NEAR = 6
_MOST = 4096
_WATCHDOG = ("Watchdog caught", "atchdog thread terminated")
"""ProcessGroupNCCL logs these before it ends the process."""


class CrashReader:
    """Finds processes that a C++ exception or a signal ended."""

    name = "crash"
    triggers = (
        b"terminate called", b"egmentation fault", b"us error", b"core dumped", b"Killed", b"rror", b"MPI_ABORT was",
        b"Child process with", b"process rank ", b"Process name: [[", b"RUNNING AT ",
    )  # fmt: skip

    def __init__(self) -> None:
        self._thrown: dict[Hashable, tuple[int, str]] = {}
        """The type that was thrown last in each stream, and its line."""
        self._first: tuple[int, dict[str, str]] = (-_NEAR, {})
        """The line in which mpirun named the process that ended first, and what it said."""

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
        if (first := _FIRST.search(text)) is not None:
            self._first = (line.number, _named(first))
            return ()
        number, named = self._first
        if named and line.number - number <= _NEAR and (end := _END.search(text)) is not None:
            self._first = (-_NEAR, {})
            return [_reported(line, {**named, **_named(end)})]
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
    if (reported := next((found for one in _REPORTED if (found := one.search(text)) is not None), None)) is not None:
        return [_reported(line, _named(reported))]
    if (shell := _SHELL.search(text)) is not None:
        common["who"] = replace(line.who, pid=int(shell["pid"]))
        return [Exited(signal=_SIGNALS[shell["how"]], **common)]
    if (alone := _ALONE.search(text.strip())) is not None:
        return [Exited(signal=_SIGNALS[alone["how"] or alone["killed"]], **common)]
    return []


def _named(found: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in found.groupdict().items() if value is not None}


def _reported(line: Line, named: dict[str, str]) -> Exited:
    """Return the end of the process that a launcher names. mpirun gives the process id 0 where it does not know it."""
    rank, pid = int(named.get("rank", named.get("number", MOST_RANKS))), int(named.get("pid", 0))
    who = replace(line.who, host=named.get("host", line.who.host), pid=pid or line.who.pid)
    who = replace(who, rank=rank) if rank < MOST_RANKS else who
    code = int(named.get("code", 1))
    signal = int(named.get("signal", 0)) or (-code if code < 0 else code - 128 if code - 128 in _OF_SHELLS else 0)
    common = origin_of(line, who)
    return (
        Exited(signal=signal_name(signal), first=True, **common) if signal else Exited(code=code, first=True, **common)
    )
