"""The two roles of a node: one gathers all nodes' facts, judges and sends the verdict; the others take part."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.diagnose.rendezvous.gathering import (
    FACTS_LIMIT_S,
    GRACE_S,
    Arrivals,
    absent_numbers,
    absent_visits,
    assemble_fleet,
    gather_arrivals,
    gather_facts,
    make_roster,
    seat_nodes,
)
from ddpdoctor.diagnose.rendezvous.judging import RendezvousChecked, build_report, is_whole, judge, rendezvous_data
from ddpdoctor.diagnose.rendezvous.messages import SeatList, Sentence, Trials
from ddpdoctor.diagnose.rendezvous.visit import TRIAL_LIMIT_S, seat_of, stored, wait_for_judge
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.codec import encode
from ddpdoctor.model.findings import now
from ddpdoctor.model.reaching import Rendezvous, StartTrial, StoreView, Visit

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ddpdoctor.diagnose.rendezvous.meeting import JoinedMeeting
    from ddpdoctor.diagnose.rendezvous.messages import Seat
    from ddpdoctor.diagnose.rendezvous.visit import OwnVisit
    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.reaching import NodePair

STORE_VIEW_LIMIT_S = 15.0
"""Our choice: how long to wait for a node's check of the store after the mesh has ended."""
TRIAL_LIMIT_OF_OTHERS_S = TRIAL_LIMIT_S + 8.0
SEE_OFF_S = 10.0
"""Our choice: how long to stay until all remaining nodes have received the verdict."""
STEP_LIMIT_S = 600.0
"""Our choice: the mesh of hundreds of nodes takes minutes. If the judging node dies, its connection shows it."""


def lead(visit: OwnVisit, entry: JoinedMeeting) -> RendezvousChecked:
    """Gather the facts of all nodes, judge them, and send the verdict. Nodes that are lost on the way are named."""
    conversation, launch = entry.conversation, visit.member.launch
    began = time.monotonic()
    arrival = visit.come_in(entry)
    arrived = gather_arrivals(conversation, launch, visit.wanted.timeout_s - (time.monotonic() - began))
    arrivals = Arrivals(arrived=arrived, seen=gather_facts(conversation, arrived))
    roster = make_roster(arrivals, arrival, launch.most)
    conversation.send("roster", roster)
    seat = seat_of(roster, arrival)
    visit.view_store(conversation, roster, arrival)
    pairs = visit.run_mesh(conversation, roster, seat)
    meeting = _Gathered(
        visit=visit,
        arrivals=arrivals,
        roster=roster,
        seats=seat_nodes(arrivals, arrival, launch.most),
        store_views=_gather_views(conversation, roster),
        pairs=pairs,
    )
    trials = _try_start(meeting, conversation, seat)
    return _conclude(meeting, conversation, trials, seat)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """The gathered facts."""

    visit: OwnVisit
    arrivals: Arrivals
    roster: SeatList
    seats: tuple[Seat, ...]
    """Includes nodes that sent nothing after they joined."""
    store_views: Mapping[int, StoreView]
    """By number of arrival."""
    pairs: tuple[NodePair, ...]


def _gather_views(conversation: Conversation, roster: SeatList) -> dict[int, StoreView]:
    arrivals = [seat.arrival for seat in roster.seats]
    return conversation.gather(StoreView, "store-view", lambda: arrivals, STORE_VIEW_LIMIT_S)


def _try_start(meeting: _Gathered, conversation: Conversation, own: Seat) -> tuple[StartTrial, ...]:
    """Run a real start on all nodes if everything else works. Otherwise it would only fail for a known reason."""
    runs = _may_start(meeting)
    conversation.send("trials", Trials(run=runs))
    if not runs:
        return ()
    trials = {own.arrival: meeting.visit.try_start(meeting.roster, own)}
    others = [seat.arrival for seat in meeting.roster.seats if seat != own]
    trials |= conversation.gather(StartTrial, "trial", lambda: others, TRIAL_LIMIT_OF_OTHERS_S)
    lost = "this node sent no more messages"
    return tuple(
        trials.get(seat.arrival) or StartTrial(node=seat.number, ok=False, stage="result", error=lost)
        for seat in meeting.roster.seats
    )


