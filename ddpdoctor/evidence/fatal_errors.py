"""Python's own last words: "Fatal Python error: Segmentation fault", with the stack of the thread that did it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.evidence.foreign_frames import foreign_frame
from ddpdoctor.evidence.torch_heads import origin_of
from ddpdoctor.model.evidence import Exited

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact
    from ddpdoctor.model.stacks import Frame

_MOST_OPEN = 4096
_MOST_FRAMES = 100
_BEGINS = re.compile(
    r"Fatal Python error: (?P<how>Segmentation fault|Bus error|Floating[- ]point exception|Illegal instruction)"
)
"""Not "Aborted": that is how torch's watchdog and Gloo end a victim."""
_FRAME = re.compile(r'^\s+File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9}) in (?P<function>.{1,300}?)\s*$')
_SIGNALS = {"S": "SIGSEGV", "B": "SIGBUS", "F": "SIGFPE", "I": "SIGILL"}


@dataclass(slots=True)
class _Open:
    line: Line
    signal: str
    frames: list[Frame] = field(default_factory=list)
    current: bool = False
    """The lines are those of the thread that failed."""

    def done(self) -> Exited:
        return Exited(signal=self.signal, frames=tuple(reversed(self.frames)), **origin_of(self.line))


class FatalErrorReader:
    """Finds where a rank was when a signal ended it, if faulthandler was on."""

    name = "faulthandler"
    triggers = (b"Fatal Python error: ",)

    def __init__(self) -> None:
        self._open: dict[Hashable, _Open] = {}

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the end of a process when its stack has been read."""
        text = line.text
        if "Fatal Python error: " in text and (begins := _BEGINS.search(text)) is not None:
            found = self.end() if len(self._open) >= _MOST_OPEN else self._close(line.stream)
            self._open[line.stream] = _Open(line, _SIGNALS[begins["how"][0]])
            return found
        one = self._open.get(line.stream)
        if one is None or not text.strip():
            return ()
        if "(most recent call first):" in text:
            was, one.current = one.current, text.startswith("Current thread")
            return self._close(line.stream) if was else ()
        frame = _FRAME.match(text)
        if frame is None:
            return self._close(line.stream)
        if one.current and len(one.frames) < _MOST_FRAMES:
            one.frames.append(foreign_frame(frame["file"], int(frame["line"]), frame["function"]))
        return ()

    def end(self) -> Iterable[Fact]:
        """Return what was still open."""
        found = [one.done() for one in self._open.values()]
        self._open.clear()
        return found

    def _close(self, stream: Hashable) -> list[Fact]:
        one = self._open.pop(stream, None)
        return [] if one is None else [one.done()]
