"""Members of a job over a real meeting, by their own port and where that cannot be had."""

import contextlib
import json
import mmap
import socket
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ddpdoctor.collect.fingerprint_nodes import COMPARISON, POINTS, read_consistency, unite_consistency
from ddpdoctor.collect.run_files import attempt_name
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.job_store import open_job_store
from ddpdoctor.exchange.meeting import OTHER_PORT, HostedMeeting, by_port
from ddpdoctor.exchange.store import Client, StoreError
from ddpdoctor.exchange.wire import RemoteClient, open_client
from ddpdoctor.launch.command_line import OnHang
from ddpdoctor.launch.evidence import Followed
from ddpdoctor.launch.first_node import FOLDER, PREFIX, SECOND_PORT, FirstNode, SecondPort, further_ways
from ddpdoctor.launch.hang import Examining
from ddpdoctor.launch.node_messages import NodeProgress, pack_folder
from ddpdoctor.launch.other_node import OtherNode
from ddpdoctor.launch.placement import MOST_ADDRESSES, Placement, Style, own_addresses
from ddpdoctor.launch.replica_exchange import CONTENTS, ROOTS, WORD, LiveComparison, SharedReplicas
from ddpdoctor.launch.watch import JobWatch
from ddpdoctor.model.consistency import Consistency, RootsReport
from ddpdoctor.model.facts import Run
from ddpdoctor.model.findings import Confidence, Finding, Judgment, Severity
from ddpdoctor.recorder.storage import ring_layout
from tests.fingerprints import TICKS, FakeRank
from tests.golden import words
from tests.scenarios.running import free_port, wait_for
from tests.torch_stores import serve_torch_store

# Two members of a job over a real meeting: what the first asks for, the other sends, and hears the verdict.


NOTHING = Judgment(findings=(), checks=(), certain=True)
Pair = tuple[FirstNode, OtherNode]


def place(number: int, port: int) -> Placement:
    return Placement(
        style=Style.TORCHRUN, number=number, expected=2, most=2, hosts=("127.0.0.1",), port=port, one_host=True,
        token=b"secret",
    )  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(RemoteClient, "beat_every_s", 0.1)
    port = free_port()
    first = FirstNode(place(0, port), "node0", tmp_path)
    assert not first.serve()
    ways = (by_port(("127.0.0.1",), port),)
    other = OtherNode(place(1, port), "node1", ways, clocks_keep_s=0.0, silent_ns=2 * 10**9)
    other.start()
    assert wait_for(lambda: first.save(tmp_path).nodes[1].clock_offset_ns is not None)
    yield first, other
    other.close()
    first.close()


def ask(pair: Pair, folder: Path) -> None:
    """Have the other send a run folder of one file."""
    first, other = pair
    first.ask()
    assert wait_for(lambda: other.request != 0)
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text("{}")
    other.answer(other.request, pack_folder(folder), moved=False)
    assert wait_for(first.has_answers)


def test_clocks_are_measured_anew_with_each_answer(pair: Pair, tmp_path: Path):
    first, _ = pair
    offsets = [first.save(tmp_path).nodes[1].clock_offset_ns]
    for _ in range(3):
        ask(pair, tmp_path / "sent")
        offsets.append(first.save(tmp_path).nodes[1].clock_offset_ns)
    assert (tmp_path / FOLDER / "1" / "run.json").read_text() == "{}"
    # To the nanosecond no two measurements are alike; of one machine they are near 0 all the same.
    assert len(set(offsets)) > 1
    assert all(offset is not None and abs(offset) < 10**9 for offset in offsets)


HOSTILE = (
    b"Infinity", b"[[9e999,0,0,0,null,0.0,null,0,0,null,0],0,0,0,null,[0,9000000000000000000]]", b"[" * 128, b"\xff",
    b"[[0,0,0,0,null,0.0,null,0,0,null,0],1000000000,0,0,null,[0,9000000000000000000]]",
)  # fmt: skip


