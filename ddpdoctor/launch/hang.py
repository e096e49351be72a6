"""Decides when to take evidence of a running job, on this node or on all, and whether to stop the job."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.collect.run_files import save
from ddpdoctor.launch.evidence import PATIENT_LIMIT_S
from ddpdoctor.launch.node_messages import pack_folder
from ddpdoctor.launch.watch import Suspicion, suspicion_of
from ddpdoctor.model.facts import MEMBERS_NAME, REACHED_NAME, Presence
from ddpdoctor.model.findings import Judgment, Severity, hangs
from ddpdoctor.model.node import DEVICE_ERROR
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ddpdoctor.launch.command_line import OnHang
    from ddpdoctor.launch.first_node import FirstNode
    from ddpdoctor.launch.node_messages import NodeProgress
    from ddpdoctor.launch.other_node import OtherNode
    from ddpdoctor.launch.placement import Placement
    from ddpdoctor.launch.watch import JobWatch
    from ddpdoctor.model.facts import NodesSeen
    from ddpdoctor.model.launch import Connecting

FILE = "nodes.json"  # the file in the run folder with the state of all members, a ``NodesSeen``
MACHINE_CODE = "DD611"  # the rule that uses the machine's facts
# The rules that use the kernel's log, if the error is one of a device, or an abort may have been caused by one.
DEVICE_CODES = frozenset({"DD604", "DD605"})
_ABORTED = ("SIGABRT", "SIGSEGV", "SIGBUS")
MACHINE_FRESH_S = 60.0  # our choice: facts younger than this are not read again for the next check
FLOW_CODES = frozenset({"DD602", "DD603"})  # the rules that use the control flow
REACH_CODES = frozenset({"DD605", "DD607"})  # the rules that use the result
# Our choice: a missing node is reported within 10 s of the hang timeout. One connection is tried for 3 s.
LIMIT_S = 4.0
REACH_FRESH_S = 30.0  # our choice: if the last attempts are younger than this, they are not repeated
MOST_PLACES = 16
Place = tuple[str, int]  # host and port
LOOK_AGAIN_S = 1.5
QUIET_S = 2.0  # Our choice: the first pause after a report of a job that continues. Each later one is twice as long.
NOTE_EVERY_S = 2.0  # our choice: what is known of other nodes comes with their beats, one a second
NOTE_SHARE = 0.01  # The fraction of a core that the notes may use. With thousands of members they become rarer.


def note_machine(folder: Path, judgment: Judgment) -> bool:
    from ddpdoctor.collect.run_files import MACHINE_NAME, SECTIONS, keep_users_logs, save_machine

    ended = [finding.summary for finding in judgment.findings if finding.code in DEVICE_CODES]
    if any(finding.code == MACHINE_CODE for finding in judgment.findings):
        sections = SECTIONS
    elif any(DEVICE_ERROR.search(text) or any(name in text for name in _ABORTED) for text in ended):
        sections = frozenset({"kernel_log"})
    else:
        return False
    if is_fresh(folder / MACHINE_NAME, MACHINE_FRESH_S):
        return False
    with contextlib.suppress(OSError):  # a full disk loses this evidence, but must not affect the job
        keep_users_logs(folder, os.environ.get("NCCL_DEBUG_FILE", ""))
        save_machine(folder, sections)
        return True
    return False


def is_fresh(path: Path, limit_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime < limit_s
    except OSError:
        return False


def note_control_flow(folder: Path, judgment: Judgment) -> bool:
    if not any(finding.code in FLOW_CODES for finding in judgment.findings):
        return False
    from ddpdoctor.collect.run import read_job
    from ddpdoctor.collect.run_files import CONTROL_FLOW_NAME, save_control_flow
    from ddpdoctor.model.errors import UserError

    if (folder / CONTROL_FLOW_NAME).exists():
        return False
    try:
        return save_control_flow(folder, read_job(folder))
    except UserError:
        return False


def note_reached(folder: Path, judgment: Judgment, seen: NodesSeen, placement: Placement) -> bool:
    """Try the missing nodes if the judgment needs it; return whether there are new facts to judge by."""
    if not any(finding.code in REACH_CODES for finding in judgment.findings):
        return False
    places = places_to_try(seen, placement)
    return bool(places) and try_places(folder, places)


def places_to_try(seen: NodesSeen, placement: Placement) -> tuple[Place, ...]:
    """Return the places to try: the job's own store, and each host that is silent or absent.

    Nobody needs to listen on a host's port, because a refusal also shows that the host is up. A member that hears
    nothing from the first tries all others, to find out who is cut off.
    """
    quiet = {Presence.SILENT, Presence.ABSENT}
    others = [node for node in seen.nodes if node.number != seen.own and node.host]
    hosts = [node.host for node in others if node.presence in quiet or seen.alone_since_ns is not None]
    own = {node.host for node in seen.nodes if node.number == seen.own}
    store = (placement.store,) if placement.store is not None and placement.store[0] else ()
    places = [*store, *((host, placement.port) for host in hosts if host not in own)]
    return tuple(dict.fromkeys(places))[:MOST_PLACES]


def try_places(folder: Path, places: Sequence[Place]) -> bool:
    """Connect to all places at once, and save how that ended; return whether there are new results."""
    if is_fresh(folder / REACHED_NAME, REACH_FRESH_S):
        return False
    from ddpdoctor.probes.store import knock

    answers: queue.SimpleQueue[tuple[Place, Connecting]] = queue.SimpleQueue()
    for place in places:  # daemon threads: a name lookup cannot be stopped
        threading.Thread(
            target=lambda host, port: answers.put(((host, port), knock(host, port, None)[-1])), args=place,
            name="ddpdoctor-knock", daemon=True,
        ).start()  # fmt: skip
    found: dict[Place, Connecting] = {}
    limit = time.monotonic() + LIMIT_S
    while len(found) < len(places):
        try:
            place, attempt = answers.get(timeout=max(limit - time.monotonic(), 0.01))
        except queue.Empty:
            break
        found[place] = attempt
    with contextlib.suppress(OSError):  # a full disk loses this evidence, but must not affect the job
        save(folder / REACHED_NAME, tuple(found[place] for place in places if place in found))
        return bool(found)
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The result of a check."""

    judgment: Judgment  # has no error if an earlier report no longer holds
    stop: bool  # whether to stop the job


