"""Puts the lines of one Python traceback together, with its chain of causes, groups and nested tracebacks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from ddpdoctor.evidence.foreign_frames import foreign_frame

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.stacks import Frame

HEADER = "Traceback (most recent call last):"
_MOST_FRAMES = 120
_MOST_MESSAGE_LINES = 30
_MOST_CHARACTERS = 4000
_FILE = re.compile(r'^\s+File "(?P<file>[^"\n]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,300}?))?\s*$')
_RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200}(?:\(\w{1,100}\))?)(?::(?: (?P<message>.*))?)?$")
_CLASS_NAME = re.compile(
    r"(?:Error|Exception|Interrupt|Exit|Iteration|Warning|Group|Empty|Full|Failure|Timeout|Expired|Fault|NotFound|Lost)$"
)
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_NESTED = re.compile(
    r"^(?:Original Traceback \(most recent call last\):|-- Process (?P<process>\d{1,7}) terminated with)"
)
_SUB = re.compile(r"^\s*\+[-+]*-{4,}(?P<number> \d+ -)?")
"""What stands between the exceptions of a group, and after the last one."""
_BORDER = re.compile(r"^\s*(?:\+ (?=Exception Group)|\| )")
_HEAD = re.compile(
    r"^\[?[IWEF]\d{3,4} \d\d:|^\[[IWEF] |^frame #|^\[\d{4}-|^Exception raised from|^\s*=+\s*$|^\s*-{10,}\s*$"
)
_CONTINUES = re.compile(
    r"^(?:nccl\w+Error:|Last error:|CUDA kernel errors|For debugging consider|Compile with `TORCH|Device-side assert"
    r"|Collectives differ|Search for `cuda|Expected to have finished|\t)"
)
_FLOW = frozenset(("Empty", "Full", "StopIteration", "StopAsyncIteration"))
"""Exceptions that control a loop. An exception raised while one of them is handled is the error."""


class Fed(Enum):
    """How a traceback relates to a line."""

    TAKEN = auto()
    REFUSED = auto()
    """It is not a line of this traceback, which may go on."""
    ENDED = auto()
    """It is not a line of this traceback, which has ended."""


class _At(Enum):
    FRAMES = auto()
    MESSAGE = auto()
    LINK = auto()
    """After a line that announces another traceback of the chain."""


@dataclass(slots=True)
class RaisedText:
    """One exception of a chain."""

    frames: list[Frame] = field(default_factory=list)
    """Outermost first."""
    type: str = ""
    lines: list[str] = field(default_factory=list)
    """The message."""
    nested: bool = False
    """It was raised in another process or thread, or is part of a group; the exception before it reports it."""

    @property
    def name(self) -> str:
        """The class without its module."""
        return self.type.partition("(")[0].rpartition(".")[2]

    @property
    def message(self) -> str:
        """The message; its lines are joined by line ends."""
        return "\n".join(self.lines)[:_MOST_CHARACTERS].strip()


@dataclass(slots=True)
class Traceback:
    """A traceback that is being read. ``sure``: all lines that it is given were written by one process."""

    sure: bool = False
    chain: list[RaisedText] = field(default_factory=lambda: [RaisedText()])
    process: int | None = None
    """The number of the spawned process that failed, if ``torch.multiprocessing`` says so."""
    wants_source: bool = False
    """Whether the last line was that of a frame, so that its source follows."""
    _at: _At = _At.FRAMES
    _adjacent: bool = True
    """Whether the previous line was taken too."""

    @property
    def is_open(self) -> bool:
        """Whether frames or the exception's line are still to come."""
        return self._at is not _At.MESSAGE

    @property
    def is_new(self) -> bool:
        """Whether the last line was that of an exception, not one of a message."""
        return not self.is_open and len(self.chain[-1].lines) == 1

    @property
    def depth(self) -> int:
        """How many frames the exception that is being read has by now."""
        return len(self.chain[-1].frames)

    def feed(self, text: str) -> Fed:
        """Take the next line, if it belongs to this traceback."""
        if self._at is not _At.MESSAGE:
            fed = self._feed_frames(text) if self._at is _At.FRAMES else self._feed_link(text)
        else:
            fed = self._feed_message(text)
        self._adjacent = fed is Fed.TAKEN
        return fed

    def _feed_frames(self, text: str) -> Fed:
        self.wants_source = False
        if (match := _FILE.match(_BORDER.sub("", text))) is not None:
            frames = self.chain[-1].frames
            if len(frames) >= _MOST_FRAMES:
                del frames[_MOST_FRAMES // 2]
            frames.append(foreign_frame(match["file"], int(match["line"]), match["function"] or "<module>"))
            self.wants_source = True
            return Fed.TAKEN
        if text.endswith(HEADER):
            return Fed.REFUSED
        if not text or text[0] in " \t":
            return Fed.TAKEN
        return self._feed_raised(text)

    def _feed_raised(self, text: str) -> Fed:
        match = _RAISED.match(text)
        if match is None or not self._is_class(match["type"], text):
            return Fed.REFUSED
        raised = self.chain[-1]
        raised.type, raised.lines = match["type"], [match["message"] or ""]
        self._at = _At.MESSAGE
        return Fed.TAKEN

    def _is_class(self, name: str, text: str) -> bool:
        """Return whether this can be the exception's line, and not one that another process wrote in between."""
        if self.sure or _CLASS_NAME.search(name.partition("(")[0]):
            return True
        return (self._adjacent and " " not in name and bool(self.chain[-1].frames)) or ("." in name and ": " in text)

    def _feed_link(self, text: str) -> Fed:
        if text.strip() and not text.rstrip().endswith(HEADER):
            return Fed.REFUSED if not _FILE.match(text) else self._go_on(text)
        if text.strip():
            self._at = _At.FRAMES
        return Fed.TAKEN

    def _go_on(self, text: str) -> Fed:
        self._at = _At.FRAMES
        return self._feed_frames(text)

    def _feed_message(self, text: str) -> Fed:
        stripped = text.strip()
        if stripped in _CHAINED:
            return self._link(nested=False)
        if (nested := _NESTED.match(stripped)) is not None:
            self.process = int(nested["process"]) if nested["process"] else self.process
            fed = self._link(nested=True)
            self._at = _At.FRAMES if nested["process"] is None else _At.LINK
            return fed
        if self._in_group() and (sub := _SUB.match(text)) is not None:
            return self._link(nested=True) if sub["number"] else Fed.ENDED
        if not stripped:
            return Fed.TAKEN
        return self._feed_more(text)

    def _feed_more(self, text: str) -> Fed:
        lines = self.chain[-1].lines
        goes_on = self.sure or _CONTINUES.match(text) or lines[-1].strip() == "Last error:"
        is_other = text.rstrip().endswith(HEADER) or _HEAD.match(text)
        if is_other or not goes_on or len(lines) >= _MOST_MESSAGE_LINES:
            return Fed.ENDED
        lines.append(text)
        return Fed.TAKEN

    def _in_group(self) -> bool:
        return any(one.name.endswith("ExceptionGroup") for one in self.chain)

    def _link(self, *, nested: bool) -> Fed:
        self.chain.append(RaisedText(nested=nested))
        self._at = _At.LINK
        return Fed.TAKEN

    def is_said(self) -> bool:
        """Return whether an exception has been read."""
        return bool(self.chain[0].type)

    def root(self) -> tuple[RaisedText, tuple[Frame, ...]]:
        """Return the exception where it began, and the way to it, outermost frame first."""
        whole = [one for one in self.chain if one.type]
        nested = [one for one in whole if one.nested]
        at = next((one for one in nested or whole if one.name not in _FLOW), whole[-1])
        if at.nested:
            outer = whole[: _index(whole, at)][-1:] if not self._in_group() else whole[:1]
            return at, (*(frame for one in outer for frame in one.frames), *at.frames)
        if any(frame.user for frame in at.frames) or at is whole[-1]:
            return at, tuple(at.frames)
        return at, (*whole[-1].frames, *at.frames)


def read_traceback(lines: Iterable[str]) -> Traceback | None:
    """Return the last traceback in a text that one process wrote, or None if there is none."""
    found: Traceback | None = None
    last: Traceback | None = None
    for text in lines:
        if found is not None and found.feed(text) is Fed.TAKEN:
            continue
        if text.rstrip().endswith(HEADER):
            last = found if found is not None and found.is_said() else last
            found = Traceback(sure=True)
    return found if found is not None and found.is_said() else last


def _index(items: Sequence[RaisedText], item: RaisedText) -> int:
    return next(number for number, one in enumerate(items) if one is item)
