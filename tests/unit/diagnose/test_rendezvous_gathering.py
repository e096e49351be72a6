"""Who came as which number, and who did not."""

import pytest

from ddpdoctor.collect.launch import effective_environment, read_node_launch
from ddpdoctor.diagnose.meeting import (
    Arrivals,
    NodeArrival,
    SeatList,
    SentFacts,
    absent_numbers,
    assemble_fleet,
    is_complete,
    make_roster,
    seat_nodes,
)
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.launch import NodeOptions
from ddpdoctor.model.node import Node, NodeProcess
from ddpdoctor.model.reaching import JobSettings, Publication
from ddpdoctor.model.reading import Unread

LONG_S = 60.0


def launch(nnodes="2"):
    options = NodeOptions(nnodes=nnodes, node_rank=0, master_addr="n0")
    return read_node_launch(effective_environment({}, options))


def came(node_rank, *, host="", fewest=2, most=2, leads=True, rank=0):
    host = host or f"n{node_rank}"
    return NodeArrival(
        host=host, machine=host, settings=JobSettings(node_rank=node_rank), rank=rank, leads=leads, fewest=fewest,
        most=most, version="0",
    )  # fmt: skip


def process(rank=None):
    return NodeProcess(rank=rank, local_rank=0, pid=1, variables={}, other_names=(), cpus=())


def seen(host, arrival, *, serves=False):
    return SentFacts(
        process=process(),
        node=Node(host=host),
        publication=Publication(number=arrival, address=f"10.0.0.{arrival}", interface="eth0"),
        serves=serves,
    )


def those(*arrivals, silent=()):
    arrived = dict(enumerate(arrivals, 1))
    facts = {number: seen(one.host, number, serves=number == 1) for number, one in arrived.items()}
    return Arrivals(arrived=arrived, seen={number: one for number, one in facts.items() if number not in silent})


def numbers(*arrivals, judge=1, most=4):
    return [(seat.number, seat.arrival) for seat in seat_nodes(those(*arrivals), judge, most)]


def test_nodes_have_the_numbers_that_they_say():
    assert numbers(came(2), came(0), came(1)) == [(0, 2), (1, 3), (2, 1)]


def test_one_of_two_with_the_same_number_gets_another():
    assert numbers(came(0), came(1, host="a"), came(1, host="b")) == [(0, 1), (1, 2), (2, 3)]


def test_a_number_that_there_is_not_is_another():
    assert numbers(came(0), came(7), most=2) == [(0, 1), (1, 2)]


def test_without_numbers_the_one_that_judges_is_first():
    assert numbers(came(None, host="a"), came(None, host="b"), judge=2) == [(0, 2), (1, 1)]


def test_ranks_beside_the_one_that_looks_have_no_seat():
    assert numbers(came(0), came(0, leads=False, rank=1), came(1)) == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("arrivals", "waited_s", "complete"),
    [
        ([came(0)], LONG_S, False),
        ([came(0), came(1)], 0.0, True),
        # Elastic: enough have come, and more may until the time is up.
        ([came(0, fewest=1, most=3)], LONG_S, False),
        ([came(number, fewest=1, most=3) for number in range(3)], 0.0, True),
        # One has settings for three nodes: who knows whether there is a third.
        ([came(0), came(1, fewest=3, most=3)], 0.0, False),
        ([came(0), came(1, fewest=3, most=3)], LONG_S, True),
        ([came(0, leads=False)], LONG_S, False),
    ],
)
def test_until_when_others_are_waited_for(arrivals, waited_s, complete):
    assert is_complete(launch(), arrivals, waited_s) is complete


def test_who_is_absent():
    found = those(came(0, fewest=3, most=3), came(2, fewest=3, most=3))
    assert absent_numbers(found, seat_nodes(found, 1, 3)) == (1,)


def test_nobody_is_absent_where_the_settings_of_nodes_differ_in_number():
    found = those(came(0), came(1, fewest=3, most=3))
    assert absent_numbers(found, seat_nodes(found, 1, 2)) == ()


def test_two_that_claim_one_number_are_two():
    found = those(came(0), came(1, host="a"), came(1, host="b"))
    assert absent_numbers(found, seat_nodes(found, 1, 3)) == ()


def test_the_roster_begins_with_the_one_that_judges_and_travels():
    found = those(came(1), came(0))
    roster = make_roster(found, 1, 2)
    assert [one.number for one in roster.publications] == [1, 0]
    assert roster.servers == (1,)
    assert decode(SeatList, encode(roster)) == roster


def test_one_that_said_nothing_more_has_no_seat_in_the_roster():
    roster = make_roster(those(came(0), came(1), silent=(2,)), 1, 2)
    assert [seat.number for seat in roster.seats] == [0]


def test_the_fleet_is_in_the_order_of_numbers_and_names_apart():
    found = those(came(1, host="same"), came(0, host="same"), silent=(2,))
    fleet = assemble_fleet(found, seat_nodes(found, 1, 2), launch())
    assert [node.host for node in fleet.nodes] == ["same (node 0)", "same (node 1)"]
    assert isinstance(fleet.nodes[0].names, Unread)
    assert "did not send" in fleet.nodes[0].names.reason
    assert (fleet.nnodes, fleet.missing) == (2, ())


def test_ranks_beside_belong_to_the_node_of_their_machine():
    found = those(came(0), came(1), came(1, leads=False, rank=1))
    fleet = assemble_fleet(found, seat_nodes(found, 1, 2), launch())
    assert [len(node.processes) for node in fleet.nodes] == [1, 2]
