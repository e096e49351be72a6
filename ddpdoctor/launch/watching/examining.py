"""When evidence is taken of a running job, alone or with all nodes, and whether the job is to be stopped."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpdoctor.launch.nodes.joining import save_nodes
from ddpdoctor.launch.nodes.packing import pack_folder
from ddpdoctor.launch.watching.machine import note_control_flow, note_machine
from ddpdoctor.launch.watching.reached import note_reached, try_places
from ddpdoctor.launch.watching.suspicion import Suspicion, suspicion_of
from ddpdoctor.model.findings import Judgement, Severity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpdoctor.launch.command.options import OnHang
    from ddpdoctor.launch.nodes.first_node import FirstNode
    from ddpdoctor.launch.nodes.other_node import OtherNode
    from ddpdoctor.launch.watching.suspicion import Headway
    from ddpdoctor.launch.watching.watch import Watch
    from ddpdoctor.model.nodes import NodesSeen

LOOK_AGAIN_S = 1.5
QUIET_S = 2.0
"""Ours: the first pause after a report of a job that goes on; each further one is twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What came of a look."""

    judgement: Judgement
    """Without an error where a report stands that no longer holds."""
    stop: bool
    """The job is to be stopped."""


_NOTHING = Looked(judgement=Judgement(findings=(), checks=(), certain=False), stop=False)


def has_errors(judgement: Judgement) -> bool:
    """Return whether a judgement holds an error."""
    return any(finding.severity is Severity.ERROR for finding in judgement.findings)


def _still(headways: list[Headway]) -> int:
    return sum(headway.still for headway in headways)


class Examining:
    """Decides when to look, takes evidence of this node, has all others take theirs, and has all of it judged."""

    def __init__(
        self, watch: Watch, nodes: FirstNode | OtherNode | None, judge: Callable[[Path, int | None], Judgement],
        hang_timeout_s: float, on_hang: OnHang, place: str,
    ) -> None:  # fmt: skip
        """Take who watches this node, who hears the others, the rules, and where the report will be."""
        self.judged_at: str | None = None
        """Where the report of the node is that has judged the job; None where this one has."""
        self._place = place
        self._watch, self._nodes, self._judge = watch, nodes, judge
        self._hang_timeout_s = hang_timeout_s
        self._on_hang = on_hang
        self._next_look_ns = 0
        self._last_look_ns = 0
        self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self._shown_ns = 0
        """When a report was last shown, or confirmed, of a hang; 0 where none stands."""
        self._still_then = 0
        """How many ranks stood still then."""
        self._patience_s = 1.0
        self._moved = False
        self._seen: NodesSeen | None = None
        self._is_asking = False

    @property
    def _folder(self) -> Path:
        return self._watch.readable()

    def look(self) -> Looked | None:
        """Do what it is time for; return what is wrong with the job, where that was seen now."""
        nodes = self._nodes
        if nodes is not None and nodes.is_first:
            return self._look_with_all(nodes)
        if nodes is not None:
            nodes.say(self._watch.headway(), self._watch.rank_range())
            if nodes.alone_since_ns is None or nodes.verdict is not None:  # which may have been the first's last word
                return self._obey(nodes)
        headways = self._headways()
        if self._is_over(headways):
            return _NOTHING
        if not self._is_time(headways):
            return None
        self._take()
        return self._conclude()

    def tell(self, looked: Looked, *, stop: bool) -> None:
        """Let the other nodes know, where it is this one that judges."""
        if self._nodes is not None and self._nodes.is_first:
            self._nodes.tell(looked.judgement, stop=stop, place=self._place)

    def judge_end(self, status: int, is_disturbed: Callable[[], bool]) -> Judgement:
        """Return what is wrong with a job whose launcher has ended here, by what all nodes have recorded."""
        nodes = self._nodes
        if nodes is None:
            return self._judge_all()
        if nodes.is_first:
            nodes.wait_for_ends(is_disturbed)
            judgement = self._judge_all()
            nodes.tell(judgement, stop=self._stops(judgement) and self._others_hang(nodes, status), place=self._place)
            return judgement
        nodes.say(self._watch.headway(), self._watch.rank_range())
        nodes.leave(status, pack_folder(self._folder), is_disturbed)
        verdict = nodes.take_verdict() or nodes.last_word
        if verdict is None:
            return self._judge_all()
        self._save_nodes()
        self.judged_at = verdict.place
        return verdict.judgement

    def judge_now(self) -> Judgement:
        """Return what is wrong by what is saved here by now; nobody else is asked."""
        return self._judge(self._folder, None)

    def save_nodes(self) -> None:
        """Write down who was seen, with what they have sent."""
        self._save_nodes()

    def close(self) -> None:
        """Leave the other nodes."""
        if self._nodes is not None:
            self._nodes.close()

    @property
    def failure(self) -> Exception | None:
        """What went wrong between the nodes."""
        return self._nodes.failure if self._nodes is not None else None

    def _judge_all(self) -> Judgement:
        """Return what is wrong with the job by all that was saved of it."""
        self._save_nodes()
        judgement = self._judge(self._folder, None)
        knows_more = note_machine(self._folder, judgement) | note_control_flow(self._folder, judgement)
        if self._nodes is not None and self._seen is not None:
            knows_more |= note_reached(self._folder, judgement, self._seen, self._nodes.placement)
        return self._judge(self._folder, None) if knows_more else judgement

    def stand_by(self) -> None:
        """Look again only after a while: what was seen has been shown, and the job goes on."""
        self._shown_ns = time.monotonic_ns()
        self._still_then = _still(self._headways())
        self._quiet_until_ns = self._shown_ns + int(self._quiet_s * 1e9)
        self._quiet_s = min(self._quiet_s * 2, max(QUIET_S, self._hang_timeout_s))

    def withdraw(self) -> None:
        """Forget the report that stood, on all nodes."""
        self._shown_ns = self._quiet_until_ns = 0
        self._quiet_s = QUIET_S
        self.tell(_NOTHING, stop=False)

    def have_moved(self) -> bool:
        """Return whether a rank has moved that stood still when the last report was shown."""
        return bool(self._shown_ns) and _still(self._headways()) < self._still_then

    def _look_with_all(self, nodes: FirstNode) -> Looked | None:
        if self._is_asking:
            if not nodes.has_answers():
                return None
            self._is_asking = False
            return self._conclude()
        headways = self._headways()
        if self._is_over(headways):
            return _NOTHING
        if self._is_time(headways):
            nodes.ask()
            self._is_asking = True
            self._take()
        return None

    def _obey(self, nodes: OtherNode) -> Looked | None:
        """Answer the first member, which judges; take its verdict."""
        if request := nodes.request:
            self._take()
            if self._watch.headway().never and nodes.placement.store is not None:
                try_places(self._folder, (nodes.placement.store,))
            nodes.answer(request, pack_folder(self._folder), moved=self._moved)
            self._watch.evidence.forget_kept()
        verdict = nodes.take_verdict()
        if verdict is None or not verdict.stop:
            return None
        self._save_nodes()
        self.judged_at = verdict.place
        return Looked(judgement=verdict.judgement, stop=self._on_hang != "report")

    def _others_hang(self, nodes: FirstNode, status: int) -> bool:
        """Return whether those that go on wait in vain. That a rank failed here, torch may tell them by itself."""
        own = self._watch.headway()
        own = replace(own, ended_s=None) if status else own
        return suspicion_of([own, *nodes.headways()], self._hang_timeout_s) is Suspicion.STRONG

    def _stops(self, judgement: Judgement) -> bool:
        """Return whether a job of which this was judged is to be stopped."""
        return {"auto": judgement.proven, "kill": judgement.certain, "report": False}[self._on_hang]

    def _headways(self) -> list[Headway]:
        others = self._nodes.headways() if self._nodes is not None and self._nodes.is_first else []
        return [self._watch.headway(), *others]

    def _is_over(self, headways: list[Headway]) -> bool:
        """Return whether a report stands and nobody stands still any more for whom others wait."""
        return bool(self._shown_ns) and suspicion_of(headways, self._hang_timeout_s) is Suspicion.NONE

    def _is_time(self, headways: list[Headway]) -> bool:
        """Return whether to take evidence now: soon where somebody stands still, ever more rarely where all wait."""
        now_ns = time.monotonic_ns()
        suspicion = suspicion_of(headways, self._hang_timeout_s)
        quiet_until_ns = 0 if self._has_changed(headways, now_ns) else self._quiet_until_ns
        if suspicion is Suspicion.STRONG:
            return now_ns >= max(self._last_look_ns + LOOK_AGAIN_S * 1e9, quiet_until_ns)
        return suspicion is Suspicion.WEAK and now_ns >= max(self._next_look_ns, quiet_until_ns)

    def _has_changed(self, headways: list[Headway], now_ns: int) -> bool:
        """Return whether a rank has moved or ended since the last report was shown."""
        if not self._shown_ns:
            return False
        ended = [headway.ended_s for headway in headways if headway.ended_s is not None]
        has_ended = bool(ended) and min(ended) < (now_ns - self._shown_ns) / 1e9
        return has_ended or _still(headways) < self._still_then

    def _take(self) -> None:
        """Take evidence of this node; with others, keep its rings as they are: a look elsewhere may set all moving."""
        began_ns = time.monotonic_ns()
        self._watch.take_evidence(keep_rings=self._nodes is not None)
        self._last_look_ns = time.monotonic_ns()
        self._moved = self._watch.has_moved_since(began_ns)
        self._began_ns = began_ns

    def _conclude(self) -> Looked | None:
        """Have what was taken judged; None where nothing is wrong that was not so before, or somebody has moved."""
        judgement = self._judge_all()
        is_wrong = has_errors(judgement)
        if not is_wrong or self._has_moved():
            self._watch.evidence.forget_kept()
            self._next_look_ns = time.monotonic_ns() + int(self._patience_s * 1e9)
            self._patience_s = min(self._patience_s * 2, max(1.0, self._hang_timeout_s / 4))
            return _NOTHING if not is_wrong and self.have_moved() else None
        return Looked(judgement=judgement, stop=self._stops(judgement))

    def _has_moved(self) -> bool:
        """Return whether a rank has made progress meanwhile: then what was seen of it is out of date.

        With other nodes it is what had moved when each had its evidence: later, what one node did may move another.
        """
        if self._nodes is not None and self._nodes.is_first:
            return self._moved or self._nodes.has_moved()
        return self._watch.has_moved_since(self._began_ns)

    def _save_nodes(self) -> None:
        if self._nodes is not None:
            self._seen = self._nodes.save(self._folder) if self._nodes.is_first else self._nodes.seen()
            save_nodes(self._folder, self._seen)
