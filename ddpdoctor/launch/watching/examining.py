"""Decides when to take evidence of a running job, on this node or on all, and whether to stop the job."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.launch.nodes.joining import save_nodes
from ddpdoctor.launch.nodes.packing import pack_folder
from ddpdoctor.launch.watching.evidence import PATIENT_LIMIT_S
from ddpdoctor.launch.watching.machine import note_control_flow, note_machine
from ddpdoctor.launch.watching.reached import note_reached, try_places
from ddpdoctor.launch.watching.suspicion import Suspicion, suspicion_of
from ddpdoctor.model.findings import Judgment, Severity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.command.options import OnHang
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.other_node import OtherNode
    from ddpdoctor.launch.watching.suspicion import NodeProgress
    from ddpdoctor.launch.watching.watch import JobWatch
    from ddpdoctor.model.facts import NodesSeen

LOOK_AGAIN_S = 1.5
QUIET_S = 2.0
"""Our choice: the first pause after a report of a job that continues. Each later one is twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The result of a check."""

    judgment: Judgment
    """Has no error if an earlier report no longer holds."""
    stop: bool
    """Whether to stop the job."""


_NOTHING = Examined(judgment=Judgment(findings=(), checks=(), certain=False), stop=False)


def has_errors(judgment: Judgment) -> bool:
    """Return whether a judgment contains an error."""
    return any(finding.severity is Severity.ERROR for finding in judgment.findings)


def _stood(progress: list[NodeProgress]) -> int:
    return sum(node.stood for node in progress)


class Examining:
    """Decides when to check, takes this node's evidence, requests that of the others, and has all of it judged."""

    def __init__(
        self, watch: JobWatch, judge: Callable[[Path, int | None], Judgment], hang_timeout_s: float, on_hang: OnHang,
        place: str,
    ) -> None:  # fmt: skip
        """Take this node's watch, the rules, and the place of the report."""
        self.nodes: FirstNode | OtherNode | None = None
        """The connection to the other nodes, if there are any."""
        self.judged_at: str | None = None
        """The report's place on the node that judged the job, or None if this one did."""
        self._place = place
        self._watch, self._judge = watch, judge
        self._hang_timeout_s = hang_timeout_s
        self._on_hang = on_hang
        self._next_look_ns = 0
        self._last_look_ns = 0
        self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self._shown_ns = 0
        """When a report was last shown or confirmed, or 0 if none holds."""
        self._stood_then = 0
        """How many ranks made no progress at that time."""
        self._patience_s = 1.0
        self._began_ns = 0
        """When the last evidence was begun."""
        self._moved = False
        self._seen: NodesSeen | None = None
        self._is_asking = False

    @property
    def _folder(self) -> Path:
        return self._watch.readable()

    def examine(self) -> Examined | None:
        """Do the next step that is due; return a result if one was reached now, else None."""
        nodes = self.nodes
        if nodes is not None and nodes.is_first:
            return self._examine_with_all(nodes)
        if nodes is not None:
            nodes.say(progress=self._watch.own_progress(), ranks=self._watch.rank_range())
            if nodes.alone_since_ns is None or nodes.verdict is not None:  # it may be the first's final verdict
                return self._obey(nodes)
        progress = self._progress_of_all()
        if self._is_over(progress):
            return _NOTHING
        if not self._is_time(progress):
            return None
        self._take()
        return self._conclude()

    def announce(self, examined: Examined, *, stop: bool) -> None:
        """Send the result to the other nodes if this node judges."""
        if self.nodes is not None and self.nodes.is_first:
            self.nodes.announce(examined.judgment, stop=stop, place=self._place)

    def judge_end(self, status: int, is_disturbed: Callable[[], bool]) -> Judgment:
        """Judge a job whose launcher has ended here, by the records of all nodes."""
        nodes = self.nodes
        if nodes is None:
            return self._judge_all()
        if nodes.is_first:
            nodes.wait_for_ends(is_disturbed)
            judgment = self._judge_all()
            nodes.announce(judgment, stop=self._stops(judgment) and self._others_hang(nodes, status), place=self._place)
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
        """Judge the job by what is saved here so far, without asking other nodes."""
        return self._judge(self._folder, None)

    def close(self) -> None:
        """Leave the other nodes."""
        if self.nodes is not None:
            self.nodes.close()

    @property
    def failure(self) -> Exception | None:
        """The error in the communication between nodes, if any."""
        return self.nodes.failure if self.nodes is not None else None

    def _judge_all(self) -> Judgment:
        """Judge the job by everything saved; if the judgment asks for more facts, collect them and judge again."""
        self.save_nodes()
        judgment = self._judge(self._folder, None)
        knows_more = note_machine(self._folder, judgment) | note_control_flow(self._folder, judgment)
        if self.nodes is not None and self._seen is not None:
            knows_more |= note_reached(self._folder, judgment, self._seen, self.nodes.placement)
        return self._judge(self._folder, None) if knows_more else judgment

    def stand_by(self) -> None:
        """Delay the next check, because the result has been shown and the job continues."""
        self._shown_ns = time.monotonic_ns()
        self._stood_then = _stood(self._progress_of_all())
        self._quiet_until_ns = self._shown_ns + int(self._quiet_s * 1e9)
        self._quiet_s = min(self._quiet_s * 2, max(QUIET_S, self._hang_timeout_s))

    def withdraw(self) -> None:
        """Forget the current report, on all nodes."""
        self._shown_ns = self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self.announce(_NOTHING, stop=False)

    def have_moved(self) -> bool:
        """Return whether a rank without progress at the last report has moved since."""
        return bool(self._shown_ns) and _stood(self._progress_of_all()) < self._stood_then

    def _examine_with_all(self, nodes: FirstNode) -> Examined | None:
        if self._is_asking:
            if not nodes.has_answers():
                return None
            self._is_asking = False
            return self._conclude()
        progress = self._progress_of_all()
        if self._is_over(progress):
            return _NOTHING
        if self._is_time(progress):
            nodes.ask()
            self._is_asking = True
            self._take()
        return None

    def _obey(self, nodes: OtherNode) -> Examined | None:
        """Answer the first member's request, and take its verdict if there is one."""
        if request := nodes.request:
            self._take()
            if self._watch.own_progress().never and nodes.placement.store is not None:
                try_places(self._folder, (nodes.placement.store,))
            nodes.answer(request, pack_folder(self._folder), moved=self._moved)
            self._watch.evidence.forget_kept()
        return self._take_stop(nodes)

    def _take_stop(self, nodes: OtherNode) -> Examined | None:
        verdict = nodes.take_verdict()
        if verdict is None or not verdict.stop:
            return None
        self.save_nodes()
        self.judged_at = verdict.place
        return Examined(judgment=verdict.judgment, stop=self._on_hang != "report")

    def _others_hang(self, nodes: FirstNode, status: int) -> bool:
        """Return whether the other nodes wait in vain. After a failure here, torch may end them by itself."""
        own = self._watch.own_progress()
        own = replace(own, ended_s=None) if status else own
        return suspicion_of([own, *nodes.members.progress()], self._hang_timeout_s) is Suspicion.STRONG

    def _stops(self, judgment: Judgment) -> bool:
        """Return whether to stop a job with this judgment."""
        return {"auto": judgment.proven, "kill": judgment.certain, "report": False}[self._on_hang]

    def _progress_of_all(self) -> list[NodeProgress]:
        others = self.nodes.members.progress() if self.nodes is not None and self.nodes.is_first else []
        return [self._watch.own_progress(), *others]

    def _is_over(self, progress: list[NodeProgress]) -> bool:
        """Return whether a report was shown, but the ranks no longer look as if they hang, and one has moved."""
        if not self._shown_ns or suspicion_of(progress, self._hang_timeout_s) is not Suspicion.NONE:
            return False
        return not self._stood_then or _stood(progress) < self._stood_then

    def _is_time(self, progress: list[NodeProgress]) -> bool:
        """Return whether to take evidence now: soon on strong suspicion, with growing pauses on weak suspicion."""
        now_ns = time.monotonic_ns()
        suspicion = suspicion_of(progress, self._hang_timeout_s)
        quiet_until_ns = 0 if self._has_changed(progress, now_ns) else self._quiet_until_ns
        if suspicion is Suspicion.STRONG:
            return now_ns >= max(self._last_look_ns + LOOK_AGAIN_S * 1e9, quiet_until_ns)
        return suspicion is Suspicion.WEAK and now_ns >= max(self._next_look_ns, quiet_until_ns)

    def _has_changed(self, progress: list[NodeProgress], now_ns: int) -> bool:
        """Return whether a rank has moved or ended since the last report was shown."""
        if not self._shown_ns:
            return False
        ended = [node.ended_s for node in progress if node.ended_s is not None]
        has_ended = bool(ended) and min(ended) < (now_ns - self._shown_ns) / 1e9
        return has_ended or _stood(progress) < self._stood_then

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
        if not is_wrong or self._has_moved():
            self._watch.evidence.forget_kept()
            self._next_look_ns = time.monotonic_ns() + int(self._patience_s * 1e9)
            self._patience_s = min(self._patience_s * 2, max(1.0, self._hang_timeout_s / 4))
            return _NOTHING if not is_wrong and self.have_moved() else None
        return Examined(judgment=judgment, stop=self._stops(judgment))

    def _has_moved(self) -> bool:
        """Return whether a rank has made progress meanwhile, so that its evidence is out of date.

        With other nodes, only progress until each had its evidence counts: a later check may unblock another node.
        """
        if self.nodes is not None and self.nodes.is_first:
            return self._moved or self.nodes.members.have_moved()
        return self._watch.has_moved_since(self._began_ns)

    def save_nodes(self) -> None:
        """Save the state of all members and the records that they sent."""
        if self.nodes is not None:
            self._seen = self.nodes.save(self._folder) if self.nodes.is_first else self.nodes.seen()
            save_nodes(self._folder, self._seen)