NOTHING_FOUND = Judgment(findings=(), checks=(), certain=False)
_NOTHING = Examined(judgment=NOTHING_FOUND, stop=False)


def has_errors(judgment: Judgment) -> bool:
    return any(finding.severity is Severity.ERROR for finding in judgment.findings)


def _stood(progress: list[NodeProgress]) -> int:
    return sum(node.stood for node in progress)


class Examining:
    """Decides when to check, takes this node's evidence, requests that of the others, and has all of it judged."""

    def __init__(
        self, watch: JobWatch, judge: Callable[[Path, int | None], Judgment], hang_timeout_s: float, on_hang: OnHang,
        place: str,
    ) -> None:  # fmt: skip
        self.nodes: FirstNode | OtherNode | None = None  # the connection to the other nodes, if there are any
        self.judged_at: str | None = None  # the report's place on the node that judged the job, or None if this one did
        self._place = place
        self._watch, self._judge = watch, judge
        self._hang_timeout_s = hang_timeout_s
        self._on_hang = on_hang
        self._next_look_ns = 0
        self._last_look_ns = 0
        self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self._shown_ns = 0  # when a report was last shown or confirmed, or 0 if none holds
        self._stood_then = 0  # how many ranks made no progress at that time
        # Who was blamed. While all of them stand still, the report holds, even if one that waited has given up.
        self._blamed: tuple[int, ...] = ()
        self._patience_s = 1.0
        self._began_ns = 0  # when the last evidence was begun
        self._moved = False
        self._seen: NodesSeen | None = None
        self._is_asking = False
        self._next_note_ns = 0
        self._asked_all = 0  # the request of `ddpdoctor status --dump` for which all nodes were asked, or 0

    @property
    def _first(self) -> FirstNode | None:
        """The connection to the other nodes if this is the first, which judges for all."""
        return self.nodes if self.nodes is not None and self.nodes.is_first else None

    @property
    def _folder(self) -> Path:
        return self._watch.evidence.readable()

    def examine(self) -> Examined | None:
        """Do the next step that is due; return a result if one was reached now, else None."""
        first, nodes = self._first, self.nodes
        if nodes is not None and not nodes.is_first:
            nodes.say(progress=self._watch.own_progress(), ranks=self._watch.rank_range())
            if nodes.alone_since_ns is None or nodes.verdict is not None:  # it may be the first's final verdict
                if request := nodes.request:
                    self._take()
                    if self._watch.own_progress().never and nodes.placement.store is not None:
                        try_places(self._folder, (nodes.placement.store,))
                    nodes.answer(request, pack_folder(self._folder), moved=self._moved)
                    self._watch.evidence.forget_kept()
                return self._take_stop(nodes)
        if first is not None and self._is_asking:
            if not first.has_answers():
                return None
            self._is_asking = False
            return self._conclude()
        progress = self._progress_of_all()
        # A report was shown, but the ranks no longer look as if they hang, and one has moved.
        is_calm = bool(self._shown_ns) and suspicion_of(progress, self._hang_timeout_s) is Suspicion.NONE
        if is_calm and (not self._stood_then or self._stands_less(progress)):
            return _NOTHING
        if not self._is_time(progress):
            return None
        if first is not None:
            first.ask()
            self._is_asking = True
        self._take()
        return None if self._is_asking else self._conclude()

    def serve(self) -> None:
        """Do what `ddpdoctor status` needs: note the nodes, and take evidence on request. Wait for no other node."""
        first, began_ns = self._first, time.monotonic_ns()
        if first is not None and began_ns >= self._next_note_ns:  # the others know only what the first tells them
            with contextlib.suppress(OSError):  # a full disk
                save(self._watch.folder / MEMBERS_NAME, first.members.seen())
            ended_ns = time.monotonic_ns()
            self._next_note_ns = ended_ns + int(max(NOTE_EVERY_S * 1e9, (ended_ns - began_ns) / NOTE_SHARE))
        asked = self._watch.evidence.dump_asked()
        if not asked:
            return
        if self._asked_all != asked:
            if first is not None:
                first.ask()
            self._watch.take_evidence(limit_s=PATIENT_LIMIT_S)
            self._asked_all = asked
        if first is None or first.has_answers():
            self.save_nodes()
            self._watch.evidence.set_control(ring_layout.CONTROL_DUMPED, asked)

    def announce(self, judgment: Judgment, *, stop: bool) -> None:
        if self._first is not None:
            self._first.announce(judgment, stop=stop, place=self._place)

    def judge_end(self, status: int, is_disturbed: Callable[[], bool]) -> Judgment:
        """Judge a job whose launcher has ended here, by the records of all nodes."""
        nodes = self.nodes
        if nodes is None:
            return self._judge_all()
        if nodes.is_first:
            nodes.wait_for_ends(is_disturbed)
            judgment, stop = self._judge_all(), False
            if self._stops(judgment):  # if the others wait in vain; after a failure here, torch may end them by itself
                own = self._watch.own_progress()
                own = replace(own, ended_s=None) if status else own
                suspicion = suspicion_of([own, *nodes.members.progress()], self._hang_timeout_s)
                stop = suspicion is Suspicion.STRONG
            nodes.announce(judgment, stop=stop, place=self._place)
            return judgment
        nodes.say(progress=self._watch.own_progress(), ranks=self._watch.rank_range())
        nodes.leave(status, pack_folder(self._folder), is_disturbed)
        verdict = nodes.take_verdict() or nodes.last_word
        if verdict is None:
            return self._judge_all()
        self.save_nodes()
        self.judged_at = verdict.place
        return verdict.judgment

    def take_stop(self) -> Judgment | None:
        """Return the first node's verdict if it stops the job and was not taken before the launcher ended here.

        Ranks here may fail as soon as another node has stopped its own.
        """
        nodes = self.nodes
        if nodes is None or nodes.is_first or self._on_hang == "report":
            return None
        examined = self._take_stop(nodes) if nodes.verdict is not None and nodes.verdict.stop else None
        return examined.judgment if examined is not None else None

    def judge_now(self) -> Judgment:
        return self._judge(self._folder, None)

    def _judge_all(self) -> Judgment:
        """Judge the job by everything saved; if the judgment asks for more facts, collect them and judge again."""
        self.save_nodes()
        judgment = self._judge(self._folder, None)
        knows_more = note_machine(self._folder, judgment) | note_control_flow(self._folder, judgment)
        if self.nodes is not None and self._seen is not None:
            knows_more |= note_reached(self._folder, judgment, self._seen, self.nodes.placement)
        return self._judge(self._folder, None) if knows_more else judgment

    def stand_by(self, judgment: Judgment) -> None:
        """Delay the next check, because this has been shown and the job continues."""
        self._shown_ns = time.monotonic_ns()
        self._stood_then = _stood(self._progress_of_all())
        self._blamed = next((found.ranks for found in hangs(judgment)), ())
        self._quiet_until_ns = self._shown_ns + int(self._quiet_s * 1e9)
        self._quiet_s = min(self._quiet_s * 2, max(QUIET_S, self._hang_timeout_s))

    def withdraw(self) -> None:
        self._shown_ns = self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self.announce(NOTHING_FOUND, stop=False)

    def have_moved(self) -> bool:
        """Return whether a rank that stood still at the last report has moved since."""
        return bool(self._shown_ns) and self._stands_less(self._progress_of_all())

    def _stands_less(self, progress: list[NodeProgress]) -> bool:
        return _stood(progress) < self._stood_then and not self._watch.all_stand(self._blamed)

    def _take_stop(self, nodes: OtherNode) -> Examined | None:
        verdict = nodes.take_verdict()
        if verdict is None or not verdict.stop:
            return None
        self.save_nodes()
        self.judged_at = verdict.place
        return Examined(judgment=verdict.judgment, stop=self._on_hang != "report")

    def _stops(self, judgment: Judgment) -> bool:
        return {"auto": judgment.proven, "kill": judgment.certain, "report": False}[self._on_hang]

    def _progress_of_all(self) -> list[NodeProgress]:
        others = self._first.members.progress() if self._first is not None else []
        return [self._watch.own_progress(), *others]

    def _is_time(self, progress: list[NodeProgress]) -> bool:
        """Return whether to take evidence now: soon on strong suspicion, with growing pauses on weak suspicion."""
        now_ns = time.monotonic_ns()
        suspicion = suspicion_of(progress, self._hang_timeout_s)
        quiet_until_ns = self._quiet_until_ns
        if self._shown_ns:  # no pause once a rank has moved or ended since
            ended = [node.ended_s for node in progress if node.ended_s is not None]
            has_ended = bool(ended) and min(ended) < (now_ns - self._shown_ns) / 1e9
            quiet_until_ns = 0 if has_ended or self._stands_less(progress) else quiet_until_ns
        if suspicion is Suspicion.STRONG:
            return now_ns >= max(self._last_look_ns + LOOK_AGAIN_S * 1e9, quiet_until_ns)
        return suspicion is Suspicion.WEAK and now_ns >= max(self._next_look_ns, quiet_until_ns)

    def _take(self) -> None:
        """Take evidence of this node. With other nodes, copy its rings, because a check there may unblock the job."""
        self._began_ns = time.monotonic_ns()
        self._watch.take_evidence(keep_rings=self.nodes is not None, limit_s=PATIENT_LIMIT_S)
        self._last_look_ns = time.monotonic_ns()
        self._moved = self._watch.has_moved_since(self._began_ns)

    def _conclude(self) -> Examined | None:
        """Judge the evidence; return None if a rank has moved, or if all is well and no report must be withdrawn."""
        judgment = self._judge_all()
        is_wrong = has_errors(judgment)
        is_outdated = False
        if is_wrong and self._first is not None:
            # Only progress until each had its evidence counts: a later check may unblock another node.
            is_outdated = self._moved or self._first.members.have_moved()
        elif is_wrong:
            is_outdated = self._watch.has_moved_since(self._began_ns)
        if not is_wrong or is_outdated:
            self._watch.evidence.forget_kept()
            self._next_look_ns = time.monotonic_ns() + int(self._patience_s * 1e9)
            self._patience_s = min(self._patience_s * 2, max(1.0, self._hang_timeout_s / 4))
            return _NOTHING if not is_wrong and self.have_moved() else None
        return Examined(judgment=judgment, stop=self._stops(judgment))

    def save_nodes(self) -> None:
        if self.nodes is not None:
            self._seen = self.nodes.save(self._folder) if self.nodes.is_first else self.nodes.seen()
            with contextlib.suppress(OSError):  # a full disk
                save(self._folder / FILE, self._seen)
