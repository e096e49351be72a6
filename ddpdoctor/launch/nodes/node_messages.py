"""The messages between the members of a wrapped job, apart from their packed records.

A member's beat carries its ranks' progress (``Pulse``). The answer carries the first member's requests to all
(``Board``). Both are short JSON arrays. Larger messages are records under a key.
"""

from __future__ import annotations

import json
import time
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.exchange.conversation import BadMessage, BadRecord, read_json
from ddpdoctor.launch.watching.suspicion import NodeProgress
from ddpdoctor.model.codec import WrongValue, decode
from ddpdoctor.model.facts import NodeSeen, Presence

if TYPE_CHECKING:
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.findings import Judgment

Message = TypeVar("Message")

GREETING, EVIDENCE, ROSTER, VERDICT = "greeting", "evidence", "roster", "verdict"
CLAIM = "claim"
"""Key of a counter, followed by a member number: how many members were started with that number."""
ARRIVALS = "arrivals"
"""Counts the members that joined without a number."""
SURPLUS = "surplus"
"""Counts the members whose number was already taken."""
MOST_RANKS, MOST_RANKS_OF_ALL = 1024, 2**20
"""Our choice: a member sends the first and the last of its ranks, and all in between are made from them here."""
MOST_NAME = 255
"""The longest name of a host."""
LAST = 10**9
"""Used as the request number for the record that a member sends when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """The state of a member, sent with each beat."""

    progress: NodeProgress
    answered: int = 0
    """The last request for evidence that it has answered in full; ``LAST`` once it has ended."""
    moved: bool = False
    """Whether its ranks have made progress since that request."""
    heard: int = 0
    """The number of the last verdict that it received."""
    status: int | None = None
    """The exit status of its launcher, once that has ended."""
    ranks: tuple[int, int] | None = None
    """Its first and last rank."""

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """The numbers of its ranks."""
        return tuple(range(self.ranks[0], self.ranks[1] + 1)) if self.ranks else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The first member's notice to all, in the answer to each beat."""

    request: int = 0
    """The number of the last request for evidence."""
    verdict: int = 0
    """The number of the last verdict."""
    roster: int = 0
    """How often the list of members has changed."""
    ends: bool = False
    """The first member's launcher has ended. The last verdict follows when the others have ended or timed out."""
    left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """Sent by a member once it has a number."""

    host: str
    pid: int
    started_as: int | None
    """The number that it was started with."""
    wall_offset_s: float
    clock_offset_ns: int
    """Its CLOCK_MONOTONIC minus that of the first member's host."""
    clock_error_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberList:
    """All members as the first sees them, with times by the first member's clock."""

    nodes: tuple[NodeSeen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVerdict:
    """The first member's judgment of everybody's evidence."""

    judgment: Judgment
    stop: bool
    """Whether the job certainly hangs and is stopped."""
    place: str
    """Where the report is: "node0:/scratch/run"."""


def own_node(number: int, host: str, ranks: tuple[int, ...] = ()) -> NodeSeen:
    """Return the state of the member that runs this."""
    return NodeSeen(
        number=number, host=host, presence=Presence.HERE, heard_ns=time.monotonic_ns(), clock_offset_ns=0,
        clock_error_ns=0, wall_offset_s=0.0, gathered=True, ranks=ranks,
    )  # fmt: skip


def write_pulse(pulse: Pulse) -> bytes:
    """Encode a pulse for a beat, within 128 bytes."""
    progress = [_short(value) for value in astuple(pulse.progress)]
    rest = [pulse.answered, int(pulse.moved), pulse.heard, pulse.status, pulse.ranks]
    return json.dumps([progress, *rest], separators=(",", ":")).encode()


def read_pulse(said: bytes) -> Pulse | None:
    """Return the pulse of a beat, or None if it cannot be read."""
    try:
        progress, answered, moved, heard, status, ranks = read_json(said)
        named = dict(zip((field.name for field in fields(NodeProgress)), progress, strict=True))
        plain = {"progress": named, "answered": answered, "heard": heard, "status": status, "ranks": ranks}
        plain["progress"] |= {name: bool(named[name]) for name in ("starting", "never", "begun", "idle", "lives_on")}
        pulse = decode(Pulse, {**plain, "moved": bool(moved)})
    except (ValueError, TypeError, BadMessage, WrongValue):
        return None
    first, last = pulse.ranks or (0, 0)
    fit = 0 <= first <= last < first + MOST_RANKS and last < MOST_RANKS_OF_ALL
    return pulse if fit else replace(pulse, ranks=None)


def read_status(word: bytes) -> int | None:
    """Return the exit status in a member's last word, or None if there is none."""
    try:
        status = read_json(word)
    except BadMessage:
        return None
    return status if type(status) is int and abs(status) < 2**31 else None


def write_board(board: Board) -> bytes:
    """Encode a board for the answer to a beat."""
    return json.dumps([board.request, board.verdict, board.roster, int(board.ends), int(board.left)]).encode()


def read_board(notice: bytes) -> Board | None:
    """Return the board of a notice, or None if it cannot be read."""
    try:
        request, verdict, roster, ends, left = map(int, read_json(notice))
    except (ValueError, TypeError, BadMessage):
        return None
    return Board(request=request, verdict=verdict, roster=roster, ends=bool(ends), left=bool(left))


def find(conversation: Conversation, kind: type[Message], key: str) -> Message | None:
    """Return a record, or None if it is missing or unreadable; an unreadable one counts as not sent."""
    try:
        return conversation.get(kind, key, "a member")
    except BadRecord:
        return None


def _short(value: Any) -> Any:
    """Round seconds to 0.1, and turn a bool into 0 or 1."""
    return round(value, 1) if isinstance(value, float) else int(value) if isinstance(value, bool) else value
