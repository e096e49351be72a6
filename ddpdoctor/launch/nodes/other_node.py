"""A member of a job that is not the first: it beats, answers when it is asked for evidence, and hears the verdict."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.exchange.clocks import measure_clocks
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.heartbeats import Heartbeating
from ddpdoctor.exchange.node_meeting import NoMeeting, OtherPort, find_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.token import NO_TOKEN
from ddpdoctor.launch.command.placement import Style
from ddpdoctor.launch.nodes.members_heard import SILENT_NS
from ddpdoctor.launch.nodes.node_messages import (
    ARRIVALS,
    CLAIM,
    EVIDENCE,
    GREETING,
    LAST,
    ROSTER,
    SURPLUS,
    VERDICT,
    Board,
    Greeting,
    Pulse,
    Roster,
    Verdict,
    find,
    read_board,
    write_pulse,
)
from ddpdoctor.launch.watching.suspicion import Headway
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.nodes import NodeSeen, NodesSeen, Presence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.exchange.client import Client
    from ddpdoctor.exchange.clocks import ClockOffset
    from ddpdoctor.exchange.node_meeting import FoundMeeting, Way
    from ddpdoctor.launch.command.placement import Placement

FIND_LIMIT_S = 3.0
FIND_EVERY_S = 2.0
"""Ours: the pause between two searches, of a job whose first member may never come."""
REOPEN_LIMIT_S = 3.0
LAST_WORD_NS = 15_000_000_000
"""Ours: a first member goes within 8 s of its final verdict (``TELL_LIMIT_S``), on a busy machine somewhat later."""
VERDICT_LIMIT_S = 10.0
"""Ours: how long the end of a member waits for the verdict of a first that goes on: as for a silent one."""
LAST_LIMIT_S = 30.0
"""Ours: the same where the first ends too: it waits for others for half of that, and then judges."""
CLOCKS_KEEP_S = 600.0
"""Ours: for so long clocks count as measured: those of two machines part by some 0.05 ms a second at most."""
CLOSE_LIMIT_S = 2.0
PAUSE_S = 0.05


class OtherNode:
    """The session's view of the first. A thread finds the meeting and does what is asked; nothing here waits for it."""

    is_first: Literal[False] = False

    def __init__(
        self, placement: Placement, host: str, ways: Sequence[Way], clocks_keep_s: float = CLOCKS_KEEP_S
    ) -> None:
        """Take where this member stands, what its host is called, and how the meeting may be reached."""
        self.failure: Exception | None = None
        self.number = placement.number
        """None until the meeting has given one, where nobody else did."""
        self.verdict: Verdict | None = None
        """The last one of the first member."""
        self.placement, self._host, self._ways = placement, host, ways
        self._token = placement.token
        self._found: FoundMeeting | None = None
        self._beating: Heartbeating | None = None
        self._board = Board()
        self._pulse = Pulse(headway=Headway())
        self._roster: tuple[NodeSeen, ...] = ()
        self._answered = 0
        self._heard_verdict = 0
        self._last: Verdict | None = None
        self._last_ns = 0
        self._clocks: ClockOffset | None = None
        self._clocks_at = 0.0
        self._clocks_keep_s = clocks_keep_s
        self._searches = 0
        self._why = ""
        """Why the meeting was not found so far."""
        self._lock = threading.Lock()
        self._began_ns = time.monotonic_ns()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-nodes", daemon=True)

    def start(self) -> None:
        """Begin to look for the meeting."""
        self._thread.start()

    @property
    def alone_since_ns(self) -> int | None:
        """Since when this member judges for itself: the first was not heard for the limit, or has left."""
        heard_ns = max(self._began_ns, (self._beating.heard_ns if self._beating else None) or 0)
        if self._board.left:
            return heard_ns
        return heard_ns if time.monotonic_ns() - heard_ns > SILENT_NS else None

    def conversation(self) -> Conversation | None:
        """Return what all members say to each other; None where the first was not found."""
        return None if self._found is None else self._talk()

    def reconnect(self) -> None:
        """Connect again where the connection was lost."""
        if self._tasks.empty():
            self._tasks.put(self._look_at_roster)

    def others(self) -> tuple[int, ...]:
        """Return nobody: what this member has to say it says to the first."""
        return ()

    @property
    def request(self) -> int:
        """The number of a request for evidence that is to be answered; 0 where there is none."""
        return self._board.request if self._board.request > self._answered else 0

    def say(self, headway: Headway, ranks: tuple[int, int] | None) -> None:
        """Have the next beats tell how the ranks get on."""
        self._say(headway=headway, ranks=ranks)

    def answer(self, request: int, packed: bytes, *, moved: bool) -> None:
        """Send what was recorded in answer to a request; ``moved``: ranks made progress meanwhile."""
        self._answered = request
        self._tasks.put(lambda: self._send(request, packed, moved=moved))

    def take_verdict(self) -> Verdict | None:
        """Return a verdict of the first member that came since the last call."""
        verdict, self.verdict = self.verdict, None
        return verdict

    @property
    def last_word(self) -> Verdict | None:
        """The verdict right after which the first member went, where that found something wrong: it was its final one.

        It may come while the launcher here goes on, as one of torchrun's does that waits for the others at its end.
        """
        gone_ns, last = self.alone_since_ns, self._last
        if last is None or gone_ns is None or gone_ns - self._last_ns > LAST_WORD_NS:
            return None
        wrong = any(finding.severity is Severity.ERROR for finding in last.judgement.findings)
        return last if wrong else None

    def leave(self, status: int, packed: bytes, is_disturbed: Callable[[], bool]) -> None:
        """Send what was recorded at the end, and wait a while for the verdict, where one may come."""
        known = self._heard_verdict
        self._say(status=status)
        self._tasks.put(lambda: self._send(LAST, packed, moved=False))
        began = time.monotonic()
        while self.alone_since_ns is None and self._heard_verdict == known and not is_disturbed():
            if time.monotonic() - began > (LAST_LIMIT_S if self._board.ends else VERDICT_LIMIT_S):
                return
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Say that this member ends, and hang up."""
        self._ended.set()
        self._tasks.put(None)
        self._thread.join(timeout=CLOSE_LIMIT_S)

    def seen(self) -> NodesSeen:
        """Return all members as far as this one knows of them."""
        known = {node.number: node for node in self._roster}
        own = 0 if self.number is None else self.number
        first = known.get(0) or NodeSeen(number=0, host=(*self.placement.hosts, "")[0], presence=Presence.ABSENT)
        nodes = {number: self._as_seen_here(node) for number, node in known.items()}
        nodes[0] = self._first_as_seen(first)
        nodes[own] = NodeSeen(
            number=own, host=self._host, presence=Presence.HERE, heard_ns=time.monotonic_ns(), clock_offset_ns=0,
            clock_error_ns=0, wall_offset_s=0.0, gathered=True, ranks=_spread(self._pulse.ranks),
        )  # fmt: skip
        return NodesSeen(
            expected=self.placement.expected, own=own, nodes=tuple(nodes[number] for number in sorted(nodes)),
            alone_since_ns=self.alone_since_ns, of_ranks=self.placement.style is Style.RANK,
        )  # fmt: skip

    def _as_seen_here(self, node: NodeSeen) -> NodeSeen:
        """Return what the first saw of a node by the clock of this host."""
        if self._clocks is None:
            return replace(node, gathered=False)
        ahead_ns, ahead_s = self._clocks.monotonic_ns, self._clocks.wall_s
        return replace(
            node,
            gathered=False,
            heard_ns=None if node.heard_ns is None else node.heard_ns + ahead_ns,
            clock_offset_ns=None if node.clock_offset_ns is None else node.clock_offset_ns - ahead_ns,
            wall_offset_s=None if node.wall_offset_s is None else node.wall_offset_s - ahead_s,
        )

    def _first_as_seen(self, first: NodeSeen) -> NodeSeen:
        heard_ns = self._beating.heard_ns if self._beating else None
        if heard_ns is None:
            return replace(first, presence=Presence.ABSENT, heard_ns=None, why=self._why)
        silent = Presence.HERE if self.alone_since_ns is None else Presence.SILENT
        seen = self._as_seen_here(first)
        return replace(seen, presence=Presence.LEFT if self._board.left else silent, heard_ns=heard_ns)

    def _say(self, **changed: Any) -> None:
        with self._lock:
            self._pulse = replace(self._pulse, **changed)
            if self._beating is not None:
                self._beating.said = write_pulse(self._pulse)

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._found is None:
                if not self._find() and self._searches > 1:
                    self._ended.wait(FIND_EVERY_S)
            while self._found is not None and (task := self._tasks.get()) is not None:
                self._do(task)
            self._part()
        except Exception as error:  # noqa: BLE001 - a job is watched on without the others
            self.failure = self.failure or error

    def _find(self) -> bool:
        """Look for the meeting once, and join it. The job's own store is left in peace at first."""
        ways = [way for way in self._ways if self._searches or not isinstance(way, OtherPort)]
        self._searches += 1
        try:
            self._join(find_meeting(ways, self._token or NO_TOKEN, FIND_LIMIT_S))
        except NoMeeting as error:
            self._why = error.tried[0].words  # of its own port: whether it is served there alone, only the first knows
        except StoreError as error:
            self._why = str(error)
        return self._found is not None

    def _join(self, found: FoundMeeting) -> None:
        """Take a number, say who this is, and begin to beat."""
        client = found.store
        told = self.placement.number
        number = client.add(ARRIVALS, 1) if told is None else told
        if client.add(f"{CLAIM}/{number}", 1) > 1:
            number = max(self.placement.most, self.placement.expected) - 1 + client.add(SURPLUS, 1)
        self.number = number
        self._greet(client)
        self._found = found
        self._beating = Heartbeating(found.open, str(number), on_notice=self._notice)
        self._say()
        self._beating.__enter__()

    def _greet(self, client: Client) -> None:
        """Say who this is, and how far the clock is off now: a day later it may be seconds."""
        self._clocks_at = time.monotonic()
        self._clocks = clocks = measure_clocks(client)
        greeting = Greeting(
            host=self._host, pid=os.getpid(), told=self.placement.number, wall_offset_s=clocks.wall_s,
            clock_offset_ns=clocks.monotonic_ns, clock_error_ns=clocks.error_ns,
        )  # fmt: skip
        Conversation(client, self._token).send(f"{GREETING}/{self.number}", greeting)

    def _notice(self, notice: bytes) -> None:
        board = read_board(notice)
        if board is None:
            return
        before, self._board = self._board, board
        if board.roster != before.roster:
            self._tasks.put(self._look_at_roster)
        if board.verdict != before.verdict:
            self._tasks.put(self._look_at_verdict)

    def _look_at_roster(self) -> None:
        roster = find(self._talk(), Roster, ROSTER)
        self._roster = roster.nodes if roster is not None else self._roster

    def _look_at_verdict(self) -> None:
        number = self._board.verdict
        self.verdict = self._last = find(self._talk(), Verdict, f"{VERDICT}/{number}")
        self._last_ns = time.monotonic_ns()
        self._heard_verdict = number
        self._say(heard=number)
        self._beat_now()

    def _send(self, request: int, packed: bytes, *, moved: bool) -> None:
        if time.monotonic() - self._clocks_at > self._clocks_keep_s:
            self._greet(self._required().store)
        self._talk().send_bytes(f"{EVIDENCE}/{self.number}/{request}", packed)
        self._say(answered=request, moved=moved)
        self._beat_now()

    def _do(self, task: Callable[[], None]) -> None:
        """Do something with the meeting, a second time where the connection was lost in the meantime."""
        try:
            task()
        except StoreError:
            try:
                self._found = replace(self._required(), store=self._required().open(REOPEN_LIMIT_S))
                task()
            except StoreError as error:
                self._why = str(error)

    def _talk(self) -> Conversation:
        return Conversation(self._required().store, self._token)

    def _required(self) -> FoundMeeting:
        assert self._found is not None, "before the meeting was found"
        return self._found

    def _beat_now(self) -> None:
        if self._beating is not None:
            self._beating.beat_now()

    def _part(self) -> None:
        if self._beating is not None:
            self._beating.leave(json.dumps(self._pulse.status).encode())
        if self._found is not None:
            self._found.store.close()


def _spread(ranks: tuple[int, int] | None) -> tuple[int, ...]:
    return tuple(range(ranks[0], ranks[1] + 1)) if ranks else ()
