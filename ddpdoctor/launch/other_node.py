"""A member of a job that is not the first: it beats, answers requests for evidence, and receives the verdict."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.exchange.conversation import Conversation, measure_clocks
from ddpdoctor.exchange.meeting import OTHER_PORT, Heartbeating, NoMeeting, find_meeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.launch import node_messages as messages
from ddpdoctor.launch.first_node import SILENT_NS
from ddpdoctor.launch.placement import Style
from ddpdoctor.model.facts import NodeSeen, NodesSeen, Presence
from ddpdoctor.model.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.exchange.conversation import ClockOffset
    from ddpdoctor.exchange.meeting import FoundMeeting, MeetingWay
    from ddpdoctor.exchange.store import Client
    from ddpdoctor.launch.placement import Placement

FIND_LIMIT_S = 3.0
FIND_EVERY_S = 2.0  # our choice: the pause between two searches, because the first member may never arrive
REOPEN_LIMIT_S = 3.0
# Our choice: the first member leaves within 8 s of its final verdict (``TELL_LIMIT_S``), later on a busy machine.
LAST_WORD_NS = 15_000_000_000
# Our choice: how long an ending member waits for a verdict if the first goes on. On a busy machine a rank of the first
# that fails because of this end has taken more than ten seconds to end itself.
VERDICT_LIMIT_S = 30.0
# Our choice: the same if the first ends too. It waits for others for a quarter of this time, and then judges.
LAST_LIMIT_S = 60.0
# Our choice: how long a clock measurement is valid. Two machines drift apart by at most about 0.05 ms a second.
CLOCKS_KEEP_S = 600.0
CLOSE_LIMIT_S = 2.0
PAUSE_S = 0.05


class OtherNode:
    """The session's view of the first member, which a thread finds and answers. Only ``leave`` and ``close`` wait."""

    is_first: Literal[False] = False

    def __init__(
        self, placement: Placement, host: str, ways: Sequence[MeetingWay], *, clocks_keep_s: float = CLOCKS_KEEP_S,
        silent_ns: int = SILENT_NS,
    ) -> None:  # fmt: skip
        self.failure: Exception | None = None
        self.number = placement.number  # if it was started without a number, this is None until the meeting assigns one
        # The first member's last verdict, until ``take_verdict`` takes it.
        self.verdict: messages.JobVerdict | None = None
        self.placement, self._host, self._ways = placement, host, ways
        self._token = placement.token
        self._found: FoundMeeting | None = None
        self._beating: Heartbeating | None = None
        self._board = messages.Board()
        self._pulse = messages.Pulse(progress=messages.NodeProgress())
        self._roster: tuple[NodeSeen, ...] = ()
        self._answered = 0
        self._heard_verdict = 0
        self._last: messages.JobVerdict | None = None
        self._last_ns = 0
        self._clocks: ClockOffset | None = None
        self._clocks_at = 0.0
        self._clocks_keep_s, self._silent_ns = clocks_keep_s, silent_ns
        self._searches = 0
        self._why = ""  # why the meeting has not been found yet
        self._lock = threading.Lock()
        self._began_ns = time.monotonic_ns()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpdoctor-nodes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alone_since_ns(self) -> int | None:
        """Since when this member judges by itself, because the first is silent or has left; else None."""
        heard_ns = max(self._began_ns, (self._beating.heard_ns if self._beating else None) or 0)
        if self._board.left:
            return heard_ns
        return heard_ns if time.monotonic_ns() - heard_ns > self._silent_ns else None

    def conversation(self) -> Conversation | None:
        return None if self._found is None else self._talk()

    def reconnect(self) -> None:
        if self._tasks.empty():
            self._tasks.put(self._look_at_roster)

    @property
    def request(self) -> int:
        return self._board.request if self._board.request > self._answered else 0

    def say(self, **changed: Any) -> None:
        with self._lock:
            self._pulse = replace(self._pulse, **changed)
            if self._beating is not None:
                self._beating.said = messages.write_pulse(self._pulse)

    def answer(self, request: int, packed: bytes, *, moved: bool) -> None:
        """Send the packed record in answer to a request; ``moved`` says whether ranks made progress meanwhile."""
        self._answered = request
        self._tasks.put(lambda: self._send(request, packed, moved=moved))

    def take_verdict(self) -> messages.JobVerdict | None:
        """Return the first member's verdict if one arrived since the last call, else None."""
        verdict, self.verdict = self.verdict, None
        return verdict

    @property
    def last_word(self) -> messages.JobVerdict | None:
        """The first member's final verdict: it left right after this one, which found an error. Else None.

        It may arrive while the launcher here still runs; torchrun, for example, waits for the others at its end.
        """
        gone_ns, last = self.alone_since_ns, self._last
        if last is None or gone_ns is None or gone_ns - self._last_ns > LAST_WORD_NS:
            return None
        wrong = any(finding.severity is Severity.ERROR for finding in last.judgment.findings)
        return last if wrong else None

    def leave(self, status: int, packed: bytes, is_disturbed: Callable[[], bool]) -> None:
        """Send the final record, and wait a while for the verdict if one may come."""
        known = self._heard_verdict
        self.say(status=status)
        self._tasks.put(lambda: self._send(messages.LAST, packed, moved=False))
        began = time.monotonic()
        while time.monotonic() - began < (LAST_LIMIT_S if self._board.ends else VERDICT_LIMIT_S):
            if self.alone_since_ns is not None or self._heard_verdict != known or is_disturbed():
                break
            time.sleep(PAUSE_S)

    def close(self) -> None:
        self._ended.set()
        self._tasks.put(None)
        self._thread.join(timeout=CLOSE_LIMIT_S)

    def seen(self) -> NodesSeen:
        known = {node.number: node for node in self._roster}
        own = 0 if self.number is None else self.number
        first = known.get(0) or NodeSeen(number=0, host=(*self.placement.hosts, "")[0], presence=Presence.ABSENT)
        nodes = {number: self._as_seen_here(node) for number, node in known.items()}
        heard_ns = self._beating.heard_ns if self._beating else None
        if heard_ns is None:
            nodes[0] = replace(first, presence=Presence.ABSENT, heard_ns=None, why=self._why)
        else:
            silent = Presence.HERE if self.alone_since_ns is None else Presence.SILENT
            presence = Presence.LEFT if self._board.left else silent
            nodes[0] = replace(self._as_seen_here(first), presence=presence, heard_ns=heard_ns)
        nodes[own] = messages.own_node(own, self._host, self._pulse.all_ranks)
        return NodesSeen(
            expected=self.placement.expected, own=own, nodes=tuple(nodes[number] for number in sorted(nodes)),
            alone_since_ns=self.alone_since_ns, of_ranks=self.placement.style is Style.RANK,
        )  # fmt: skip

    def _as_seen_here(self, node: NodeSeen) -> NodeSeen:
        """Convert the times in the first member's view of a node to this host's clock."""
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

    def _say_now(self, **changed: Any) -> None:
        self.say(**changed)
        if self._beating is not None:
            self._beating.beat_now()

    def _run(self) -> None:
        try:
            while not self._ended.is_set() and self._found is None:
                if not self._find() and self._searches > 1:
                    self._ended.wait(FIND_EVERY_S)
            while self._found is not None and (task := self._tasks.get()) is not None:
                try:
                    task()
                except StoreError:  # reconnect if the connection was lost, and run it again
                    try:
                        self._found = replace(self._found, store=self._found.open(REOPEN_LIMIT_S))
                        task()
                    except StoreError as error:
                        self._why = str(error)
            if self._beating is not None:
                self._beating.leave(json.dumps(self._pulse.status).encode())
            if self._found is not None:
                self._found.store.close()
        except Exception as error:  # noqa: BLE001 - watching the job continues without the others
            self.failure = self.failure or error

    def _find(self) -> bool:
        """Look for the meeting once, and join it. The first search spares the job's own store."""
        ways = [way for way in self._ways if self._searches or way.name != OTHER_PORT]
        self._searches += 1
        try:
            found = find_meeting(ways, self._token or NO_TOKEN, FIND_LIMIT_S)
            # Take a number, send the greeting, and start to beat
            client, started_as = found.store, self.placement.number
            number = client.add(messages.ARRIVALS, 1) if started_as is None else started_as
            if client.add(f"{messages.CLAIM}/{number}", 1) > 1:
                number = max(self.placement.most, self.placement.expected) - 1 + client.add(messages.SURPLUS, 1)
            self.number = number
            self._greet(client)
            self._found = found
            self._beating = Heartbeating(found.open, str(number), on_notice=self._notice)
            self.say()
            self._beating.start()
        except NoMeeting as error:
            self._why = error.tried[0].words  # the own port's reason; the first member may not serve the other ways
        except StoreError as error:
            self._why = str(error)
        return self._found is not None

    def _greet(self, client: Client) -> None:
        """Send the greeting with a fresh clock offset, which may drift by seconds in a day."""
        self._clocks_at = time.monotonic()
        self._clocks = clocks = measure_clocks(client)
        greeting = messages.Greeting(
            host=self._host, pid=os.getpid(), started_as=self.placement.number, wall_offset_s=clocks.wall_s,
            clock_offset_ns=clocks.monotonic_ns, clock_error_ns=clocks.error_ns,
        )  # fmt: skip
        Conversation(client, self._token).send(f"{messages.GREETING}/{self.number}", greeting)

    def _notice(self, notice: bytes) -> None:
        board = messages.read_board(notice)
        if board is None:
            return
        before, self._board = self._board, board
        if board.roster != before.roster:
            self._tasks.put(self._look_at_roster)
        if board.verdict != before.verdict:
            self._tasks.put(self._look_at_verdict)

    def _look_at_roster(self) -> None:
        roster = messages.find(self._talk(), messages.MemberList, messages.ROSTER)
        self._roster = roster.nodes if roster is not None else self._roster

    def _look_at_verdict(self) -> None:
        number = self._board.verdict
        self.verdict = self._last = messages.find(self._talk(), messages.JobVerdict, f"{messages.VERDICT}/{number}")
        self._last_ns = time.monotonic_ns()
        self._heard_verdict = number
        self._say_now(heard=number)

    def _send(self, request: int, packed: bytes, *, moved: bool) -> None:
        if time.monotonic() - self._clocks_at > self._clocks_keep_s:
            assert self._found is not None, "before the meeting was found"
            self._greet(self._found.store)
        self._talk().send_bytes(f"{messages.EVIDENCE}/{self.number}/{request}", packed)
        self._say_now(answered=request, moved=moved)

    def _talk(self) -> Conversation:
        assert self._found is not None, "before the meeting was found"
        return Conversation(self._found.store, self._token)
