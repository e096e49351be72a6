"""Processes of a job gather over a real server: here each is a thread, which costs nothing to start."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

import ddpdoctor
from ddpdoctor.collect.launch import effective_environment, read_node_launch
from ddpdoctor.collect.system import ReadingPlan, System, SystemCalls
from ddpdoctor.diagnose.machines import Facts, Hello, assemble, describe_missing, gather, gather_over
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
from ddpdoctor.model.launch import JobSettings, Launch, NodeOptions, Publication
from ddpdoctor.model.node import SECTIONS, Clock, Launcher, Node, NodeProcess
from ddpdoctor.model.reading import Unread
from tests.golden import words
from tests.rules.environment.build import process
from tests.scenarios.running import free_port

OWN = ddpdoctor.__version__
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


@pytest.mark.parametrize("store", ["the own port", "torchrun's store"])
def test_rank_0_hears_all_and_the_others_say_nothing(request, store):
    """Clocks are compared with rank 0's."""
    launch = request.getfixturevalue("torchrun" if "torchrun" in store else "launch")
    fleet, *others = all_of(launch, [0, 1, 2], plan=PLAN)

    assert others == [None, None]
    assert [(node.host, node.ranks) for node in fleet.nodes] == [("n0", (0,)), ("n1", (1,)), ("n2", (2,))]
    assert not any(isinstance(node.limits, Unread) for node in fleet.nodes)
    assert (fleet.launcher, fleet.world_size, fleet.missing, fleet.problems) == (launch.launcher, 3, (), ())
    assert fleet.nodes[0].clock.offset_s is None
    assert all(0 <= node.clock.offset_s < 5 for node in fleet.nodes[1:])


FACTS = encode(Facts(rank=2, machine="m", container="c", process=process(2), node=None, host="n2", version="1"))


def say_hello(conversation):
    conversation.send("hello/2", Hello(host="n2", pid=77))


def sent(message):
    def send(conversation):
        key = f"{conversation.prefix}facts/{conversation.add('arrived', 1)}"
        conversation.store.set(key, message if isinstance(message, bytes) else pack(message))

    return send


UNHEARD = {
    "no message from rank 2 within 5 s": None,
    "rank 2 (n2, process 77) started but did not answer within 5 s": say_hello,
    "one process sent something that is not a message of ddpdoctor": sent(b"rubbish"),
    "one process sent rank: it is missing": sent({}),
    "one process sent rank: a whole number was expected, and it is a text": sent({**FACTS, "rank": "2"}),
    "one process sent node.limits: an object was expected, and it is a whole number": sent(
        {**FACTS, "node": {"host": "n2", "limits": 1}}
    ),
}


@pytest.mark.parametrize("problem", UNHEARD)
def test_a_rank_that_never_comes_says_nothing_more_or_what_cannot_be_read_is_missing_and_the_rest_is_there(
    launch, problem
):
    def speak(rank):
        if rank != 2:
            return take_part(launch, rank, timeout_s=5)
        if (says := UNHEARD[problem]) is not None:
            with meet(replace(launch, rank=2), {}, 60) as meeting:
                says(meeting.begin("fleet"))
        return None

    with ThreadPoolExecutor() as pool:
        fleet = next(iter(pool.map(speak, [0, 1, 2])))
    assert [node.host for node in fleet.nodes] == ["n0", "n1"]
    assert (fleet.missing, fleet.problems[0]) == ((2,), problem)
    assert fleet.silent_hosts == (("n2",) if UNHEARD[problem] is say_hello else ())


@pytest.fixture
def torchrun(launch):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield replace(launch, launcher=Launcher.TORCHRUN, port=server.port, agent_store=True)
    del server


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
    fleet = gather(Launch(), System(env={"RANK": "1"}), PLAN, 1)
    assert fleet.launcher is Launcher.NONE
    assert fleet.nodes[0].ranks == (1,)
    assert not isinstance(fleet.nodes[0].limits, Unread)


# Messages become nodes: one a machine or container, nobody lost, nobody counted twice.


CLOCK = Clock(synchronized=True, offset_s=None)