def test_members_answer_beside_others_that_say_anything(pair: Pair, tmp_path: Path):
    """With the token, as a node of another version, or one that is broken, has it."""
    first, _ = pair
    opened = []
    for number, said in enumerate(HOSTILE * 2, start=2):
        client = open_client(("127.0.0.1",), first.placement.port, b"secret", 60)
        opened.append(client)
        client.beat(str(number), said)
        client.set(f"greeting/{number}", said)
        client.set(f"evidence/{number}/1000000000", b"no folder" * 10)
        if number > 6:
            client.leave(str(number), said)
    ask(pair, tmp_path / "sent")
    assert wait_for(lambda: len(first.save(tmp_path).nodes) == 2 + 2 * len(HOSTILE))
    assert (tmp_path / FOLDER / "1" / "run.json").read_text() == "{}"
    assert first.failure is None
    for client in opened:
        client.close()


def test_what_the_first_decides_no_other_can_write_and_all_know_before_the_job_is_stopped(pair: Pair):
    first, other = pair
    with contextlib.closing(open_client(("127.0.0.1",), first.placement.port, b"secret", 60)) as stranger:
        for key in ("verdict/1", "verdict/1/0", "roster"):
            with pytest.raises(StoreError, match="only the server itself"):
                stranger.set(key, b"x")
            with pytest.raises(StoreError, match="only the server itself"):
                stranger.forget(key)
    first.announce(NOTHING, stop=True, place="node0:/run")
    verdict = other.take_verdict()
    assert verdict is not None
    assert (verdict.stop, verdict.place, verdict.judgment) == (True, "node0:/run", NOTHING)
    assert other.take_verdict() is None


def test_a_record_that_cannot_be_written_costs_no_other(pair: Pair, tmp_path: Path):
    """A name that no file system takes."""
    first, _ = pair
    ask(pair, tmp_path / "sent")
    index = json.dumps([[f"lost-{'1' * 300}", 0, []]]).encode()
    first.members.receive(0, 1, zlib.compress(len(index).to_bytes(4, "big") + index))
    first.save(tmp_path)
    assert (tmp_path / FOLDER / "1" / "run.json").read_text() == "{}"


def examining_of(folder: Path, other: OtherNode | None, on_hang: OnHang = "auto") -> Examining:
    """Have a node whose ranks get on be examined."""
    evidence = SimpleNamespace(readable=lambda: folder)
    idle = SimpleNamespace(evidence=evidence, own_progress=NodeProgress, rank_range=lambda: None)
    made = Examining(cast("JobWatch", idle), lambda *_: NOTHING, 300.0, on_hang, "node1:/run")
    made.nodes = other
    return made


def test_a_first_that_leaves_after_its_word_is_obeyed_all_the_same(pair: Pair, tmp_path: Path):
    first, other = pair
    examining = examining_of(tmp_path, other)
    first.announce(NOTHING, stop=True, place="node0:/run")
    first.close()
    assert wait_for(lambda: other.alone_since_ns is not None)
    looked = examining.examine()
    assert looked is not None
    assert (looked.stop, examining.judged_at) == (True, "node0:/run")


@pytest.mark.parametrize(("on_hang", "stop"), [("auto", True), ("auto", False), ("report", True)])
def test_a_launcher_that_failed_before_the_stop_was_obeyed_counts_as_stopped(
    pair: Pair, tmp_path: Path, on_hang: OnHang, *, stop: bool
):
    first, other = pair
    examining = examining_of(tmp_path, other, on_hang)
    assert [examining_of(tmp_path, None).take_stop(), examining.take_stop()] == [None, None]
    first.announce(NOTHING, stop=stop, place="node0:/run")
    assert wait_for(lambda: other.verdict is not None)
    assert examining.take_stop() == (NOTHING if stop and on_hang == "auto" else None)
    # What does not stop the job is left for the end.
    assert (other.take_verdict() is None) is (stop and on_hang == "auto")


