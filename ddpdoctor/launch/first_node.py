"""What the first member knows about the others: their presence, their ranks' progress, and their records."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.exchange.conversation import BadMessage, Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import HostedMeeting, by_folder, by_other_port, by_port, race
from ddpdoctor.exchange.store import StoreError, wait_until
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.launch import node_messages as messages
from ddpdoctor.launch.placement import MOST_ADDRESSES, Style, own_addresses
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.facts import NodeSeen, NodesSeen, Presence
from ddpdoctor.recorder.storage.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ddpdoctor.exchange.meeting import MeetingWay
    from ddpdoctor.exchange.store import Client, Heard
    from ddpdoctor.launch.placement import Placement
    from ddpdoctor.model.findings import Judgment

# A node without a beat for this long counts as cut off. Each node's own verdict is final then.
SILENT_NS = 10_000_000_000
BROKEN_NS = 5_000_000_000  # our choice: a live member reconnects with its next beat, and has 3 s for that
FRESH_NS = 3_000_000_000  # our choice: a member that sent a beat within three beat intervals is waited for
# Our choice for the answers of all members, 100 KiB a rank, until they are written to the run folder.
MAX_PACKED_BYTES = 2**30
PREFIX = "ddpdoctor/wrap/"  # the prefix of ddpdoctor's key in the job's store
SECOND_PORT = "port"
OPEN_LIMIT_S = 3.0
OPEN_EVERY_S = 1.0  # our choice: a store that a rank serves appears only after that rank has imported torch
HEAR_EVERY_S = 0.1
CLOSE_LIMIT_S = 2.0
# Our choice: the time that a live node has to send its record, half of what is left after the hang timeout.
GATHER_LIMIT_S = 5.0
# Our choice: when one launcher ends, the wait for the others; a little longer than until a member counts as silent.
LEAVE_LIMIT_S = 11.0
# Our choice: how long to stay until others have received the verdict. Over a folder a beat comes only every three
# seconds and takes time itself. Silent members are not waited for.
TELL_LIMIT_S = 8.0
FURTHER_AFTER_S = 3.0  # our choice: how long members may take to arrive over the port before other ways are served too
# Our choice: how long after its start the first member expects others that still look for a way to it.
JOIN_LIMIT_S = 12.0
# Subfolder of the run folder with the other members' records, by number. Members on the same file system record in
# ``nodes`` instead.
FOLDER = "gathered"


class MembersHeard:
    """The state of the other members. The receiving thread writes it, and the session reads it."""

    def __init__(self, placement: Placement, host: str) -> None:
        self._placement, self._host = placement, host
        self._lock = threading.Lock()
        self._heard: dict[int, Heard] = {}
        self._greetings: dict[int, messages.Greeting] = {}
        self._pulses: dict[int, messages.Pulse] = {}
        self._received: dict[int, int] = {}
        self._packed: dict[int, bytes] = {}
        self.gathered: set[int] = set()  # the members whose records are in the run folder

    def hear(self, heard: Mapping[str, Heard]) -> None:
        """Record the meeting's heartbeats; the keys are member numbers as text."""
        with self._lock:
            for name, message in heard.items():
                if not (name.isascii() and name.isdecimal() and len(name) < 6):
                    continue
                number = int(name)
                self._heard[number] = message
                pulse = messages.read_pulse(message.said)
                if pulse is not None:
                    self._pulses[number] = pulse

    def greet(self, number: int, greeting: messages.Greeting) -> None:
        if len(greeting.host) > messages.MOST_NAME:
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
        with self._lock:
            packed, self._packed = self._packed, {}
        return packed

    def numbers(self) -> list[int]:
        with self._lock:
            return [number for number, heard in self._heard.items() if heard.left is None]

    def unknown(self) -> list[int]:
        with self._lock:
            return [number for number in self._heard if number not in self._greetings]

    def unread(self) -> list[tuple[int, int]]:
        """Return the members with an answer to fetch, and the number of the request that it answers."""
        with self._lock:
            answered = [(number, pulse.answered) for number, pulse in self._pulses.items()]
            return [(number, request) for number, request in answered if request > self._received.get(number, 0)]

    def progress(self) -> list[messages.NodeProgress]:
        """Return the progress of the ranks of all members that are not silent."""
        now_ns = time.monotonic_ns()
        with self._lock:
            there = [number for number in self._heard if self._presence(number, now_ns) is not Presence.SILENT]
            pulses = [self._pulses[number] for number in there if number in self._pulses]
        # After a failed launcher, ended ranks are no sign of a hang.
        return [replace(pulse.progress, ended_s=None) if pulse.status else pulse.progress for pulse in pulses]

    def have_come(self) -> bool:
        with self._lock:
            return len({0, *self._heard}) >= self._placement.expected

    def have_answered(self, request: int, *, late: bool) -> bool:
        """Return whether all have answered a request, left or gone silent. Who beats is waited for until ``late``."""
        now_ns = time.monotonic_ns()
        with self._lock:
            return not any(
                (not late or now_ns - heard.heard_ns > FRESH_NS) and self._presence(number, now_ns) is Presence.HERE
                for number, heard in self._heard.items()
                if self._received.get(number, 0) < request
            )

    def have_heard(self, verdict: int) -> bool:
        return all(pulse.heard >= verdict for pulse in self._pulses_here())

    def have_ended(self) -> bool:
        """Return whether every member's launcher has ended and its record has arrived, or the member is silent."""
        return self.have_answered(messages.LAST, late=False) and not self.unread()

    def have_moved(self) -> bool:
        return any(pulse.moved for pulse in self._pulses_here())

    def _pulses_here(self) -> list[messages.Pulse]:
        now_ns = time.monotonic_ns()
        with self._lock:
            here = [number for number in self._heard if self._presence(number, now_ns) is Presence.HERE]
            return [self._pulses[number] for number in here if number in self._pulses]

    def seen(self) -> NodesSeen:
        now_ns = time.monotonic_ns()
        with self._lock:
            numbers = sorted({0, *range(self._placement.expected), *self._heard})
            nodes = tuple(self._node(number, now_ns) for number in numbers)
        of_ranks = self._placement.style is Style.RANK
        return NodesSeen(expected=self._placement.expected, own=0, nodes=nodes, of_ranks=of_ranks)

    def _node(self, number: int, now_ns: int) -> NodeSeen:
        if number == 0:
            return messages.own_node(0, self._host)
        greeting, pulse, heard = self._greetings.get(number), self._pulses.get(number), self._heard.get(number)
        names, why = self._placement.names, ""
        if greeting is not None and greeting.started_as not in {None, number}:
            why = f"it was started as number {greeting.started_as}, which another one has"
        return NodeSeen(
            number=number, host=greeting.host if greeting else names[number] if number < len(names) else "",
            presence=self._presence(number, now_ns), heard_ns=heard.heard_ns if heard else None,
            status=messages.read_status(heard.left) if heard and heard.left else pulse.status if pulse else None,
            clock_offset_ns=greeting.clock_offset_ns if greeting else None,
            clock_error_ns=greeting.clock_error_ns if greeting else None,
            wall_offset_s=greeting.wall_offset_s if greeting else None, gathered=number in self.gathered,
            ranks=pulse.all_ranks if pulse else (), alive=pulse.progress.alive if pulse else None,
            waits_s=pulse.progress.waits_s if pulse else None, why=why,
        )  # fmt: skip

    def _presence(self, number: int, now_ns: int) -> Presence:
        heard = self._heard.get(number)
        if heard is None:
            return Presence.ABSENT
        if heard.left is not None:
            return Presence.LEFT
        is_broken = heard.broken_ns is not None and now_ns - heard.broken_ns > BROKEN_NS
        return Presence.SILENT if is_broken or now_ns - heard.heard_ns > SILENT_NS else Presence.HERE


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondPort:
    """The address of the first member's second port."""

    hosts: tuple[str, ...]  # its addresses, the likeliest first
    port: int


