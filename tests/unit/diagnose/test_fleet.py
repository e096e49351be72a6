"""Processes of a job gather over a real server: here each is a thread, which costs nothing to start."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

import ddpdoctor
from ddpdoctor.collect.launch import effective_environment, read_node_launch
from ddpdoctor.collect.system import ReadingPlan, System, SystemCalls
from ddpdoctor.diagnose.machines import (
    Facts,
    Hello,
    assemble,
    describe_missing,
    gather,
    gather_over,
    missing_ranks,
    read_fleet,
)
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
from ddpdoctor.exchange.conversation import pack
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Launch, NodeOptions
from ddpdoctor.model.node import SECTIONS, Clock, Launcher, Node, NodeProcess
from ddpdoctor.model.reaching import JobSettings, Publication
from ddpdoctor.model.reading import Unread, Why
from tests.rules.environment.build import process
from tests.scenarios.running import free_port

PLAN = ReadingPlan(sections=frozenset({"clock", "limits"}))
NO_PLAN = ReadingPlan(sections=frozenset())


@pytest.fixture
def launch():
    return Launch(
        launcher=Launcher.NNODES, world_size=3, local_rank=0, nnodes=3, hosts=("127.0.0.1",), port=free_port(), run="x"
    )


class NamedCalls(SystemCalls):
    """This machine under another name."""

    def __init__(self, name):
        self.name = name

    def hostname(self):
        return self.name


def take_part(launch, rank, *, plan=NO_PLAN, timeout_s=60.0, **env):
    system = System(env=env, calls=NamedCalls(f"n{rank}"))
    return gather(replace(launch, rank=rank), system, plan, timeout_s)


def all_of(launch, ranks, **options):
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: take_part(launch, rank, **options), ranks))


def test_rank_0_hears_all_and_the_others_say_nothing(launch):
    fleet, *others = all_of(launch, [0, 1, 2], plan=PLAN)

    assert others == [None, None]
    assert [(node.host, node.ranks) for node in fleet.nodes] == [("n0", (0,)), ("n1", (1,)), ("n2", (2,))]
    assert not any(isinstance(node.limits, Unread) for node in fleet.nodes)
    assert (fleet.launcher, fleet.world_size, fleet.missing, fleet.problems) == (Launcher.NNODES, 3, (), ())


def test_clocks_are_compared_with_rank_0s(launch):
    fleet = all_of(launch, [0, 1, 2], plan=PLAN)[0]

    assert fleet.nodes[0].clock.offset_s is None
    assert all(0 <= node.clock.offset_s < 5 for node in fleet.nodes[1:])


def test_a_rank_that_never_comes_is_missing_and_the_rest_is_there(launch):
    fleet, _ = all_of(launch, [0, 1], timeout_s=4)

    assert [node.host for node in fleet.nodes] == ["n0", "n1"]
    assert fleet.missing == (2,)
    assert fleet.problems == ("no message came from rank 2 within 4 s",)


def test_a_rank_that_starts_and_sends_nothing_is_named_with_its_host(launch):
    def says_hello_only(rank):
        if rank != 2:
            return take_part(launch, rank, timeout_s=4)
        with meet(replace(launch, rank=2), {}, 60) as meeting:
            meeting.begin("fleet").send("hello/2", Hello(host="n2", pid=77))
        return None

    with ThreadPoolExecutor() as pool:
        fleet = next(iter(pool.map(says_hello_only, [0, 1, 2])))
    assert fleet.missing == (2,)
    assert fleet.silent_hosts == ("n2",)
    assert fleet.problems == ("rank 2 (n2, process 77) started and did not answer within 4 s",)


FACTS = encode(Facts(rank=2, machine="m", container="c", process=process(2), node=None, host="n2", version="1"))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"rubbish", "something that is not a message of ddpdoctor"),
        ({}, "rank: it is missing"),
        ({**FACTS, "rank": "2"}, "rank: a whole number was expected, and it is a text"),
        (
            {**FACTS, "node": {"host": "n2", "limits": 1}},
            "node.limits: an object was expected, and it is a whole number",
        ),
    ],
)
def test_what_cannot_be_read_is_a_problem_and_the_rest_goes_on(launch, message, words):
    def send(rank):
        if rank != 2:
            return take_part(launch, rank, timeout_s=5)
        with meet(replace(launch, rank=2), {}, 60) as meeting:
            conversation = meeting.begin("fleet")
            key = f"{conversation.prefix}facts/{conversation.add('arrived', 1)}"
            conversation.store.set(key, message if isinstance(message, bytes) else pack(message))
        return None

    with ThreadPoolExecutor() as pool:
        fleet = next(iter(pool.map(send, [0, 1, 2])))
    assert [node.host for node in fleet.nodes] == ["n0", "n1"]
    assert fleet.missing == (2,)
    assert fleet.problems[0] == f"one process sent {words}"


@pytest.fixture
def torchrun(launch):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield replace(launch, launcher=Launcher.TORCHRUN, port=server.port, agent_store=True)
    del server


def test_over_torchruns_store(torchrun):
    fleet, *others = all_of(torchrun, [0, 1, 2], plan=PLAN)

    assert others == [None, None]
    assert [(node.host, node.ranks) for node in fleet.nodes] == [("n0", (0,)), ("n1", (1,)), ("n2", (2,))]
    assert all(0 <= node.clock.offset_s < 5 for node in fleet.nodes[1:])


def test_a_second_time_over_the_same_store(torchrun):
    """As where a launcher starts a script that calls check-env twice."""

    def twice(rank):
        return [take_part(torchrun, rank), take_part(torchrun, rank)]

    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(twice, [0, 1, 2])
    assert [(fleet.missing, fleet.problems, len(fleet.nodes)) for fleet in first] == [((), (), 3)] * 2
    assert others == [[None, None]] * 2


def test_over_a_store_that_is_open_and_of_the_launcher(launch):
    """The ranks go on together afterwards, with the same store."""
    server = Server(0, NO_TOKEN, one_host=True)
    own = replace(launch, launcher=Launcher.OWN, port=server.port, agent_store=True)

    def go_on(rank):
        system = System(env={}, calls=NamedCalls(f"n{rank}"))
        with meet(replace(own, rank=rank), {}, 60) as conversation:
            fleet = gather_over(conversation, replace(own, rank=rank), system, PLAN)
            return fleet, conversation.add("after", 1)

    with ThreadPoolExecutor() as pool:
        (fleet, _), *others = pool.map(go_on, [0, 1, 2])
    server.close()
    assert [node.host for node in fleet.nodes] == ["n0", "n1", "n2"]
    assert (fleet.launcher, fleet.missing, fleet.problems) == (Launcher.OWN, (), ())
    assert [found for found, _ in others] == [None, None]


def test_two_rank_0s_make_one_report(torchrun):
    fleets = [fleet for fleet in all_of(torchrun, [0, 0, 1], timeout_s=5) if fleet is not None]

    assert [len(fleet.nodes[0].processes) for fleet in fleets] == [2]
    assert fleets[0].missing == (2,)


def test_with_a_token_only_those_who_hold_it_take_part(launch):
    def speak(rank):
        token = "other" if rank == 2 else "ours"
        return take_part(launch, rank, timeout_s=4, DDPDOCTOR_TOKEN=token)

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(speak, rank) for rank in range(3)]
        with pytest.raises(UserError, match="has another token") as refused:
            running[2].result()
    fleet = running[0].result()
    assert refused.value.status == 4
    assert fleet.missing == (2,)
    assert any("without this job's token were turned away" in problem for problem in fleet.problems)


def test_who_cannot_reach_rank_0_says_what_was_tried(launch):
    with pytest.raises(UserError) as error:
        take_part(launch, 1, timeout_s=2)
    place = f"127.0.0.1:{launch.port}"
    assert error.value.message.startswith(f"rank 1 cannot reach rank 0 at {place}: tried for ")
    assert error.value.message.endswith(f" s; {place}: connection refused")
    assert "Is the command running on rank 0's host?" in error.value.help
    assert error.value.status == 4


def test_a_port_that_is_taken_is_reported(launch):
    words = f"cannot listen on port {launch.port}: Address already in use"
    with socket.create_server(("", launch.port)), pytest.raises(UserError, match=words) as error:
        take_part(launch, 0)
    assert "another --master-port" in error.value.help


def test_one_process_alone_gathers_nothing(launch):
    fleet = take_part(replace(launch, launcher=Launcher.TORCHRUN, world_size=1, nnodes=1), 0)
    assert (fleet.launcher, fleet.world_size, fleet.nnodes, len(fleet.nodes)) == (Launcher.TORCHRUN, 1, 1, 1)


def test_without_a_launcher_this_machine_is_read():
    fleet = read_fleet(System(env={"RANK": "1"}), PLAN)
    assert fleet.launcher is Launcher.NONE
    assert fleet.nodes[0].ranks == (1,)
    assert not isinstance(fleet.nodes[0].limits, Unread)


# Messages become nodes: one a machine or container, nobody lost, nobody counted twice.


CLOCK = Clock(synchronized=True, offset_s=None)


def launched(world_size=4, nnodes=2):
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
    fleet = assemble(launched(), TWO_HOSTS)

    assert shape(fleet) == [("a", 0, (0, 1)), ("b", 1, (2, 3))]
    assert [node.clock for node in fleet.nodes] == [CLOCK, CLOCK]
    assert (fleet.launcher, fleet.world_size, fleet.nnodes) == (Launcher.TORCHRUN, 4, 2)
    assert (fleet.missing, fleet.problems) == ((), ())


def test_ranks_that_did_not_answer():
    fleet = assemble(launched(6), TWO_HOSTS, ["one process sent rubbish"])

    assert fleet.missing == (4, 5)
    assert fleet.problems == ("one process sent rubbish",)


def test_a_host_whose_reader_did_not_answer_keeps_its_ranks():
    fleet = assemble(launched(), [one for one in TWO_HOSTS if one.rank != 2])

    assert shape(fleet) == [("a", 0, (0, 1)), ("b", 1, (3,))]
    unread = Unread(why=Why.TIMEOUT, reason="the process of b that reads the host did not answer")
    assert {getattr(fleet.nodes[1], section) for section in SECTIONS} == {unread}
    assert fleet.missing == (2,)


def test_two_that_say_they_are_one_rank_both_stay():
    fleet = assemble(launched(), [*TWO_HOSTS[:3], facts(0, "a", own_rank=0)])

    assert shape(fleet) == [("a", 0, (0, 0)), ("b", 1, (2, 3))]
    assert fleet.missing == (1,)


def test_the_scripts_rank_may_be_another_than_the_launchers():
    fleet = assemble(launched(2), [facts(0, reads=True, own_rank=0), facts(1, own_rank=0)])

    assert shape(fleet) == [("a", 0, (0, 0))]
    assert fleet.missing == ()


def test_a_rank_beyond_the_world_is_no_one_missing():
    assert assemble(launched(1), [facts(0, reads=True), facts(7)]).missing == ()


def test_hosts_that_share_a_name_stay_apart():
    fleet = assemble(
        launched(3),
        [
            facts(0, "pod", machine="x", reads=True),
            facts(1, "pod", machine="y", reads=True),
            facts(2, "other", reads=True),
        ],
    )
    assert shape(fleet) == [("pod (rank 0)", 0, (0,)), ("pod (rank 1)", 1, (1,)), ("other", 2, (2,))]


def test_two_containers_that_share_host_and_network_are_two_nodes():
    fleet = assemble(
        launched(),
        [
            facts(0, container="x", reads=True),
            facts(1, container="x"),
            facts(2, container="y", reads=True),
            facts(3, container="y"),
        ],
    )
    assert shape(fleet) == [("a (rank 0)", 0, (0, 1)), ("a (rank 2)", 1, (2, 3))]


def test_tasks_that_each_have_mounts_of_their_own_are_one_node():
    fleet = assemble(
        launched(3), [facts(0, container="x", reads=True), facts(1, container="y"), facts(2, container="z")]
    )
    assert shape(fleet) == [("a", 0, (0, 1, 2))]


def test_two_launchers_on_one_host_are_one_node():
    fleet = assemble(launched(2), [facts(0, reads=True), facts(1, reads=True)])
    assert shape(fleet) == [("a", 0, (0, 1))]


def test_the_first_readers_clock_counts():
    late = facts(1, reads=True)
    ahead = replace(late, node=Node(host="a", clock=Clock(synchronized=True, offset_s=0.1)))
    assert assemble(launched(2), [ahead, facts(0, reads=True)]).nodes[0].clock == CLOCK


def test_other_versions_of_ddpdoctor_are_reported():
    fleet = assemble(launched(), [*TWO_HOSTS[1:3], facts(1, version="9.1"), facts(3, "b", version="9.1")])
    assert fleet.problems == (f"ranks 1 and 3: ddpdoctor 9.1, and {ddpdoctor.__version__} on rank 0",)


def test_who_is_missing_is_named_as_far_as_known():
    assert missing_ranks(launched(6), TWO_HOSTS) == (4, 5)
    assert describe_missing([1, 4, 5, 6], {4: Hello(host="b", pid=77)}, 30.0) == (
        "rank 4 (b, process 77) started and did not answer within 30 s",
        "no message came from ranks 1, 5, 6 within 30 s",
    )
    assert describe_missing([], {}, 30.0) == ()


# Who came as which number, and who did not.


LONG_S = 60.0


def launching(nnodes="2"):
    options = NodeOptions(nnodes=nnodes, node_rank=0, master_addr="n0")
    return read_node_launch(effective_environment({}, options))


def came(node_rank, *, host="", fewest=2, most=2, leads=True, rank=0):
    host = host or f"n{node_rank}"
    return NodeArrival(
        host=host, machine=host, settings=JobSettings(node_rank=node_rank), rank=rank, leads=leads, fewest=fewest,
        most=most, version="0",
    )  # fmt: skip


def process_of(rank=None):
    return NodeProcess(rank=rank, local_rank=0, pid=1, variables={}, other_names=(), cpus=())


def seen(host, arrival, *, serves=False):
    return SentFacts(
        process=process_of(),
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
    assert is_complete(launching(), arrivals, waited_s) is complete


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
    fleet = assemble_fleet(found, seat_nodes(found, 1, 2), launching())
    assert [node.host for node in fleet.nodes] == ["same (node 0)", "same (node 1)"]
    assert isinstance(fleet.nodes[0].names, Unread)
    assert "did not send" in fleet.nodes[0].names.reason
    assert (fleet.nnodes, fleet.missing) == (2, ())


def test_ranks_beside_belong_to_the_node_of_their_machine():
    found = those(came(0), came(1), came(1, leads=False, rank=1))
    fleet = assemble_fleet(found, seat_nodes(found, 1, 2), launching())
    assert [len(node.processes) for node in fleet.nodes] == [1, 2]
