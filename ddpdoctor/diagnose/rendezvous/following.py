"""Runs the checks on a node that does not judge, and receives the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.diagnose.rendezvous.gathering import FACTS_LIMIT_S, GRACE_S
from ddpdoctor.diagnose.rendezvous.judging import build_report
from ddpdoctor.diagnose.rendezvous.messages import Roster, Sentence, Trials
from ddpdoctor.diagnose.rendezvous.visit import seat_of, wait_for_judge
from ddpdoctor.diagnose.rendezvous.wanted import RendezvousChecked
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.codec import encode

if TYPE_CHECKING:
    from typing import Any

    from ddpdoctor.diagnose.rendezvous.meeting import Entry
    from ddpdoctor.diagnose.rendezvous.visit import OwnVisit

STEP_LIMIT_S = 600.0
"""Our choice: the mesh of hundreds of nodes takes minutes. If the judging node dies, its connection shows it."""


def follow(visit: OwnVisit, entry: Entry) -> RendezvousChecked:
    """Take part. Raises ``StoreError`` if the meeting is lost or this node joins too late."""
    conversation = entry.conversation
    arrival = visit.come_in(entry)
    roster = wait_for_judge(conversation, Roster, "roster", visit.wanted.timeout_s + FACTS_LIMIT_S + GRACE_S)
    seat = seat_of(roster, arrival)
    visit.look_at_store(conversation, roster, arrival)
    visit.run_mesh(conversation, roster, seat)
    if wait_for_judge(conversation, Trials, "trials", STEP_LIMIT_S).run:
        conversation.send(f"trial/{arrival}", visit.try_start(roster, seat))
    sentence = conversation.hear_goodbye(Sentence, STEP_LIMIT_S)
    if sentence is None:
        raise StoreError(f"the node that judges did not go on within {STEP_LIMIT_S:g} s")
    launch = visit.member.launch
    return RendezvousChecked(
        report=build_report(sentence, visit.wanted, _data(visit, sentence), launch.told.world_size),
        number=seat.number,
        judged=False,
        shows=launch.own_screen,
    )


def _data(visit: OwnVisit, sentence: Sentence) -> dict[str, Any]:
    """Return this node's own facts. The rest is in the report of the judging node."""
    assert visit.seen is not None
    assert visit.seen.node is not None
    return {
        "verb": "check-rendezvous",
        "hosts": list(sentence.hosts),
        "launcher": visit.member.launch.launch.launcher.value,
        "nodes": [encode(visit.seen.node)],
        "door": encode(visit.door) if visit.door is not None else None,
    }