@pytest.mark.parametrize("severity", [Severity.ERROR, Severity.WARNING])
def test_a_first_that_went_while_the_launcher_here_went_on_has_the_last_word_where_something_is_wrong(
    pair: Pair, tmp_path: Path, severity: Severity
):
    first, other = pair
    examining = examining_of(tmp_path, other)
    found = Finding(code="DD603", kind="early-exit", severity=severity, confidence=Confidence.HIGH, summary="rank 1")
    first.announce(Judgment(findings=(found,), checks=(), certain=True), stop=False, place="node0:/run")
    assert wait_for(lambda: other.verdict is not None)
    assert examining.examine() is None
    first.close()
    ended = examining.judge_end(0, lambda: False)
    assert ended.findings == ((found,) if severity is Severity.ERROR else ())


def test_members_that_look_for_another_way_still_are_waited_for_before_a_job_is_stopped(tmp_path: Path):
    port = free_port()
    first = FirstNode(place(0, port), "node0", tmp_path)
    assert not first.serve()
    other = OtherNode(place(1, port), "node1", (by_port(("127.0.0.1",), port),))
    late = threading.Timer(1.0, other.start)
    late.start()
    first.announce(NOTHING, stop=True, place="node0:/run")
    verdict = other.take_verdict()
    late.join()
    other.close()
    first.close()
    assert verdict is not None
    assert verdict.stop


# Where the members' own port cannot be had, a word in the job's store leads to another, and outlives the store.