def _may_start(meeting: _Gathered) -> bool:
    seats = meeting.roster.seats
    counts = {(one.fewest, one.most) for one in meeting.arrivals.leads().values()}
    ranks = [one.settings.node_rank for one in meeting.arrivals.leads().values() if one.settings.node_rank is not None]
    return (
        len(counts) == 1
        and len(ranks) == len(set(ranks))
        and [seat.number for seat in seats] == list(range(len(meeting.seats)))
        and not absent_numbers(meeting.arrivals, meeting.seats)
        and all(seat.arrival in meeting.store_views and stored(meeting.store_views[seat.arrival]) for seat in seats)
        and is_whole(meeting.pairs)
    )


def _conclude(
    meeting: _Gathered, conversation: Conversation, trials: tuple[StartTrial, ...], own: Seat
) -> RendezvousChecked:
    visit, launch = meeting.visit, meeting.visit.member.launch
    problems = []
    if turned_away := conversation.turned_away():
        strangers = f"{turned_away} connections without this job's token were turned away"
        problems.append(f"{strangers}: is DDPDOCTOR_TOKEN the same on all nodes?")
    rendezvous = Rendezvous(
        nnodes=launch.most,
        visits=_visits(meeting),
        fleet=assemble_fleet(meeting.arrivals, meeting.seats, launch, problems),
        pairs=meeting.pairs,
        trials=trials,
        trust=visit.meeting.trust,
    )
    sentence = judge(rendezvous, visit.started_at, now())
    with suppress(StoreError):
        # Do not wait for nodes that were lost on the way.
        conversation.say_goodbye(sentence, lambda: len(meeting.store_views) - 1, SEE_OFF_S)
    report = build_report(sentence, visit.wanted, rendezvous_data(rendezvous), launch.settings.world_size)
    return RendezvousChecked(report=report, number=own.number, judged=True, shows=True)


def _visits(meeting: _Gathered) -> tuple[Visit, ...]:
    absent = absent_visits(meeting.visit.member.launch, absent_numbers(meeting.arrivals, meeting.seats))
    return tuple(sorted([*(_visit(meeting, seat) for seat in meeting.seats), *absent], key=lambda one: one.number))


def _visit(meeting: _Gathered, seat: Seat) -> Visit:
    seen, view = meeting.arrivals.seen.get(seat.arrival), meeting.store_views.get(seat.arrival)
    publication = None if seen is None else seen.publication
    return Visit(
        number=seat.number,
        host=seat.host,
        arrived=True,
        settings=meeting.arrivals.arrived[seat.arrival].settings,
        store_view=view,
        published=publication.address if publication is not None else "",
        interface=publication.interface if publication is not None else "",
        way_lost="" if view is not None else "it came, but sent nothing more",
    )


def follow(visit: OwnVisit, entry: JoinedMeeting) -> RendezvousChecked:
    """Take part. Raises ``StoreError`` if the meeting is lost or this node joins too late."""
    conversation = entry.conversation
    arrival = visit.come_in(entry)
    roster = wait_for_judge(conversation, SeatList, "roster", visit.wanted.timeout_s + FACTS_LIMIT_S + GRACE_S)
    seat = seat_of(roster, arrival)
    visit.view_store(conversation, roster, arrival)
    visit.run_mesh(conversation, roster, seat)
    if wait_for_judge(conversation, Trials, "trials", STEP_LIMIT_S).run:
        conversation.send(f"trial/{arrival}", visit.try_start(roster, seat))
    sentence = conversation.hear_goodbye(Sentence, STEP_LIMIT_S)
    if sentence is None:
        raise StoreError(f"the node that judges did not continue within {STEP_LIMIT_S:g} s")
    launch = visit.member.launch
    return RendezvousChecked(
        report=build_report(sentence, visit.wanted, _own_data(visit, sentence), launch.settings.world_size),
        number=seat.number,
        judged=False,
        shows=launch.own_screen,
    )


def _own_data(visit: OwnVisit, sentence: Sentence) -> dict[str, Any]:
    """Return this node's own facts. The rest is in the report of the judging node."""
    assert visit.seen is not None
    assert visit.seen.node is not None
    return {
        "verb": "check-rendezvous",
        "hosts": list(sentence.hosts),
        "launcher": visit.member.launch.launch.launcher.value,
        "nodes": [encode(visit.seen.node)],
        "door": encode(visit.store_view) if visit.store_view is not None else None,
    }
