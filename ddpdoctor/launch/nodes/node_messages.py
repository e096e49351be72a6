"""What the members of a wrapped job tell each other, beside what they have recorded.

With its beat a member says how its ranks get on (``Pulse``), and sees in the answer what the first asks of all
(``Board``): both are short arrays of JSON. What is larger is a record under a key.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.conversation import BadRecord
from ddpdoctor.launch.watching.suspicion import Headway
from ddpdoctor.model.codec import WrongValue, decode

if TYPE_CHECKING:
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.findings import Judgement
    from ddpdoctor.model.nodes import NodeSeen

Message = TypeVar("Message")

GREETING, EVIDENCE, ROSTER, VERDICT = "greeting", "evidence", "roster", "verdict"
CLAIM = "claim"
"""With a number behind it: counts the members that were started with it."""
ARRIVALS = "arrivals"
"""Counts the members that came without a number of their own."""
SURPLUS = "surplus"
"""Counts those whose number was taken."""
LAST = 10**9
"""In the place of a request: what was recorded when the member had ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """How a member is."""

    headway: Headway
    answered: int = 0
    """The last request for evidence that it has answered in full; ``LAST`` once it has ended."""
    moved: bool = False
    """Its ranks have made progress since they were asked then."""
    heard: int = 0
    """The last verdict that it has."""
    status: int | None = None
    """Of its launcher, once that has ended."""
    ranks: tuple[int, int] | None = None
    """The first and the last of its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the first member has to say to all."""

    request: int = 0
    """The number of the last request for evidence."""
    verdict: int = 0
    """The number of the last verdict."""
    roster: int = 0
    """How often the list of members was changed."""
    ends: bool = False
    """Its launcher has ended: the last verdict comes, when the others have ended or had their time."""
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Left by a member once it has a number."""

    host: str
    pid: int
    told: int | None
    """The number that it was started with."""
    wall_offset_s: float
    clock_offset_ns: int
    """Its CLOCK_MONOTONIC less that of the first member's host."""
    clock_error_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """All members, as the first sees them; its own times mean nothing elsewhere."""

    nodes: tuple[NodeSeen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the first member made of the evidence of all."""

    judgement: Judgement
    stop: bool
    """The job hangs for certain and is stopped."""
    place: str
    """Where the report is: "node0:/scratch/run"."""


def write_pulse(pulse: Pulse) -> bytes:
    """Return a pulse as a beat carries it: within 128 bytes."""
    headway = [_short(value) for value in astuple(pulse.headway)]
    rest = [pulse.answered, int(pulse.moved), pulse.heard, pulse.status, pulse.ranks]
    return json.dumps([headway, *rest], separators=(",", ":")).encode()


def read_pulse(said: bytes) -> Pulse | None:
    """Return the pulse of a beat; None where it cannot be read."""
    try:
        headway, answered, moved, heard, status, ranks = json.loads(said)
        named = dict(zip((field.name for field in fields(Headway)), headway, strict=True))
        plain = {"headway": named, "answered": answered, "heard": heard, "status": status, "ranks": ranks}
        plain["headway"] |= {name: bool(named[name]) for name in ("starting", "never", "begun", "idle", "lives_on")}
        return decode(Pulse, {**plain, "moved": bool(moved)})
    except (ValueError, TypeError, WrongValue):
        return None


def write_board(board: Board) -> bytes:
    """Return a board as the answer to a beat carries it."""
    return json.dumps([board.request, board.verdict, board.roster, int(board.ends), int(board.left)]).encode()


def read_board(notice: bytes) -> Board | None:
    """Return the board of a notice; None where it cannot be read."""
    try:
        request, verdict, roster, ends, left = map(int, json.loads(notice))
    except (ValueError, TypeError):
        return None
    return Board(request=request, verdict=verdict, roster=roster, ends=bool(ends), left=bool(left))


def find(conversation: Conversation, kind: type[Message], key: str) -> Message | None:
    """Return a record; None where there is none, or it cannot be read: its sender counts as one that sends nothing."""
    try:
        return conversation.look(kind, key, "a member")
    except BadRecord:
        return None


def _short(value: Any) -> Any:
    """Return a number of seconds rounded, a truth as 0 or 1."""
    return round(value, 1) if isinstance(value, float) else int(value) if isinstance(value, bool) else value