def further_ways(placement: Placement, folder: Path) -> tuple[MeetingWay, ...]:
    """Return the ways besides the own port: the second port, if the job has a store to publish it, and the folder."""
    store_place, token = placement.store, placement.token
    if store_place is None:
        return (by_folder(folder),)
    known: SecondPort | None = None

    def open_second_port(limit_s: float) -> Client:
        nonlocal known
        deadline = time.monotonic() + limit_s
        second = known
        if second is None:
            with contextlib.closing(open_job_store(*store_place, PREFIX, limit_s)) as store:
                second = messages.find(Conversation(store, token), SecondPort, SECOND_PORT)
        if second is None:
            raise StoreError("the first node has left no message in the job's store")
        hosts = second.hosts[:MOST_ADDRESSES]
        openers = [partial(by_port((host,), second.port).open, token or NO_TOKEN) for host in hosts]
        raced = race(openers, deadline - time.monotonic())
        if raced.best is None or raced.client is None:
            errors = (raced.errors.get(place, f"{host}: no answer") for place, host in enumerate(hosts))
            raise StoreError("; ".join(errors))
        # Keep the address: the store ends with its launcher, but evidence is sent after that.
        known = replace(second, hosts=(hosts[raced.best],))
        return raced.client

    return (by_other_port(open_second_port), by_folder(folder))


