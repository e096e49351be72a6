"""What the first member knows about the others: their presence, their ranks' progress, and their records."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.launch.command.placement import Style
from ddpdoctor.launch.nodes.node_messages import LAST, MOST_NAME, Greeting, Pulse, own_node, read_pulse, read_status
from ddpdoctor.model.facts import NodeSeen, NodesSeen, Presence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.exchange.store import Heard
    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.launch.watching.suspicion import NodeProgress

SILENT_NS = 10_000_000_000
"""A node without a beat for this long counts as cut off. Each node's own verdict is final then."""
BROKEN_NS = 5_000_000_000
"""Our choice: a live member reconnects with its next beat, and has 3 s for that."""
FRESH_NS = 3_000_000_000
"""Our choice: a member that sent a beat within three beat intervals is waited for."""
MAX_PACKED_BYTES = 2**30
"""Our choice for the answers of all members, 100 KiB a rank, until they are written to the run folder."""


class MembersHeard:
    """The state of the other members. The receiving thread writes it, and the session reads it."""

    def __init__(self, placement: Placement, host: str) -> None:
        """Take the first member's placement and host name."""
        self._placement, self._host = placement, host
        self._lock = threading.Lock()
        self._heard: dict[int, Heard] = {}
        self._greetings: dict[int, Greeting] = {}
        self._pulses: dict[int, Pulse] = {}
        self._received: dict[int, int] = {}
        self._packed: dict[int, bytes] = {}
        self._gathered: set[int] = set()

    def hear(self, heard: Mapping[str, Heard]) -> None:
        """Record the meeting's heartbeats; the keys are member numbers as text."""
        with self._lock:
            for name, one in heard.items():
                if not (name.isascii() and name.isdecimal() and len(name) < 6):
                    continue
                number = int(name)
                self._heard[number] = one
                pulse = read_pulse(one.said)
                if pulse is not None:
                    self._pulses[number] = pulse

    def greet(self, number: int, greeting: Greeting) -> None:
        """Record a member's greeting."""
        if len(greeting.host) > MOST_NAME:
            return
        with self._lock:
            self._greetings[number] = greeting

    def receive(self, number: int, request: int, packed: bytes) -> None:
        """Record a member's answer to a request. What does not fit with the others' counts as lost."""
        with self._lock:
            self._received[number] = request
            self._packed.pop(number, None)
            if sum(map(len, self._packed.values())) + len(packed) <= MAX_PACKED_BYTES:
                self._packed[number] = packed

    def take_packed(self) -> dict[int, bytes]:
        """Return the packed records that arrived since the last call, by member."""
        with self._lock:
            packed, self._packed = self._packed, {}
        return packed

    def note_gathered(self, number: int) -> None:
        """Record that a member's record is in the run folder."""
        with self._lock:
            self._gathered.add(number)

    def numbers(self) -> list[int]:
        """Return the members that have beaten and not left."""
        with self._lock:
            return [number for number, heard in self._heard.items() if heard.left is None]

    def unknown(self) -> list[int]:
        """Return the members without a greeting."""
        with self._lock:
            return [number for number in self._heard if number not in self._greetings]

    def unread(self) -> list[tuple[int, int]]:
        """Return the members with an answer to fetch, and the number of the request that it answers."""
        with self._lock:
            return [
                (number, pulse.answered)
                for number, pulse in self._pulses.items()
                if pulse.answered > self._received.get(number, 0)
            ]

    def progress(self) -> list[NodeProgress]:
        """Return the progress of the ranks of all members that are not silent."""
        now_ns = time.monotonic_ns()
        with self._lock:
            there = [number for number in self._heard if self._presence(number, now_ns) is not Presence.SILENT]
            return [_progress_of(self._pulses[number]) for number in there if number in self._pulses]

    def have_come(self) -> bool:
        """Return whether all expected members have beaten."""
        with self._lock:
            return len({0, *self._heard}) >= self._placement.expected

    def have_answered(self, request: int, *, late: bool) -> bool:
        """Return whether every member has answered a request, has left, or is silent.

        A member that missed some beats is waited for until it counts as silent. A member that beats but does not answer
        is waited for until ``late``.
        """
        now_ns = time.monotonic_ns()
        with self._lock:
            return not any(
                (not late or now_ns - heard.heard_ns > FRESH_NS) and self._presence(number, now_ns) is Presence.HERE
                for number, heard in self._heard.items()
                if self._received.get(number, 0) < request
            )

    def have_heard(self, verdict: int) -> bool:
        """Return whether all present members have received a verdict."""
        return all(pulse.heard >= verdict for pulse in self._pulses_here())

    def have_ended(self) -> bool:
        """Return whether every member's launcher has ended and its record has arrived, or the member is silent."""
        return self.have_answered(LAST, late=False) and not self.unread()

    def have_moved(self) -> bool:
        """Return whether ranks of any present member have made progress since evidence was requested."""
        return any(pulse.moved for pulse in self._pulses_here())

    def _pulses_here(self) -> list[Pulse]:
        now_ns = time.monotonic_ns()
        with self._lock:
            here = [number for number in self._heard if self._presence(number, now_ns) is Presence.HERE]
            return [self._pulses[number] for number in here if number in self._pulses]

    def seen(self) -> NodesSeen:
        """Return the current state of all members."""
        now_ns = time.monotonic_ns()
        with self._lock:
            numbers = sorted({0, *range(self._placement.expected), *self._heard})
            nodes = tuple(self._node(number, now_ns) for number in numbers)
        return NodesSeen(
            expected=self._placement.expected, own=0, nodes=nodes, of_ranks=self._placement.style is Style.RANK
        )

    def _node(self, number: int, now_ns: int) -> NodeSeen:
        if number == 0:
            return own_node(0, self._host)
        greeting, pulse, heard = self._greetings.get(number), self._pulses.get(number), self._heard.get(number)
        names = self._placement.names
        return NodeSeen(
            number=number,
            host=greeting.host if greeting else names[number] if number < len(names) else "",
            presence=self._presence(number, now_ns),
            heard_ns=heard.heard_ns if heard else None,
            status=read_status(heard.left) if heard and heard.left else pulse.status if pulse else None,
            clock_offset_ns=greeting.clock_offset_ns if greeting else None,
            clock_error_ns=greeting.clock_error_ns if greeting else None,
            wall_offset_s=greeting.wall_offset_s if greeting else None,
            gathered=number in self._gathered,
            ranks=pulse.all_ranks if pulse else (),
            alive=pulse.progress.alive if pulse else None,
            waits_s=pulse.progress.waits_s if pulse else None,
            why=_why(number, greeting),
        )

    def _presence(self, number: int, now_ns: int) -> Presence:
        heard = self._heard.get(number)
        if heard is None:
            return Presence.ABSENT
        if heard.left is not None:
            return Presence.LEFT
        is_broken = heard.broken_ns is not None and now_ns - heard.broken_ns > BROKEN_NS
        return Presence.SILENT if is_broken or now_ns - heard.heard_ns > SILENT_NS else Presence.HERE


def _progress_of(pulse: Pulse) -> NodeProgress:
    """Return the progress of a member's ranks. After a failed launcher, ended ranks are no sign of a hang."""
    return replace(pulse.progress, ended_s=None) if pulse.status else pulse.progress


def _why(number: int, greeting: Greeting | None) -> str:
    if greeting is None or greeting.started_as in {None, number}:
        return ""
    return f"it was started as number {greeting.started_as}, which another one has"
