"""NCCL's own log (NCCL_DEBUG=WARN or INFO), of all versions from 2.7 to 2.30.

Every line has a head "host:pid:tid [device] NCCL INFO text". A warning has its place in the source before "NCCL WARN":
"file.cc:123", since 2.30 "file.cc:123 (function)". Up to 2.26 an empty line comes first. A time may stand before all.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.errors import link_of, warned
from ddpdoctor.evidence.frameworks import begins_run
from ddpdoctor.evidence.nccl_calls import Calls
from ddpdoctor.evidence.nccl_notes import interface_notes, version_note
from ddpdoctor.evidence.nccl_paths import WANTED, Paths
from ddpdoctor.evidence.nccl_processes import NcclProcesses
from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Hint, Who
from ddpdoctor.model.nccl_warnings import read_warning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

_HEAD = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]{0,252}):(?P<pid>\d{1,10}):\d{1,10} \[[\w-]{1,8}\] (?:(?P<place>\S{1,120}:\d{1,6}) )?"
    r"(?:\([^()]{0,80}\) )?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_WARN = re.compile(r"(?:(?P<place>[\w./-]{1,120}:\d{1,6}) )?(?:\([^()]{0,80}\) )?NCCL WARN (?P<text>.+)")
_VERSION = re.compile(r"NCCL version (?P<nccl>\d+\.\d+\.\d+)(?:\+cuda(?P<cuda>\d+\.\d+))?")
_WAY_UP = re.compile(r" -> (?P<code>[1-7])(?: \[|$)")
_WANTED = re.compile(
    rf"Init (?:START|COMPLETE)|(?:Abort|Destroy) COMPLETE|Bootstrap ?: Using|{WANTED}| -> [1-7](?: \[|$)|: opCount "
)
"""The INFO lines that are read. Any other line costs one search."""
_WAY_UP_WORDS = {1: "a CUDA call of NCCL failed", 2: "a system call of NCCL failed"}
_REMOTE = 6
"""ncclRemoteError. Further up it becomes 3, internal error, so the first code of a process counts."""


NCCL_INFO = b"NCCL INFO"


def is_nccl_info(text: str) -> bool:
    """Return whether a line is one that only ``NcclLogReader`` reads: with NCCL_DEBUG=INFO they are most of a log."""
    return " NCCL INFO " in text and "NCCL version " not in text


def is_read_info(text: str) -> bool:
    """Return whether such a line has something to read."""
    return _WANTED.search(text) is not None


class NcclLogReader:
    """Reads NCCL's warnings, and what its INFO lines say about processes, communicators, transports and calls."""

    name = "NCCL log"
    triggers = (b"NCCL WARN", NCCL_INFO, b"NCCL version")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._processes = NcclProcesses()
        self._version: Hint | None = None
        self._paths = Paths()
        self._calls = Calls()
        self._warned: set[tuple[str, int]] = set()
        self._way_up: dict[tuple[str, int], tuple[int, Line]] = {}
        self._ended = False

    def read(self, line: Line) -> Iterable[Fact]:
        """Return what a warning says. Facts about processes and transports come when the log, or a run in it, ends."""
        text = line.text
        if "NCCL" not in text:
            return self.end() if self._ended and begins_run(text) else ()
        if "NCCL WARN " in text:
            self._ended = True
            return self._warning(line)
        if "NCCL INFO " in text and "NCCL version " not in text:
            if _WANTED.search(text):
                self._info(line)
            return ()
        found = _VERSION.search(text)
        if found is None:
            return ()
        facts = list(self.end()) if self._ended else []
        self._version = version_note(found["nccl"], found["cuda"], line)
        return facts

    def end(self) -> Iterable[Fact]:
        """Return facts about ranks and processes, waits in the set-up of communicators, calls, and transports."""
        facts = [*self._processes.tell(), *self._calls.tell(self._processes), *self._failed_silently()]
        facts += [] if self._version is None else [self._version]
        facts += [*self._paths.tell(self._processes), *interface_notes(self._processes)]
        self._begin()
        return facts

    def _info(self, line: Line) -> None:
        found = _HEAD.search(line.text)
        if found is None:
            return
        host, pid, text = found["host"], int(found["pid"]), found["text"]
        process = self._processes.get(host, pid, line)
        if process is None:
            return
        if " via " in text:
            self._paths.read(process, text, line)
        elif ": opCount " in text:
            self._calls.read(process, text, line)
        elif "omm 0x" in text or text.startswith("Bootstrap"):
            self._ended = self._ended or text.endswith(("Abort COMPLETE", "Destroy COMPLETE"))
            self._processes.read(process, text, line)
        elif (code := _WAY_UP.search(text)) is not None:
            self._ended = True
            self._way_up.setdefault((host, pid), (int(code["code"]), line))
        else:
            self._paths.read(process, text, line)

    def _warning(self, line: Line) -> list[Fact]:
        found = _HEAD.search(line.text)
        if found is None:  # the head was cut off, or belongs to another writer
            bare = _WARN.search(line.text)
            return [] if bare is None else [warned(bare["text"], bare["place"], _common(line.who, line))]
        host, pid = found["host"], int(found["pid"])
        self._warned.add((host, pid))
        process = self._processes.get(host, pid, line)
        who = self._processes.who(process) if process is not None else replace(line.who, host=host, pid=pid)
        return [warned(found["text"], found["place"], _common(who, line))]

    def _failed_silently(self) -> Iterator[Fact]:
        """Yield the failures of processes whose lines only pass on an error code, without the warning itself."""
        for (host, pid), (code, line) in self._way_up.items():
            if (host, pid) in self._warned:
                continue
            process = self._processes.get(host, pid, line)
            who = self._processes.who(process) if process is not None else Who(host=host, pid=pid)
            spot, said = line.spot(), quote(line.text)
            if code == _REMOTE:
                warning = read_warning("Connection closed by remote peer")
                assert warning is not None
                yield link_of(warning, _common(who, line))
            elif code in _WAY_UP_WORDS:
                words = _WAY_UP_WORDS[code]
                yield Hint(who=who, spot=spot, time=line.time, said=said, words=words, kind="nccl-warning")


def _common(who: Who, line: Line) -> dict[str, Any]:
    return {"who": who, "spot": line.spot(), "time": line.time, "said": quote(line.text)}