class FirstNode:
    """The session's view of the other members. A thread receives from them; only methods that say so wait for them."""

    number = 0
    is_first: Literal[True] = True

    def __init__(
        self, placement: Placement, host: str, folder: Path, *, further_after_s: float = FURTHER_AFTER_S
    ) -> None:
        self.placement = placement
        self._error: Exception | None = None
        self._token = placement.token
        self._meeting = HostedMeeting(placement.port, self._token or NO_TOKEN, one_host=placement.one_host)
        self._meeting.values.own_keys = (f"{messages.VERDICT}/", messages.ROSTER)  # else a stranger could stop the job
        self._conversation = Conversation(self._meeting.values, self._token)
        self.members = MembersHeard(placement, host)
        self._board = messages.Board()
        self._roster: Any = None
        self._asked_at = 0.0
        self._further_after_s = further_after_s
        # None once the ways besides the own port are served: only when a member is missing, to spare the store.
        self._folder: Path | None = folder
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="ddpdoctor-nodes", daemon=True)

    def serve(self) -> str:
        """Start serving. Return why the port cannot be used (another member on this host may have it), or ""."""
        self._conversation.add(f"{messages.CLAIM}/{self.number}", 1)
        self._thread.start()
        return self._meeting.not_listening

    @property
    def failure(self) -> Exception | None:
        if self._error is not None or not self._meeting.not_listening or self.members.have_come():
            return self._error
        what = f"cannot listen to the other nodes: {self._meeting.not_listening}"
        return UserError(what, help="Only this node is watched. Choose another --exchange-port, the same on all nodes.")

    def conversation(self) -> Conversation:
        return self._conversation

    def ask(self) -> None:
        self._asked_at = time.monotonic()
        self._post(request=self._board.request + 1)

    def has_answers(self) -> bool:
        """Return whether all present members have answered the last request, or have run out of time."""
        late = time.monotonic() - self._asked_at > GATHER_LIMIT_S
        return self.members.have_answered(self._board.request, late=late)

    def save(self, folder: Path) -> NodesSeen:
        """Write the other members' records into the run folder; return the state of all members."""
        for number, packed in self.members.take_packed().items():
            with contextlib.suppress(BadMessage, OSError):  # counts as not sent
                make_folder(folder / FOLDER)
                messages.unpack_folder(packed, folder / FOLDER / str(number))
                self.members.gathered.add(number)
        return self.members.seen()

    def announce(self, judgment: Judgment, *, stop: bool, place: str) -> None:
        """Send the verdict. If the job is stopped, wait until all know why, or their ranks would seem to fail."""
        number = self._board.verdict + 1
        verdict = messages.JobVerdict(judgment=judgment, stop=stop, place=place)
        try:
            self._conversation.send(f"{messages.VERDICT}/{number}", verdict)
        except StoreError as error:
            self._error = self._error or error
            return
        self._post(verdict=number)
        if stop:
            until = self._began + JOIN_LIMIT_S  # some may still be on their way
            wait_until(
                lambda: (time.monotonic() >= until or self.members.have_come()) and self.members.have_heard(number),
                TELL_LIMIT_S,
                HEAR_EVERY_S,
            )

    def wait_for_ends(self, is_disturbed: Callable[[], bool]) -> None:
        """Wait a while until all members' launchers have ended; then request the records of those still running."""
        self._post(ends=True)
        wait_until(lambda: self.members.have_ended() or is_disturbed(), LEAVE_LIMIT_S, HEAR_EVERY_S)
        if not self.members.have_ended():
            self.ask()
            wait_until(self.has_answers, GATHER_LIMIT_S, HEAR_EVERY_S)

    def close(self) -> None:
        """Wait until the present members have received the verdict, then stop serving."""
        wait_until(lambda: self.members.have_heard(self._board.verdict), TELL_LIMIT_S, HEAR_EVERY_S)
        self._post(left=True)
        self._ended.set()
        self._thread.join(timeout=CLOSE_LIMIT_S)
        self._meeting.close()

    def _post(self, **changed: Any) -> None:
        self._board = replace(self._board, **changed)
        self._meeting.announce(messages.write_board(self._board))

    def _hear(self) -> None:
        while not self._ended.wait(HEAR_EVERY_S):
            try:
                self.members.hear(self._meeting.values.heard())
                waited = time.monotonic() - self._began > self._further_after_s or self._meeting.not_listening
                if self._folder is not None and waited and not self.members.have_come():
                    folder, self._folder = self._folder, None
                    with contextlib.suppress(StoreError, OSError):
                        self._meeting.serve_folder(folder)
                    if self.placement.store is not None:
                        word = partial(self._leave_word, *self.placement.store)
                        threading.Thread(target=word, name="ddpdoctor-word", daemon=True).start()
                for number in self.members.unknown():
                    self._take_greeting(number)
                for number, request in self.members.unread():
                    self._take_greeting(number)
                    with contextlib.suppress(StoreError):  # damaged or already gone: counts as not sent
                        # It is there already: who has not sent what its pulse says must not hold up the others.
                        packed = self._conversation.take_bytes(f"{messages.EVIDENCE}/{number}/{request}", 0.0)
                        if packed is not None:
                            self.members.receive(number, request, packed)
                nodes = self.members.seen().nodes
                key = [(node.number, node.host, node.presence, node.ranks) for node in nodes]
                if key != self._roster:
                    self._conversation.send(messages.ROSTER, messages.MemberList(nodes=nodes))
                    self._roster = key
                    self._post(roster=self._board.roster + 1)
            except Exception as error:  # noqa: BLE001 - watching the job continues without the others
                self._error = self._error or error

    def _take_greeting(self, number: int) -> None:
        greeting = messages.find(self._conversation, messages.Greeting, f"{messages.GREETING}/{number}")
        if greeting is not None:
            self.members.greet(number, greeting)

    def _leave_word(self, host: str, port: int) -> None:
        with contextlib.suppress(StoreError, OSError):
            hosts = ("127.0.0.1",) if self.placement.one_host else own_addresses()
            second = SecondPort(hosts=hosts, port=self._meeting.server.listen())
            while not self._ended.is_set():
                with (
                    contextlib.suppress(StoreError),
                    contextlib.closing(open_job_store(host, port, PREFIX, OPEN_LIMIT_S)) as store,
                ):
                    conversation = Conversation(store, self._token)
                    conversation.send(SECOND_PORT, second)
                    # A SET has no answer, so read the key back to be sure that it is stored.
                    if messages.find(conversation, SecondPort, SECOND_PORT) == second:
                        return
                self._ended.wait(OPEN_EVERY_S)
