"""Processes of a job gather over a real server: here each is a thread, which costs nothing to start."""

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import TCPStore

from ddpdoctor.collect.system import ReadingPlan, System, SystemCalls
from ddpdoctor.diagnose.machines import Facts, Hello, gather, gather_over, read_fleet
from ddpdoctor.exchange.conversation import pack
from ddpdoctor.exchange.meeting import meet
from ddpdoctor.exchange.server import Server
from ddpdoctor.exchange.wire import NO_TOKEN
from ddpdoctor.model.codec import encode
from ddpdoctor.model.errors import UserError
from ddpdoctor.model.launch import Launch
from ddpdoctor.model.node import Launcher
from ddpdoctor.model.reading import Unread
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
