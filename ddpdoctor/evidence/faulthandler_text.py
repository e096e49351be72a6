"""Reads stacks that Python's faulthandler writes into a log: on a timer, on a signal, on a fatal signal."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.evidence.foreign_frames import foreign_frame
from ddpdoctor.evidence.stack_meaning import doing_of, is_agent, is_worker, operation_of
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import Exited, Stacked

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.stacks import Frame

_MOST_OPEN = 4096
_MOST_FRAMES = 100
_MOST_THREADS = 512
_FATAL = re.compile(r"Fatal Python error: (?P<how>[A-Z][\w -]{1,60})")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE", "Illegal instruction": "SIGILL",
}  # fmt: skip
"""Not "Aborted": that is how torch's watchdog and Gloo end a victim."""
_THREAD = re.compile(r"^(?P<how>Current thread|Thread) 0x[0-9a-fA-F]+.{0,60}\(most recent call first\):\s*$")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9}) in (?P<function>.{1,300}?)\s*$')
_NO_FRAME = "<no Python frame>"


@dataclass(slots=True)
class _Dump:
    """The stacks of one process, innermost frames first."""

    line: Line
    fatal: str = ""
    threads: list[list[Frame]] = field(default_factory=list)
    current: list[Frame] = field(default_factory=list)

    def done(self) -> list[Fact]:
        common = origin_of(self.line)
        if self.fatal:
            signal, frames = _SIGNALS.get(self.fatal, ""), tuple(reversed(self.current))
            return [Exited(signal=signal, frames=frames, **common)] if signal else []
        stacks = [tuple(reversed(thread)) for thread in self.threads if thread]
        main = next((stack for stack in stacks if stack[0].function == "<module>"), None)
        main = main or tuple(reversed(self.current))
        if not main or is_agent(main):
            return []
        return [
            Stacked(
                doing=doing_of(main), frames=main, operation=operation_of(main), worker=is_worker(main), **common
            )
        ]  # fmt: skip


class FaulthandlerReader:
    """Finds where a rank was when a signal ended it, and the stacks that it wrote while it ran."""

    name = "faulthandler"
    triggers = (b"Fatal Python error: ", b"Thread 0x", b"Timeout (")

    def __init__(self) -> None:
        self._open: dict[Hashable, _Dump] = {}

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts of a process once its stacks are complete."""
        text = line.text
        if "Fatal Python error: " in text and (fatal := _FATAL.search(text)) is not None:
            found = self.end() if len(self._open) >= _MOST_OPEN else self._close(line.stream)
            self._open[line.stream] = _Dump(line, fatal["how"])
            return found
        thread = _THREAD.match(text) if "most recent call first" in text else None
        dump = self._open.get(line.stream)
        if dump is None:
            if thread is not None and len(self._open) < _MOST_OPEN:
                self._begin_thread(self._open.setdefault(line.stream, _Dump(line)), thread)
            return ()
        if thread is not None:
            self._begin_thread(dump, thread)
            return ()
        return self._read_on(line, dump)

    def end(self) -> Iterable[Fact]:
        """Return the facts of stacks that the log cuts off."""
        found = [fact for dump in self._open.values() for fact in dump.done()]
        self._open.clear()
        return found

    def _begin_thread(self, dump: _Dump, thread: re.Match[str]) -> None:
        if len(dump.threads) < _MOST_THREADS:
            dump.threads.append([])
            if thread["how"] == "Current thread":
                dump.current = dump.threads[-1]

    def _read_on(self, line: Line, dump: _Dump) -> Iterable[Fact]:
        text = line.text
        frame = _FRAME.match(text)
        if frame is None:
            return self._close(line.stream) if text.strip() and _NO_FRAME not in text else ()
        if dump.threads and len(dump.threads[-1]) < _MOST_FRAMES:
            dump.threads[-1].append(foreign_frame(frame["file"], int(frame["line"]), frame["function"]))
        return ()

    def _close(self, stream: Hashable) -> list[Fact]:
        dump = self._open.pop(stream, None)
        return [] if dump is None else dump.done()
