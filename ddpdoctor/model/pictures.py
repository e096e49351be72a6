"""What the pictures of a job are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

OMITTED = {"omit": True}  # of a span, what it lacks, which would be much of a timeline's text


class SpanKind(str, Enum):
    """What a rank did during a span."""

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    POINT_TO_POINT = "point-to-point"
    WAIT = "wait"  # it waited in a call for other ranks
    BATCH = "batch"  # it waited for the data loader
    CHECKPOINT = "checkpoint"
    HOST = "host"  # the script's own code between recorded calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that a rank did. Times are milliseconds from the start of the timeline."""

    kind: SpanKind
    start_ms: float
    end_ms: float | None  # None: it had not ended
    label: str  # the operation, such as "all_reduce"
    group: str = field(default="", metadata=OMITTED)
    number: int | None = field(
        default=None, metadata=OMITTED
    )  # the sequence number of a collective in its group, or the number of a step
    shape: str = field(default="", metadata=OMITTED)  # such as "float32 [1024, 16]"
    place: str = field(default="", metadata=OMITTED)  # the user's line: "train.py:61 in main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank."""

    rank: int
    host: str
    state: str  # what it did at the end, as in the table of ranks
    blamed: bool
    coarse: tuple[Span, ...]  # the whole run in few spans
    # The end of the run, every call, sorted by start. A span may lie inside an earlier one. Empty if another lane of
    # the same class stands for it.
    detail: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that happened at one time, such as the crash of a rank."""

    at_ms: float
    label: str
    ranks: tuple[int, ...] = ()
    fault: bool = False  # the verdict is about this event


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The lanes of a job. Clocks of several hosts are corrected to that of the first."""

    started_at: str  # the start as ISO 8601, UTC
    length_ms: float
    detail_from_ms: float  # from here on ``Lane.detail`` holds every call
    lanes: tuple[Lane, ...]
    classes: tuple[tuple[int, ...], ...]  # ranks that did the same, for folding; each is in one class
    events: tuple[TimelineEvent, ...] = field(default=(), metadata={"json": "moments"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRanks:
    """Ranks in the same state at the same line that wait for the same ranks. Those that others wait for count too."""

    ranks: tuple[int, ...]
    state: str  # as in the table of ranks
    place: str  # The user's line: "/home/me/train.py:61 in main". Empty if it is unknown.
    blamed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWaits:
    """Which ranks wait for which. Links are pairs of positions in ``classes``: the first waits for the second."""

    classes: tuple[WaitingRanks, ...]
    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceExcerpt:
    """Lines of a user's file around the one that is blamed, without secrets."""

    file: str
    first: int  # the number of the first line
    lines: tuple[str, ...]
    blamed: int  # the number of the blamed line
