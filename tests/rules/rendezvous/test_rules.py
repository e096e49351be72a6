"""What `check-rendezvous` says of what nodes saw of each other."""

from dataclasses import replace

from ddpdoctor.diagnose.rendezvous import judge_meeting
from ddpdoctor.model.findings import Judgment
from ddpdoctor.model.launch import Contact
from ddpdoctor.rules.rendezvous.mesh import PairSide, explain
from tests.golden import table
from tests.rules.rendezvous import build
from tests.rules.rendezvous.build import LARGE, absent, attempt, column, healthy, pair, transfer, view, visit

TWO = healthy(2)
FOUR = healthy()


def fails(contact):
    return lambda source, target: pair(source, target, contact)


def large(**more):
    return lambda source, target: pair(source, target, large=transfer(LARGE, **more))


STALLS = large(contact=Contact.NO_ANSWER, sent=18, retransmitted=8, delivered=0)
LOSES = large(duration_s=1.2, sent=3600, retransmitted=720)
STALLS_BY_LOSS = large(contact=Contact.NO_ANSWER, sent=900, retransmitted=190)
CRAWLS = large(duration_s=0.35)


def lone(contact):
    """Return what node 1 of 2 saw alone."""
    return replace(
        TWO, visits=(absent(0), visit(1, store_view=view(1, contact))), complete=False, pairs=(), trials=(),
        fleet=replace(TWO.fleet, nodes=TWO.fleet.nodes[1:]),
    )  # fmt: skip


def two_addresses(number, first, second):
    """Return what a node saw of a store whose name has two addresses."""
    return replace(view(number), attempts=(attempt(first, 77), attempt(second)))


def meet(facts, *found):
    """Judge a rendezvous after these findings about its machines."""
    findings, checks = judge_meeting(facts, Judgment(findings=found, checks=(), certain=False))
    return Judgment(findings=tuple(findings[len(found) :]), checks=tuple(checks), certain=False)


# Which nodes explain the pairs that do not work.


def grid(count, bad, untried=()):
    pairs = [(s, t) for s in range(count) for t in range(count) if s != t and (s, t) not in untried]
    return {pair: pair in bad for pair in pairs}


def explained(tried):
    found = explain(tried)
    assert {pair for blame in found for pair in blame.pairs} == {pair for pair, bad in tried.items() if bad}
    return [f"{one.way.value}: {', '.join(map(str, one.nodes))}{', alone' * one.alone}" for one in found]


def test_many_nodes_take_no_time():
    (blame,) = explain(grid(300, column(7, 300)))
    assert (blame.way, blame.nodes, len(blame.pairs)) == (PairSide.INBOUND, (7,), 299)


test_rows = table("rendezvous", "ddpdoctor.rules.rendezvous.mesh", vars(build), globals())
