"""Gathers the nodes' messages on the node that serves the meeting, and assigns a number to each node."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import ddpdoctor
from ddpdoctor.diagnose.rendezvous.messages import NodeArrival, Seat, SeatList, SentFacts
from ddpdoctor.model.node import SECTIONS, Fleet, Launcher, Node
from ddpdoctor.model.reaching import JobSettings, Visit
from ddpdoctor.model.reading import Unread, Why

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.model.launch import NodeLaunch

GRACE_S = 3.0
"""Our choice: how long to wait after the last arrival if the nodes disagree on their number and the smallest number has
been reached. The launch is already wrong then, and the other nodes may not exist."""
FACTS_LIMIT_S = 40.0
"""Our choice: twice the time limit for reading a node."""
MOST_TOO_MANY = 64
"""How many more arrivals than expected are accepted. More are a launch error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The processes that joined, by number of arrival."""

    arrived: Mapping[int, NodeArrival]
    seen: Mapping[int, SentFacts]
    """The facts of those that sent any."""

    def leads(self) -> dict[int, NodeArrival]:
        """Return the processes that read their node."""
        return {number: one for number, one in self.arrived.items() if one.leads}


def gather_arrivals(conversation: Conversation, launch: NodeLaunch, limit_s: float) -> dict[int, NodeArrival]:
    """Return the processes that joined, when all are there or the time is up."""
    most = 2 * launch.launch.world_size + MOST_TOO_MANY
    counted, last_came_s = 0, time.monotonic()

    def is_over(arrived: Mapping[int, NodeArrival]) -> bool:
        nonlocal counted, last_came_s
        if len(arrived) > counted:
            counted, last_came_s = len(arrived), time.monotonic()
        return is_complete(launch, arrived.values(), time.monotonic() - last_came_s)

    def arrivals() -> range:
        return range(1, min(conversation.add("arrived", 0), most) + 1)

    return conversation.gather(NodeArrival, "hello", arrivals, limit_s, is_over=is_over)


def is_complete(launch: NodeLaunch, arrived: Iterable[NodeArrival], waited_s: float) -> bool:
    """Return whether to stop waiting. ``waited_s`` is the time since the last arrival."""
    each = tuple(arrived)
    leads = [one for one in each if one.leads]
    if not leads:
        return False
    # On a host with several ranks, all of them join, but only one reads the host.
    by_ranks = launch.launch.launcher is not Launcher.NNODES
    ranks_are_there = not by_ranks or len(each) >= launch.launch.world_size
    if len(leads) >= max(one.most for one in leads):
        return ranks_are_there or waited_s >= GRACE_S
    differ = len({(one.fewest, one.most) for one in leads}) > 1
    # More nodes of an elastic job may join until the time is up. torchrun waits too (last_call_timeout).
    return differ and len(leads) >= min(one.fewest for one in leads) and waited_s >= GRACE_S


def gather_facts(conversation: Conversation, arrived: Mapping[int, NodeArrival]) -> dict[int, SentFacts]:
    """Return the facts that the joined processes send in time."""
    return conversation.gather(SentFacts, "facts", lambda: arrived, FACTS_LIMIT_S)


def seat_nodes(arrivals: Arrivals, judge: int, most: int) -> tuple[Seat, ...]:
    """Assign a number to each node: its node rank if that is valid and free, and else any free number."""
    leads = arrivals.leads()
    by_number: dict[int, int] = {}
    rest: list[int] = []
    for arrival in sorted(leads, key=lambda one: (one != judge, one)):
        said = leads[arrival].settings.node_rank
        if said is not None and 0 <= said < most and said not in by_number:
            by_number[said] = arrival
        else:
            rest.append(arrival)
    free = (number for number in itertools.count() if number not in by_number)
    by_number |= dict(zip(itertools.islice(free, len(rest)), rest, strict=True))
    return tuple(
        Seat(number=number, arrival=by_number[number], host=leads[by_number[number]].host)
        for number in sorted(by_number)
    )


def make_roster(arrivals: Arrivals, judge: int, most: int) -> SeatList:
    """Return the list of joined nodes for all. The judging node is first among the publications."""
    seats = [seat for seat in seat_nodes(arrivals, judge, most) if seat.arrival in arrivals.seen]
    found = {seat: arrivals.seen[seat.arrival].publication for seat in sorted(seats, key=lambda s: s.arrival != judge)}
    return SeatList(
        seats=tuple(seats),
        publications=tuple(replace(one, number=seat.number) for seat, one in found.items() if one is not None),
        servers=tuple(seat.arrival for seat in seats if arrivals.seen[seat.arrival].serves),
    )


def assemble_fleet(
    arrivals: Arrivals, seats: Iterable[Seat], launch: NodeLaunch, problems: Iterable[str] = ()
) -> Fleet:
    """Return the joined nodes in the order of their numbers, each with the processes of its host."""
    seats = tuple(seats)
    hosts = [seat.host for seat in seats]
    nodes = []
    for index, seat in enumerate(seats):
        node = _node_of(arrivals, seat)
        twice = hosts.count(seat.host) > 1
        nodes.append(replace(node, index=index, host=f"{seat.host} (node {seat.number})" if twice else seat.host))
    return Fleet(
        nodes=tuple(nodes),
        launcher=launch.launch.launcher,
        world_size=launch.launch.world_size,
        nnodes=launch.most,
        missing=_missing(arrivals, seats, launch),
        problems=(*problems, *_other_versions(arrivals)),
    )


def _node_of(arrivals: Arrivals, seat: Seat) -> Node:
    own = arrivals.seen.get(seat.arrival)
    beside = [
        arrivals.seen[number].process
        for number, one in arrivals.arrived.items()
        if not one.leads and one.machine == arrivals.arrived[seat.arrival].machine and number in arrivals.seen
    ]
    first = [] if own is None else [own.process]
    processes = sorted([*first, *beside], key=lambda process: -1 if process.rank is None else process.rank)
    if own is None or own.node is None:
        unread = Unread(why=Why.TIMEOUT, reason=f"{seat.host} came, but did not send what it read")
        return Node(host=seat.host, processes=tuple(processes), **dict.fromkeys(SECTIONS, unread))  # type: ignore[arg-type]
    return replace(own.node, processes=tuple(processes))


def _missing(arrivals: Arrivals, seats: tuple[Seat, ...], launch: NodeLaunch) -> tuple[int, ...]:
    """Return the missing nodes, or the missing ranks if the launcher counts ranks."""
    if launch.launch.launcher is Launcher.NNODES:
        return absent_numbers(arrivals, seats)
    came = {one.rank for one in arrivals.arrived.values()}
    return tuple(rank for rank in range(launch.launch.world_size) if rank not in came)


def absent_numbers(arrivals: Arrivals, seats: Iterable[Seat]) -> tuple[int, ...]:
    """Return the numbers of required nodes that did not join. If nodes disagree on the total, the least one counts."""
    expected = min((one.fewest for one in arrivals.leads().values()), default=0)
    there = {seat.number for seat in seats}
    lacking = max(0, expected - len(there))
    return tuple(number for number in range(expected) if number not in there)[:lacking]


def absent_visits(launch: NodeLaunch, numbers: Iterable[int]) -> list[Visit]:
    """Return the nodes with these numbers, which did not join."""
    hosts = dict(enumerate(launch.hosts))
    return [Visit(number=n, host=hosts.get(n, ""), arrived=False, settings=JobSettings()) for n in numbers]


def _other_versions(arrivals: Arrivals) -> list[str]:
    return [
        f"ddpdoctor {one.version} on {one.host}, and {ddpdoctor.__version__} on the node that judges"
        for one in arrivals.leads().values()
        if one.version != ddpdoctor.__version__
    ]