def launched(world_size=4, nnodes=2):
    return Launch(launcher=Launcher.TORCHRUN, world_size=world_size, nnodes=nnodes)


def facts(rank, host="a", *, machine=None, container="c", reads=False, version=OWN, own_rank=None, clock=CLOCK):
    return Facts(
        rank=rank, machine=machine or host, container=container, host=host, version=version,
        process=process(rank if own_rank is None else own_rank, pid=100 + rank),
        node=Node(host=host, clock=clock) if reads else None,
    )  # fmt: skip


TWO_HOSTS = [facts(3, "b"), facts(0, "a", reads=True), facts(2, "b", reads=True), facts(1, "a")]


AHEAD = Clock(synchronized=True, offset_s=0.1)


def seen_of(fleet):
    """Return a fleet; of its nodes what says who they are, the clock, and the reasons for what was not read."""
    nodes = [
        (node.host, node.index, node.ranks, getattr(node.clock, "offset_s", "no clock"),
         sorted({one.reason for one in (getattr(node, name) for name in SECTIONS) if isinstance(one, Unread)}))
        for node in fleet.nodes
    ]  # fmt: skip
    problems = tuple(one.replace(OWN, "OWN") for one in fleet.problems)
    return {"nodes": nodes, "fleet": replace(fleet, nodes=(), problems=problems)}


def test_who_is_missing_is_named_as_far_as_known():
    assert describe_missing([1, 4, 5, 6], {4: Hello(host="b", pid=77)}, 30.0) == (
        "rank 4 (b, process 77) started but did not answer within 30 s",
        "no message from ranks 1, 5, 6 within 30 s",
    )


# Who came as which number, and who did not.


TWO_OF_3 = {"fewest": 3, "most": 3}


def launching(nnodes="2"):
    options = NodeOptions(nnodes=nnodes, node_rank=0, master_addr="n0")
    return read_node_launch(effective_environment({}, options))


def came(node_rank, *, host="", fewest=2, most=2, leads=True, rank=0):
    host = host or f"n{node_rank}"
    return NodeArrival(
        host=host, machine=host, settings=JobSettings(node_rank=node_rank), rank=rank, leads=leads, fewest=fewest,
        most=most, version="0",
    )  # fmt: skip


def seen(host, arrival, *, serves=False):
    return SentFacts(
        process=NodeProcess(rank=None, local_rank=0, pid=1, variables={}, other_names=(), cpus=()),
        node=Node(host=host), serves=serves,
        publication=Publication(number=arrival, address=f"10.0.0.{arrival}", interface="eth0"),
    )  # fmt: skip


def those(*arrivals, silent=()):
    arrived = dict(enumerate(arrivals, 1))
    facts = {number: seen(one.host, number, serves=number == 1) for number, one in arrived.items()}
    return Arrivals(arrived=arrived, seen={number: one for number, one in facts.items() if number not in silent})


def seats_of(row):
    """Return who has which seat of those that came, and the fleet that they make."""
    arrivals, more = eval(row)
    judge, most = more.get("judge", 1), more.get("most", 4)
    arrived = those(*arrivals, silent=more.get("silent", ()))
    seats, roster = seat_nodes(arrived, judge, most), make_roster(arrived, judge, most)
    assert decode(SeatList, encode(roster)) == roster
    fleet = assemble_fleet(arrived, seats, launching())
    return {
        "number and arrival": [(seat.number, seat.arrival) for seat in seats],
        "absent": absent_numbers(arrived, seats), "servers": roster.servers,
        "roster": [(one.number, one.address) for one in roster.publications],
        "seats in it": [seat.number for seat in roster.seats],
        "processes": [(node.host, len(node.processes), getattr(node.names, "reason", "read")) for node in fleet.nodes],
        "fleet": (fleet.nnodes, fleet.missing),
    }  # fmt: skip


def assembled(row):
    world, sent = eval(row)
    return seen_of(assemble(launched(world), sent, ["rubbish"]))


test_words = words(
    __name__,
    assemble=assembled, seats=seats_of,
    is_complete=lambda row: is_complete(launching(), eval(row.partition(": ")[2]), float(row.partition(" ")[0])),
)  # fmt: skip