@pytest.fixture
def store() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves the job's store, with its port."""
    with serve_torch_store() as served:
        yield served


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program has, which says nothing."""
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


def place_with_store(number: int, port: int, store: int) -> Placement:
    return replace(place(number, port), store=("127.0.0.1", store))


def member(placement: Placement, folder: Path) -> OtherNode:
    other = OtherNode(
        placement, "node1", (by_port(placement.hosts, placement.port), *further_ways(placement, folder / "none"))
    )
    other.start()
    return other


def has_come(first: FirstNode, folder: Path) -> Callable[[], bool]:
    return lambda: first.save(folder).nodes[1].clock_offset_ns is not None


def test_nodes_meet_where_a_word_in_the_store_says_and_stay_when_it_ends(store, taken, tmp_path):
    process, port = store
    first = FirstNode(place_with_store(0, taken, port), "node0", tmp_path)
    assert "cannot listen on" in first.serve()
    assert "cannot listen to the other nodes" in str(first.failure)
    other = member(place_with_store(1, taken, port), tmp_path)
    assert wait_for(has_come(first, tmp_path))
    assert first.failure is None
    process.kill()
    process.wait()
    first.ask()
    assert wait_for(lambda: other.request != 0)
    other.answer(other.request, b"packed", moved=False)
    assert wait_for(first.has_answers)
    other.close()
    first.close()


def test_a_member_that_lost_its_connection_finds_the_first_without_the_store(store, taken, tmp_path):
    process, port = store
    first = FirstNode(place_with_store(0, taken, port), "node0", tmp_path)
    first.serve()
    way = next(way for way in further_ways(place_with_store(1, taken, port), tmp_path) if way.name == OTHER_PORT)

    def opens() -> bool:
        with contextlib.suppress(StoreError):
            way.open(b"secret", 3).close()
            return True
        return False

    assert wait_for(opens)
    process.kill()
    process.wait()
    assert opens()
    first.close()
    assert not opens()


def test_the_store_is_left_in_peace_while_nobody_is_missed(store, tmp_path):
    _, port = store
    number = free_port()
    first = FirstNode(place_with_store(0, number, port), "node0", tmp_path, further_after_s=1000.0)
    assert not first.serve()
    other = member(place_with_store(1, number, port), tmp_path)
    assert wait_for(has_come(first, tmp_path))
    looked = open_job_store("127.0.0.1", port, PREFIX, 60)
    assert not wait_for(lambda: looked.get(SECOND_PORT) is not None, 2.5)
    other.close()
    # One that is yet to come has word left for it.
    third = FirstNode(replace(place_with_store(0, number + 1, port), hosts=()), "node0", tmp_path, further_after_s=0.0)
    third.serve()
    assert wait_for(lambda: looked.get(SECOND_PORT) is not None)
    third.close()
    first.close()


@pytest.mark.parametrize(
    ("token", "hosts", "words"),
    [
        (b"secret", 1, "connection refused"), (b"another", 1, "no message|not signed|token"),
        (b"secret", 200, "connection refused"),
    ],
)  # fmt: skip
def test_a_word_that_leads_nowhere_or_to_very_many_addresses_or_is_a_stranger_s(
    store, taken, tmp_path, token, hosts, words
):
    """No thread is started for each of them."""
    _, port = store
    with contextlib.closing(open_job_store("127.0.0.1", port, PREFIX, 60)) as opened:
        word = SecondPort(hosts=tuple(f"127.0.0.{n + 1}" for n in range(hosts)), port=1)
        Conversation(opened, token).send(SECOND_PORT, word)
        assert opened.get(SECOND_PORT) is not None
    way = next(way for way in further_ways(place_with_store(1, taken, port), tmp_path) if way.name == OTHER_PORT)
    with pytest.raises(StoreError, match=words) as reported:
        way.open(b"secret", 3.0)
    assert hosts == 1 or str(reported.value).count(words) == MOST_ADDRESSES


def addresses_of(row):
    """Return the addresses of this host, whose name has one; the variables say which interface a job uses."""
    name, *variables = row.split()
    interfaces = {
        "lo": ("127.0.0.1/8", "::1/128"), "docker0": ("172.17.0.1/16",),
        "eth0": ("10.0.0.4/24", "fe80::1/64"), "ib0": ("192.168.7.4/24", "2001:db8::4/64"),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ddpdoctor.collect.system.SystemCalls.interface_addresses", lambda _calls: interfaces)
        patched.setattr(socket, "gethostname", lambda: name)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patched.delenv(variable, raising=False)
        for one in variables:
            patched.setenv(*one.split("=", 1))
        return own_addresses()


test_words = words(__name__, own_addresses=addresses_of)


# What the watcher finds of replicas is saved, per attempt, and outlives the files of the ranks.


RUN = Run(check_every=50, allow_different=("head.*",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prints").mkdir()
    return tmp_path


def start(folder: Path, first_pid: int = 100) -> list[FakeRank]:
    fingerprints = folder / "prints"
    return [FakeRank(fingerprints, rank, (0, 1), pid=first_pid + rank).open(["w", "head.w"]) for rank in (0, 1)]


def write(replicas: LiveComparison, ranks: Sequence[FakeRank], number: int, *contents: str, attempt: int = 0) -> bool:
    """Have ranks write, and compare it; return whether that is news."""
    for rank, content in zip(ranks, contents, strict=True):
        rank.write(number, content, rank.rank)
    ring, role = mmap.mmap(-1, 1), ring_layout.ROLE_RANK
    replicas.has_news = False
    replicas.follow(attempt, [Followed(pid=rank.pid, ticks=TICKS, role=role, ring=ring) for rank in ranks])
    return replicas.has_news


def read(folder: Path, attempt: int | None = None) -> Consistency:
    found = read_consistency(folder, RUN, attempt, ())
    assert found is not None
    return found


def replicas_of(folder: Path, check_every: int = 50) -> LiveComparison:
    return LiveComparison(folder, check_every, ("head.*",))


def test_a_difference_is_news_once(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    steps = ((1, "w"), (2, "v"), (4, "v"))
    assert [write(replicas, ranks, number, "w", other) for number, other in steps] == [False, True, False]


def test_what_was_found_outlives_the_ranks_files(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    replicas.follow(-1, [])
    write(replicas, ranks, 1, "w", "v")
    replicas.close()
    assert list((folder / "prints").iterdir()) == []
    found = read(folder)
    assert (found.check_every, found.allowed, found.streams[0].differences[0].number) == (50, ("head.*",), 1)


def test_each_attempt_is_compared_by_itself(folder: Path) -> None:
    replicas = replicas_of(folder)
    first = start(folder)
    write(replicas, first, 1, "w", "v")
    replicas.save()
    for rank, content in zip(first, "wv", strict=True):
        rank.write(2, content, rank.rank)
    write(replicas, start(folder, first_pid=200), 1, "u", "u", attempt=1)
    assert not (folder / attempt_name(COMPARISON)).exists(), "an earlier attempt does not stand for this one"
    replicas.close()
    assert [read(folder, 0).streams[0].compared, read(folder).streams[0].compared] == [2, 1]
    assert [bool(read(folder, attempt).streams[0].differences) for attempt in (0, None)] == [True, False]


def test_nothing_is_done_where_it_is_turned_off(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder, check_every=0)
    assert not write(replicas, ranks, 1, "w", "v")
    replicas.save()
    replicas.close()
    assert not list(folder.glob("consistency*"))
    assert read_consistency(folder, Run(check_every=0), None, ()) == Consistency(check_every=0)


def test_files_stay_where_what_was_found_cannot_be_saved_and_a_folder_that_is_gone_ends_nothing(folder: Path) -> None:
    ranks = start(folder)
    (folder / f"{attempt_name(COMPARISON)}.part").mkdir()
    for number, replicas in enumerate((replicas_of(folder), replicas_of(folder / "gone")), start=1):
        write(replicas, ranks, number, "w", "v")
        replicas.close()
        assert replicas.failure is None
    assert len(list((folder / "prints").iterdir())) == 2


def test_ranks_files_are_compared_where_the_watcher_was_killed(folder: Path) -> None:
    ranks = start(folder)
    for rank, content in zip(ranks, "wv", strict=True):
        rank.write(1, content, rank.rank)
    found = read_consistency(folder, RUN, None, [rank.process() for rank in ranks])
    assert found is not None
    (stream,) = found.streams
    assert (stream.compared, stream.differences[0].differing) == (1, 1), "names that may differ are known as well"


@pytest.mark.parametrize("saved", ["", "[]", "{}", '{"check_every": "x"}', '{"streams": [1], "check_every": 5}'])
def test_what_cannot_be_read_back_is_compared_again(folder: Path, saved: str) -> None:
    (folder / attempt_name(COMPARISON)).write_text(saved)
    assert read(folder) == Consistency(check_every=50, allowed=("head.*",))


@pytest.mark.parametrize("every", [None, -1])
def test_a_run_that_knew_of_no_comparison_has_none(folder: Path, every: int | None) -> None:
    assert read_consistency(folder, Run(check_every=every), None, ()) is None


# What nodes have of replicas travels over a real meeting: roots each time, contents when the first asks.


TOKEN = b"secret"
EXCHANGED_RUN = Run(check_every=1)


def member_of(number: int, client: Client | None, others: tuple[int, ...] = ()) -> Any:
    """Return a member that has its number and has met the others; ``lost``: how often it was to connect again."""
    talk = None if client is None else Conversation(client, TOKEN)
    made = SimpleNamespace(number=number, is_first=number == 0, lost=0, members=SimpleNamespace(numbers=lambda: others))
    made.conversation, made.reconnect = lambda: talk, lambda: setattr(made, "lost", made.lost + 1)
    return made


class Node:
    """One node with one rank: what it writes is followed as a session does."""

    def __init__(self, folder: Path, number: int, hosting: HostedMeeting, world: int = 2) -> None:
        self.folder = folder / f"n{number}"
        (self.folder / "prints").mkdir(parents=True)
        self.rank = FakeRank(self.folder / "prints", number, range(world)).open(["w"])
        self.shared = SharedReplicas(())
        self.replicas = LiveComparison(self.folder, 1, (), self.shared)
        others = tuple(range(1, world)) if number == 0 else ()
        self.member = member_of(number, hosting.values, others)

    def write(self, number: int, content: str) -> None:
        self.rank.write(number, content)
        self.follow()

    def follow(self, attempt: int = 0, meeting: int | None = None) -> None:
        ring = mmap.mmap(-1, 1)
        followed = Followed(pid=self.rank.pid, ticks=TICKS, role=ring_layout.ROLE_RANK, ring=ring)
        self.replicas.follow(attempt, [followed], meeting)

    def found(self) -> Consistency | None:
        return read_consistency(self.folder, EXCHANGED_RUN, None, ())


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    with HostedMeeting(0, TOKEN, one_host=True) as hosting:
        yield [Node(tmp_path, number, hosting) for number in range(2)]


def store_of(node: Node) -> Client:
    conversation = node.member.conversation()
    assert conversation is not None
    return conversation.store


def turn(nodes: list[Node]) -> None:
    """Let each tell and hear twice: once for roots, once for what was asked then."""
    for node in (*reversed(nodes), *reversed(nodes), *reversed(nodes)):
        node.shared.exchange(node.member)
        node.follow()


def test_a_difference_between_nodes_is_news_on_the_first_while_the_job_runs(nodes: list[Node]) -> None:
    for number in (1, 2):
        for node in nodes:
            node.write(number, "same")
        turn(nodes)
    assert not any(node.replicas.has_news for node in nodes)
    for node in nodes:
        node.write(3, node.folder.name)
    turn(nodes)
    assert [node.replicas.has_news for node in nodes] == [True, False]
    for node in nodes:
        node.replicas.save()
    first, second = nodes
    united = unite_consistency(first.folder, None, [(second.folder, None)], [first.found(), second.found()])
    assert united is not None
    (difference,) = united.streams[0].differences
    assert (difference.number, difference.last_equal, difference.splits[0].sides) == (3, 2, ((0,), (1,)))


def test_what_is_equal_is_forgotten_everywhere_and_counted_and_only_roots_travel(nodes: list[Node]) -> None:
    for number in range(1, 9):
        for node in nodes:
            node.write(number, f"w{number}")
        turn(nodes)
    assert all(not stream.points for node in nodes for stream in node.shared.kept().streams)
    first, second = nodes
    store = store_of(first)
    roots, word = store.get(f"{ROOTS}/1"), store.get(WORD)
    assert len(roots) + len(word) < 512
    (name,) = (stream.name for stream in second.shared.kept().streams)
    assert store.get(f"{CONTENTS}/1/1/{name}") is None
    for node in nodes:
        node.replicas.close()
    united = unite_consistency(first.folder, None, [(second.folder, None)], [first.found(), second.found()])
    assert united is not None
    assert (united.streams[0].compared, united.streams[0].ranks) == (8, (0, 1))


def test_attempts_with_other_numbers_are_not_held_against_each_other(nodes: list[Node]) -> None:
    first, second = nodes
    first.rank.write(1, "a")
    first.follow(1, meeting=2)
    second.rank.write(1, "b")
    second.follow(1, meeting=1)
    for node in (second, first, second, first):
        node.shared.exchange(node.member)
    first.follow(1, meeting=2)
    assert not first.replicas.has_news


def test_an_attempt_that_is_over_leaves_what_it_kept_under_its_number(nodes: list[Node]) -> None:
    first, _ = nodes
    first.write(1, "a")
    first.replicas.save()
    assert (first.folder / attempt_name(POINTS)).exists()
    first.follow(1)
    assert (first.folder / attempt_name(POINTS, 0)).exists()
    assert not (first.folder / attempt_name(POINTS)).exists()


def test_what_others_send_amiss_ends_nothing(nodes: list[Node]) -> None:
    first, second = nodes
    for node in nodes:
        node.write(1, "same")
    client = store_of(first)
    (name,) = (stream.name for stream in second.shared.kept().streams)
    for key in (f"{ROOTS}/1", WORD, f"{CONTENTS}/1/1/{name}"):
        client.set(key, b"junk")
    first.shared.exchange(first.member)
    second.shared.exchange(second.member)
    Conversation(client, b"another secret").send(f"{ROOTS}/1", RootsReport(roots=()))
    first.shared.exchange(first.member)
    turn(nodes)
    first.follow()
    assert not first.replicas.has_news
    assert (first.shared.failure, first.replicas.failure) == (None, None)


def test_a_connection_that_was_lost_is_opened_again_and_a_member_that_is_alone_says_nothing() -> None:
    alone, without = SharedReplicas(()), member_of(1, None)
    alone.exchange(without)
    alone.start(without)
    alone.close()
    assert alone.failure is None
    with HostedMeeting(0, TOKEN, one_host=True) as hosting:
        client = hosting.values
        member = member_of(1, client)
        shared = SharedReplicas(())
        shared.exchange(member)
        assert member.lost == 0
        client.close()
    shared.exchange(member)
    assert (member.lost, shared.failure) == (1, None)
