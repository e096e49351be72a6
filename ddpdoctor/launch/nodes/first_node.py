"""The first member of a job: it receives the others' beats, requests their records, and sends them the verdict."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.exchange.conversation import BadMessage, Conversation
from ddpdoctor.exchange.meeting import HostedMeeting
from ddpdoctor.exchange.store import StoreError, wait_until
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.launch.nodes.further_ways import FurtherWays
from ddpdoctor.launch.nodes.members_heard import MembersHeard
from ddpdoctor.launch.nodes.node_messages import (
    CLAIM,
    EVIDENCE,
    GREETING,
    ROSTER,
    VERDICT,
    Board,
    Greeting,
    JobVerdict,
    MemberList,
    find,
    write_board,
)
from ddpdoctor.launch.nodes.packing import unpack_folder
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.model.facts import NodesSeen
    from ddpdoctor.model.findings import Judgment

HEAR_EVERY_S = 0.1
CLOSE_LIMIT_S = 2.0
GATHER_LIMIT_S = 5.0
"""Our choice: the time that a live node has to send its record, half of what is left after the hang timeout."""
LEAVE_LIMIT_S = 11.0
"""Our choice: when one launcher ends, the wait for the others; a little longer than until a member counts as silent."""
TELL_LIMIT_S = 8.0
"""Our choice: how long to stay until others have received the verdict. Over a folder a beat comes only every three
seconds and takes time itself. Silent members are not waited for."""
FURTHER_AFTER_S = 3.0
"""Our choice: how long members may take to arrive over the port before other ways are served too."""
JOIN_LIMIT_S = 12.0
"""Our choice: how long after its start the first member expects others that still look for a way to it."""
FOLDER = "gathered"
"""Subfolder of the run folder with the other members' records, by number. Members on the same file system record in
``nodes`` instead."""


class FirstNode:
    """The session's view of the other members. A thread receives from them; only methods that say so wait for them."""

    number = 0
    is_first: Literal[True] = True

    def __init__(
        self, placement: Placement, host: str, folder: Path, *, further_after_s: float = FURTHER_AFTER_S
    ) -> None:
        """Take this member's placement, its host name, and a folder that all members may see."""
        self.placement = placement
        self._error: Exception | None = None
        self._token = placement.token
        self._meeting = HostedMeeting(placement.port, self._token or NO_TOKEN, one_host=placement.one_host)
        self._meeting.server.values.own_keys = (f"{VERDICT}/", ROSTER)  # else a stranger could stop the job
        self._conversation = Conversation(self._meeting.store(), self._token)
        self.members = MembersHeard(placement, host)
        self._board = Board()
        self._roster: Any = None
        self._asked_at = 0.0
        self._further_after_s = further_after_s
        self._further: FurtherWays | None = FurtherWays(self._meeting, placement, folder)
        """The ways besides the own port, or None once they are served."""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="ddpdoctor-nodes", daemon=True)

    def serve(self) -> str:
        """Start serving. Return why the port cannot be used (another member on this host may have it), or ""."""
        self._conversation.add(f"{CLAIM}/{self.number}", 1)
        self._thread.start()
        return self._meeting.not_listening

    @property
    def failure(self) -> Exception | None:
        """The error that prevents hearing from the other members, if any."""
        if self._error is not None or not self._meeting.not_listening or self.members.have_come():
            return self._error
        return UserError(
            f"cannot listen to the other nodes: {self._meeting.not_listening}",
            help="Only this node is watched. Choose another --exchange-port, the same on all nodes.",
        )

    def conversation(self) -> Conversation:
        """Return the conversation of all members."""
        return self._conversation

    def others(self) -> list[int]:
        """Return the numbers of the members that have beaten and not left."""
        return self.members.numbers()

    def ask(self) -> None:
        """Ask all members for evidence."""
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
                unpack_folder(packed, folder / FOLDER / str(number))
                self.members.note_gathered(number)
        return self.members.seen()

    def announce(self, judgment: Judgment, *, stop: bool, place: str) -> None:
        """Send all members the verdict, whether the job is stopped, and where the report is.

        If the job is stopped, wait until they know why; otherwise their ranks would look as if they had failed.
        """
        number = self._board.verdict + 1
        verdict = JobVerdict(judgment=judgment, stop=stop, place=place)
        try:
            self._conversation.send(f"{VERDICT}/{number}", verdict)
        except StoreError as error:
            self._error = self._error or error
            return
        self._post(verdict=number)
        if stop:
            heard = partial(self.members.have_heard, number)
            wait_until(lambda: not self._is_early() and heard(), TELL_LIMIT_S, HEAR_EVERY_S)

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
        self._meeting.announce(write_board(self._board))

    def _hear(self) -> None:
        while not self._ended.wait(HEAR_EVERY_S):
            try:
                self._hear_once()
            except Exception as error:  # noqa: BLE001 - watching the job continues without the others
                self._error = self._error or error

    def _hear_once(self) -> None:
        self.members.hear(self._meeting.heard())
        self._serve_further()
        for number in self.members.unknown():
            self._take_greeting(number)
        for number, request in self.members.unread():
            self._take_greeting(number)
            with contextlib.suppress(StoreError):  # damaged or already gone: counts as not sent
                # It is there already: who has not sent what its pulse says must not hold up the others.
                packed = self._conversation.take_bytes(f"{EVIDENCE}/{number}/{request}", 0.0)
                if packed is not None:
                    self.members.receive(number, request, packed)
        self._post_roster()

    def _take_greeting(self, number: int) -> None:
        greeting = find(self._conversation, Greeting, f"{GREETING}/{number}")
        if greeting is not None:
            self.members.greet(number, greeting)

    def _is_early(self) -> bool:
        """Return whether some members may still be on their way."""
        return time.monotonic() - self._began < JOIN_LIMIT_S and not self.members.have_come()

    def _serve_further(self) -> None:
        """Serve the other ways too once a member is missing."""
        waited = time.monotonic() - self._began > self._further_after_s or self._meeting.not_listening
        if self._further is not None and waited and not self.members.have_come():
            further, self._further = self._further, None
            self._meeting.callback(further.close)
            further.begin()

    def _post_roster(self) -> None:
        """Send the list of members to all whenever it changes."""
        nodes = self.members.seen().nodes
        key = [(node.number, node.host, node.presence, node.ranks) for node in nodes]
        if key != self._roster:
            self._conversation.send(ROSTER, MemberList(nodes=nodes))
            self._roster = key
            self._post(roster=self._board.roster + 1)
