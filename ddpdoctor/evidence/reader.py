"""The interface of readers, their quotes, and what tells quickly whether a part of a log can interest any of them.

A reader recognizes its format by content, never by file name. To search for the hundred triggers of all readers costs
most of the time that a log takes. So upper case becomes lower, and all but letters is left out first: lines of
progress, which differ in numbers, become equal, and each is searched once.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from ddpdoctor.model.evidence import Spot, Who
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ddpdoctor.model.attached import AskedNodes, AttachedJob
    from ddpdoctor.model.evidence import Fact, FlightDump, Time


MOST_QUOTED = 240  # our choice: this many characters are enough to understand any line


def quote(text: str) -> str:
    """Return the beginning of a text in one line, without what looks like a credential."""
    short = " ".join(text[: 2 * MOST_QUOTED].split())
    shown = hide_in_text(short)
    return shown if len(shown) <= MOST_QUOTED else shown[: MOST_QUOTED - 1] + "…"


@dataclass(slots=True, kw_only=True)
class Line:
    """One line of a log, without the prefixes of launchers and log collectors."""

    text: str  # Without prefixes, colors and line end. A carriage return ends a line as well.
    number: int
    source: str
    who: Who = field(default_factory=Who)  # the writer, as far as the prefixes and the path of the file tell
    time: Time | None = None  # the time in the prefixes
    raw_prefix: str = ""  # The prefixes as they stood. Lines of one writer have equal ones, times and numbers apart.
    origin: tuple[str, ...] = ()  # what prefixes of unknown formats say about the writer: equal for lines of one writer

    @property
    def stream(self) -> tuple[Any, ...]:
        """Equal for lines of one writer, as far as prefixes tell. Tracebacks of several ranks are told apart by it."""
        who = self.who
        return (who.rank, who.local_rank, who.task, who.pid, who.host, self.origin)

    def spot(self) -> Spot:
        """Return where the line stands."""
        return Spot(source=self.source, line=self.number)


class LineReader(Protocol):
    """Reads one format in logs. There is one object of it for each stream of lines, so that it may keep state.

    Only parts of a log that contain a trigger are handed to readers line by line: 64 KiB or more around it. A reader
    must keep little: a log may have a thousand million lines.
    """

    name: str  # the format in words: "NCCL watchdog"

    @property
    def triggers(self) -> tuple[bytes, ...]:
        """Byte strings: a part of a log that contains none of them is of no interest to this reader."""
        ...

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line. It must be quick for lines of other formats."""
        ...

    def end(self) -> Iterable[Fact]:
        """Return the facts that were still open when the log ended: none, if no fact needs a second line."""
        return ()


@dataclass(slots=True, kw_only=True)
class Document:
    """A file that is read as a whole: a dump, a report of RAS, the output of py-spy."""

    source: str  # its name as the user gave it
    path: Path | None  # None for standard input and parts of archives
    body: bytes  # Its content, unpacked. At most ``MOST_BYTES`` of it; see ``cut``.
    cut: bool = False  # whether the file is longer than that
    modified: float | None = None
    # What its path says: a host in the name of a folder, a rank at the end of its name.
    who: Who = field(default_factory=Who)


@dataclass(slots=True, kw_only=True)
class Found:
    """The contents of one document."""

    facts: list[Fact] = field(default_factory=list)
    dumps: list[FlightDump] = field(default_factory=list)
    problem: str = ""  # why it could not be read completely, or empty
    lines: int = 0
    log_from: int | None = None  # The file is a log as well. What it says of stacks before this line is in ``facts``.
    attached: AttachedJob | AskedNodes | None = None  # the folder of ``attach`` that it belongs to


class DocumentReader(Protocol):
    """Reads one format of whole files."""

    name: str  # the format in words: "flight recorder dump"

    def recognizes(self, head: bytes) -> bool:
        """Return whether a file that begins with these bytes (up to 64 KiB) has this format."""
        ...

    def read(self, document: Document) -> Found:
        """Read it. Damage is reported in ``Found.problem`` and never raised."""
        ...


_MOST_IDLE = 4096
_LONG = 512
_LOWER = bytes(range(256)).lower()
_LEFT_OUT = bytes(set(range(256)) - set(f"{string.ascii_letters}\n".encode()))


def condense(text: bytes) -> bytes:
    """Return the letters of each line of a text in lower case."""
    return text.translate(_LOWER, _LEFT_OUT)


def condensed_triggers(readers: Iterable[LineReader]) -> tuple[bytes, ...]:
    """Return the fewest condensed strings of which each trigger of the readers contains one."""
    return _fewest(frozenset(trigger for reader in readers for trigger in reader.triggers))


@cache
def _fewest(triggers: frozenset[bytes]) -> tuple[bytes, ...]:
    condensed = sorted({condense(trigger) for trigger in triggers}, key=lambda one: (len(one), one))
    kept: list[bytes] = []
    for one in condensed:
        if not any(shorter in one for shorter in kept):
            kept.append(one)
    return tuple(kept)


class Funnel:
    """Tells which parts of one log the readers want. It keeps the lines that it knows to be of no interest."""

    def __init__(self, readers: Iterable[LineReader]) -> None:
        self._triggers = condensed_triggers(readers)
        self._idle: set[bytes] = set()

    def wants(self, block: bytes) -> bool:
        """Return whether a part of the log has a trigger."""
        new = set(condense(block).split(b"\n")) - self._idle
        text = b"\n".join(new)
        if any(trigger in text for trigger in self._triggers):
            return True
        if len(self._idle) < _MOST_IDLE:
            self._idle |= {line for line in new if len(line) < _LONG}
        return False
