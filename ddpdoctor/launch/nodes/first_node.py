"""The first member of a job: it hears the others, asks what they recorded, and tells them the verdict."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.node_meeting import HostedMeeting
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.exchange.token import NO_TOKEN
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
    Roster,
    Verdict,
    find,
    write_board,
)
from ddpdoctor.launch.nodes.packing import BadPack, unpack_folder
from ddpdoctor.model.errors import UserError
from ddpdoctor.recorder.storage.files import make_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.command.placement import Placement
    from ddpdoctor.launch.watching.suspicion import Headway
    from ddpdoctor.model.findings import Judgement
    from ddpdoctor.model.nodes import NodesSeen

HEAR_EVERY_S = 0.1
FETCH_LIMIT_S = 2.0
GATHER_LIMIT_S = 5.0
"""Ours: what a node that lives may take to send what it recorded, half of what is left after the hang timeout."""
LEAVE_LIMIT_S = 11.0
"""Ours: how long the end of one launcher waits for those of others: a little longer than for one that is silent."""
TELL_LIMIT_S = 8.0
"""Ours: how long to stay for others to hear the verdict. By a folder a beat comes every three seconds, and takes
some. A member that is silent is not waited for."""
FURTHER_AFTER_S = 3.0
"""Ours: how long members may take over the port before other ways are served too."""
JOIN_LIMIT_S = 12.0
"""Ours: how long after its start the first counts on members that are yet to find another way to it."""
FOLDER = "gathered"
"""In the run folder: what each other member sent, by number. Members that see this folder too record in ``nodes``."""


class FirstNode:
    """The session's view of the others. A thread hears them; nothing here waits for them but what says so."""

    number = 0
    is_first: Literal[True] = True

    def __init__(self, placement: Placement, host: str, folder: Path) -> None:
        """Take where this member stands, what its host is called, and a folder that all may see."""
        self.placement = placement
        self._error: Exception | None = None
        self._token = placement.token
        self._meeting = HostedMeeting(placement.port, self._token or NO_TOKEN, one_host=placement.one_host)
        self._hosting = ExitStack()
        self._members = MembersHeard(placement, host)
        self._board = Board()
        self._roster: Any = None
        self._asked_at = 0.0
        self._further: FurtherWays | None = FurtherWays(self._meeting, placement, folder)
        """Until they are served."""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="ddpdoctor-nodes", daemon=True)

    def serve(self) -> str:
        """Start; return why the port cannot be had, as where another member of this host serves already, else ""."""
        self._hosting.enter_context(self._meeting)
        self._conversation = Conversation(self._meeting.store(), self._token)
        self._conversation.add(f"{CLAIM}/{self.number}", 1)
        self._thread.start()
        return self._meeting.not_listening

    @property
    def failure(self) -> Exception | None:
        """What keeps the others from being heard, if anything does."""
        if self._error is not None or not self._meeting.not_listening or self._members.have_come():
            return self._error
        return UserError(
            f"the other nodes cannot be heard: {self._meeting.not_listening}",
            help="The job is watched on this node alone. Choose another port with --exchange-port, on all nodes.",
        )

    def headways(self) -> list[Headway]:
        """Return how the ranks of the others get on."""
        return self._members.headways()

    def conversation(self) -> Conversation:
        """Return what all members say to each other."""
        return self._conversation

    def reconnect(self) -> None:
        """Do nothing: it is served here."""

    def others(self) -> list[int]:
        """Return the members that were heard."""
        return self._members.numbers()

    def ask(self) -> None:
        """Ask all members for evidence."""
        self._asked_at = time.monotonic()
        self._post(request=self._board.request + 1)

    def has_answers(self) -> bool:
        """Return whether all that are heard have answered the last request, or have had their time."""
        late = time.monotonic() - self._asked_at > GATHER_LIMIT_S
        return self._members.have_answered(self._board.request, late=late)

    def has_moved(self) -> bool:
        """Return whether ranks of another node have made progress since they were asked."""
        return self._members.have_moved()

    def save(self, folder: Path) -> NodesSeen:
        """Put what the others have sent into the run folder; return who was seen."""
        for number, packed in self._members.take_packed().items():
            with contextlib.suppress(BadPack):
                make_folder(folder / FOLDER)
                unpack_folder(packed, folder / FOLDER / str(number))
                self._members.note_gathered(number)
        return self._members.seen()

    def tell(self, judgement: Judgement, *, stop: bool, place: str) -> None:
        """Let all members have the verdict, whether the job is stopped, and where the report is.

        Before a job is stopped they shall know why: to a launcher elsewhere its ranks would else seem to have failed.
        """
        number = self._board.verdict + 1
        verdict = Verdict(judgement=judgement, stop=stop, place=place)
        try:
            self._conversation.send(f"{VERDICT}/{number}", verdict)
        except StoreError as error:
            self._error = self._error or error
            return
        self._post(verdict=number)
        if stop:
            _wait(lambda: not self._is_early() and self._members.have_heard(number), TELL_LIMIT_S)

    def wait_for_ends(self, is_disturbed: Callable[[], bool]) -> None:
        """Wait a while until the launchers of all members have ended; then ask those that go on for what they have."""
        self._post(ends=True)
        _wait(lambda: self._members.have_ended() or is_disturbed(), LEAVE_LIMIT_S)
        if not self._members.have_ended():
            self.ask()
            _wait(self.has_answers, GATHER_LIMIT_S)

    def close(self) -> None:
        """Let those that are here hear the verdict, and stop serving."""
        _wait(lambda: self._members.have_heard(self._board.verdict), TELL_LIMIT_S)
        self._post(left=True)
        self._ended.set()
        self._thread.join(timeout=FETCH_LIMIT_S)
        self._hosting.close()

    def _post(self, **changed: Any) -> None:
        self._board = replace(self._board, **changed)
        self._meeting.announce(write_board(self._board))

    def _hear(self) -> None:
        while not self._ended.wait(HEAR_EVERY_S):
            try:
                self._hear_once()
            except Exception as error:  # noqa: BLE001 - a job is watched on without the others
                self._error = self._error or error

    def _hear_once(self) -> None:
        self._members.hear(self._meeting.heard())
        self._serve_further()
        for number in self._members.unknown():
            self._take_greeting(number)
        for number, request in self._members.unread():
            self._take_greeting(number)
            with contextlib.suppress(StoreError):  # damaged, or gone again: it counts as not sent
                packed = self._conversation.take_bytes(f"{EVIDENCE}/{number}/{request}", FETCH_LIMIT_S)
                if packed is not None:
                    self._members.receive(number, request, packed)
        self._post_roster()

    def _take_greeting(self, number: int) -> None:
        greeting = find(self._conversation, Greeting, f"{GREETING}/{number}")
        if greeting is not None:
            self._members.greet(number, greeting)

    def _is_early(self) -> bool:
        """Return whether members may be on their way here still."""
        return time.monotonic() - self._began < JOIN_LIMIT_S and not self._members.have_come()

    def _serve_further(self) -> None:
        """Serve the ways that need no port of ours too, once somebody is missed."""
        waited = time.monotonic() - self._began > FURTHER_AFTER_S or self._meeting.not_listening
        if self._further is not None and waited and not self._members.have_come():
            further, self._further = self._further, None
            self._hosting.callback(further.close)
            further.begin()

    def _post_roster(self) -> None:
        """Let all members know who there is, each time that it changes."""
        nodes = self._members.seen().nodes
        key = [(node.number, node.host, node.presence, node.ranks) for node in nodes]
        if key != self._roster:
            self._conversation.send(ROSTER, Roster(nodes=nodes))
            self._roster = key
            self._post(roster=self._board.roster + 1)


def _wait(is_over: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_over() and time.monotonic() < deadline:
        time.sleep(HEAR_EVERY_S)
