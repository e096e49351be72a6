"""Messages become nodes: one a machine or container, nobody lost, nobody counted twice."""

from dataclasses import replace

import ddpdoctor
from ddpdoctor.diagnose.machines import Facts, Hello, assemble, describe_missing, missing_ranks
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import SECTIONS, Clock, Launcher, Node
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import process

CLOCK = Clock(synchronized=True, offset_s=None)


def launch(world_size=4, nnodes=2):
    return Launch(launcher=Launcher.TORCHRUN, world_size=world_size, nnodes=nnodes)


def facts(rank, host="a", *, machine=None, container="c", reads=False, version=ddpdoctor.__version__, own_rank=None):
    return Facts(
        rank=rank,
        machine=machine or host,
        container=container,
        process=process(rank if own_rank is None else own_rank, pid=100 + rank),
        node=Node(host=host, clock=CLOCK) if reads else None,
        host=host,
        version=version,
    )


def shape(fleet):
    return [(node.host, node.index, node.ranks) for node in fleet.nodes]


TWO_HOSTS = [facts(3, "b"), facts(0, "a", reads=True), facts(2, "b", reads=True), facts(1, "a")]


def test_two_hosts_by_their_lowest_ranks():
    fleet = assemble(launch(), TWO_HOSTS)

    assert shape(fleet) == [("a", 0, (0, 1)), ("b", 1, (2, 3))]
    assert [node.clock for node in fleet.nodes] == [CLOCK, CLOCK]
    assert (fleet.launcher, fleet.world_size, fleet.nnodes) == (Launcher.TORCHRUN, 4, 2)
    assert (fleet.missing, fleet.problems) == ((), ())


def test_ranks_that_did_not_answer():
    fleet = assemble(launch(6), TWO_HOSTS, ["one process sent rubbish"])

    assert fleet.missing == (4, 5)
    assert fleet.problems == ("one process sent rubbish",)


def test_a_host_whose_reader_did_not_answer_keeps_its_ranks():
    fleet = assemble(launch(), [one for one in TWO_HOSTS if one.rank != 2])

    assert shape(fleet) == [("a", 0, (0, 1)), ("b", 1, (3,))]
    unread = Unread(why=Why.TIMEOUT, reason="the process of b that reads the host did not answer")
    assert {getattr(fleet.nodes[1], section) for section in SECTIONS} == {unread}
    assert fleet.missing == (2,)


def test_two_that_say_they_are_one_rank_both_stay():
    fleet = assemble(launch(), [*TWO_HOSTS[:3], facts(0, "a", own_rank=0)])

    assert shape(fleet) == [("a", 0, (0, 0)), ("b", 1, (2, 3))]
    assert fleet.missing == (1,)


def test_the_scripts_rank_may_be_another_than_the_launchers():
    fleet = assemble(launch(2), [facts(0, reads=True, own_rank=0), facts(1, own_rank=0)])

    assert shape(fleet) == [("a", 0, (0, 0))]
    assert fleet.missing == ()


def test_a_rank_beyond_the_world_is_no_one_missing():
    assert assemble(launch(1), [facts(0, reads=True), facts(7)]).missing == ()


def test_hosts_that_share_a_name_stay_apart():
    fleet = assemble(
        launch(3),
        [
            facts(0, "pod", machine="x", reads=True),
            facts(1, "pod", machine="y", reads=True),
            facts(2, "other", reads=True),
        ],
    )
    assert shape(fleet) == [("pod (rank 0)", 0, (0,)), ("pod (rank 1)", 1, (1,)), ("other", 2, (2,))]


def test_two_containers_that_share_host_and_network_are_two_nodes():
    fleet = assemble(
        launch(),
        [
            facts(0, container="x", reads=True),
            facts(1, container="x"),
            facts(2, container="y", reads=True),
            facts(3, container="y"),
        ],
    )
    assert shape(fleet) == [("a (rank 0)", 0, (0, 1)), ("a (rank 2)", 1, (2, 3))]


def test_tasks_that_each_have_mounts_of_their_own_are_one_node():
    fleet = assemble(launch(3), [facts(0, container="x", reads=True), facts(1, container="y"), facts(2, container="z")])
    assert shape(fleet) == [("a", 0, (0, 1, 2))]


def test_two_launchers_on_one_host_are_one_node():
    fleet = assemble(launch(2), [facts(0, reads=True), facts(1, reads=True)])
    assert shape(fleet) == [("a", 0, (0, 1))]


def test_the_first_readers_clock_counts():
    late = facts(1, reads=True)
    ahead = replace(late, node=Node(host="a", clock=Clock(synchronized=True, offset_s=0.1)))
    assert assemble(launch(2), [ahead, facts(0, reads=True)]).nodes[0].clock == CLOCK


def test_other_versions_of_ddpdoctor_are_reported():
    fleet = assemble(launch(), [*TWO_HOSTS[1:3], facts(1, version="9.1"), facts(3, "b", version="9.1")])
    assert fleet.problems == (f"ranks 1 and 3: ddpdoctor 9.1, and {ddpdoctor.__version__} on rank 0",)


def test_who_is_missing_is_named_as_far_as_known():
    assert missing_ranks(launch(6), TWO_HOSTS) == (4, 5)
    assert describe_missing([1, 4, 5, 6], {4: Hello(host="b", pid=77)}, 30.0) == (
        "rank 4 (b, process 77) started and did not answer within 30 s",
        "no message came from ranks 1, 5, 6 within 30 s",
    )
    assert describe_missing([], {}, 30.0) == ()
