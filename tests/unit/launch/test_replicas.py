"""What watchers find of replicas is saved and outlives attempts, and roots travel between nodes."""

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from ddpdoctor.collect.fingerprint_nodes import COMPARISON, POINTS, read_consistency, unite_consistency
from ddpdoctor.exchange.conversation import Conversation
from ddpdoctor.exchange.meeting import HostedMeeting
from ddpdoctor.exchange.store import Client
from ddpdoctor.launch.first_node import FirstNode
from ddpdoctor.launch.other_node import OtherNode
from ddpdoctor.launch.progress import Followed
from ddpdoctor.launch.replica_exchange import CONTENTS, ROOTS, WORD, LiveComparison, ReplicaExchange, SharedReplicas
from ddpdoctor.model.consistency import Consistency, RootsReport
from ddpdoctor.model.facts import Run, attempt_name
from ddpdoctor.recorder.storage import ring_layout
from tests.fingerprints import TICKS, FakeRank

# What the watcher finds of replicas is saved, per attempt, and outlives the files of the ranks.


RUN = Run(check_every=50, allow_different=("head.*",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prints").mkdir()
    return tmp_path


def start(folder: Path, first_pid: int = 100) -> list[FakeRank]:
    fingerprints = folder / "prints"
    return [FakeRank(fingerprints, rank, (0, 1), pid=first_pid + rank).open(["w", "head.w"]) for rank in (0, 1)]


def followed(ranks: Sequence[FakeRank]) -> list[Followed]:
    return [Followed(pid=rank.pid, ticks=TICKS, role=ring_layout.ROLE_RANK, ring=mmap.mmap(-1, 1)) for rank in ranks]


def write(ranks: Sequence[FakeRank], number: int, *contents: str) -> None:
    for rank, content in zip(ranks, contents, strict=True):
        rank.write(number, content, rank.rank)


def read(folder: Path, attempt: int | None = None) -> Consistency:
    found = read_consistency(folder, RUN, attempt, ())
    assert found is not None
    return found


def replicas_of(folder: Path, check_every: int = 50) -> LiveComparison:
    return LiveComparison(folder, check_every, ("head.*",))


def test_a_difference_is_news_once(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    write(ranks, 1, "w", "w")
    replicas.follow(0, followed(ranks))
    assert not replicas.has_news
    write(ranks, 2, "w", "v")
    replicas.follow(0, followed(ranks))
    assert replicas.has_news
    replicas.has_news = False
    write(ranks, 4, "w", "v")
    replicas.follow(0, followed(ranks))
    assert not replicas.has_news


def test_what_was_found_outlives_the_ranks_files(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    replicas.follow(-1, [])
    write(ranks, 1, "w", "v")
    replicas.follow(0, followed(ranks))
    replicas.close()
    assert list((folder / "prints").iterdir()) == []
    found = read(folder)
    assert (found.check_every, found.allowed, found.streams[0].differences[0].number) == (50, ("head.*",), 1)


def test_each_attempt_is_compared_by_itself(folder: Path) -> None:
    replicas = replicas_of(folder)
    first = start(folder)
    write(first, 1, "w", "v")
    replicas.follow(0, followed(first))
    replicas.save()
    write(first, 2, "w", "v")
    second = start(folder, first_pid=200)
    write(second, 1, "u", "u")
    replicas.follow(1, followed(second))
    assert not (folder / attempt_name(COMPARISON)).exists(), "an earlier attempt does not stand for this one"
    replicas.close()
    assert [read(folder, 0).streams[0].compared, read(folder).streams[0].compared] == [2, 1]
    assert [bool(read(folder, attempt).streams[0].differences) for attempt in (0, None)] == [True, False]


def test_nothing_is_done_where_it_is_turned_off(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder, check_every=0)
    write(ranks, 1, "w", "v")
    replicas.follow(0, followed(ranks))
    replicas.save()
    replicas.close()
    assert not replicas.has_news
    assert not list(folder.glob("consistency*"))
    assert read_consistency(folder, Run(check_every=0), None, ()) == Consistency(check_every=0)


def test_files_stay_where_what_was_found_cannot_be_saved(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    (folder / f"{attempt_name(COMPARISON)}.part").mkdir()
    write(ranks, 1, "w", "v")
    replicas.follow(0, followed(ranks))
    replicas.close()
    assert len(list((folder / "prints").iterdir())) == 2
    assert replicas.failure is None


def test_a_folder_that_is_gone_ends_nothing(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder / "gone")
    replicas.follow(0, followed(ranks))
    replicas.close()
    assert replicas.failure is None


def test_ranks_files_are_compared_where_the_watcher_was_killed(folder: Path) -> None:
    ranks = start(folder)
    write(ranks, 1, "w", "v")
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


def test_what_is_saved_is_plain_json(folder: Path) -> None:
    ranks, replicas = start(folder), replicas_of(folder)
    write(ranks, 1, "w", "v")
    replicas.follow(0, followed(ranks))
    replicas.save()
    assert json.loads((folder / attempt_name(COMPARISON)).read_text())["streams"][0]["clock"] == "optimizer step"


# What nodes have of replicas travels over a real meeting: roots each time, contents when the first asks.


TOKEN = b"secret"
EXCHANGED_RUN = Run(check_every=1)


class Place:
    """A member that has its number and has met the others."""

    def __init__(self, number: int, client: Client | None, others: tuple[int, ...] = ()) -> None:
        self.number: int | None = number
        self.is_first = number == 0
        self.lost = 0
        """How often it was to connect again."""
        self._conversation, self._others = None if client is None else Conversation(client, TOKEN), others

    def conversation(self) -> Conversation | None:
        return self._conversation

    def others(self) -> tuple[int, ...]:
        return self._others

    def reconnect(self) -> None:
        self.lost += 1


class Node:
    """One node with one rank: what it writes is followed as a session does."""

    def __init__(self, folder: Path, number: int, hosting: HostedMeeting, world: int = 2) -> None:
        self.folder = folder / f"n{number}"
        (self.folder / "prints").mkdir(parents=True)
        self.rank = FakeRank(self.folder / "prints", number, range(world)).open(["w"])
        self.shared = SharedReplicas(())
        self.replicas = LiveComparison(self.folder, 1, (), self.shared)
        others = tuple(range(1, world)) if number == 0 else ()
        place = cast("FirstNode | OtherNode", Place(number, hosting.store(), others))
        self.exchange = ReplicaExchange(self.shared, place)

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


def turn(nodes: list[Node]) -> None:
    """Let each tell and hear twice: once for roots, once for what was asked then."""
    for node in (*reversed(nodes), *reversed(nodes), *reversed(nodes)):
        node.exchange.exchange()
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


def test_what_is_equal_is_forgotten_everywhere_and_counted(nodes: list[Node]) -> None:
    for number in (1, 2, 3):
        for node in nodes:
            node.write(number, f"w{number}")
    turn(nodes)
    assert all(not stream.points for node in nodes for stream in node.shared.kept().streams)
    for node in nodes:
        node.replicas.close()
    first, second = nodes
    united = unite_consistency(first.folder, None, [(second.folder, None)], [first.found(), second.found()])
    assert united is not None
    assert (united.streams[0].compared, united.streams[0].ranks) == (3, (0, 1))


def test_only_roots_travel_while_all_is_equal(tmp_path: Path) -> None:
    with HostedMeeting(0, TOKEN, one_host=True) as hosting:
        nodes = [Node(tmp_path, number, hosting) for number in range(2)]
        for number in range(1, 9):
            for node in nodes:
                node.write(number, f"w{number}")
            turn(nodes)
        client = hosting.store()
        roots, word = client.get(f"{ROOTS}/1"), client.get(WORD)
        assert roots is not None
        assert word is not None
        assert len(roots) + len(word) < 512
        (name,) = (stream.name for stream in nodes[1].shared.kept().streams)
        assert client.get(f"{CONTENTS}/1/1/{name}") is None


def test_attempts_with_other_numbers_are_not_held_against_each_other(nodes: list[Node]) -> None:
    first, second = nodes
    first.rank.write(1, "a")
    first.follow(1, meeting=2)
    second.rank.write(1, "b")
    second.follow(1, meeting=1)
    for node in (second, first, second, first):
        node.exchange.exchange()
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
    conversation = first.exchange._member.conversation()
    assert conversation is not None
    client = conversation.store
    (name,) = (stream.name for stream in second.shared.kept().streams)
    for key in (f"{ROOTS}/1", WORD, f"{CONTENTS}/1/1/{name}"):
        client.set(key, b"junk")
    first.exchange.exchange()
    second.exchange.exchange()
    Conversation(client, b"another secret").send(f"{ROOTS}/1", RootsReport(roots=()))
    first.exchange.exchange()
    turn(nodes)
    first.follow()
    assert not first.replicas.has_news
    assert (first.exchange.failure, first.replicas.failure) == (None, None)


def test_a_member_that_is_alone_says_nothing() -> None:
    exchange = ReplicaExchange(SharedReplicas(()), Place(1, None))
    exchange.exchange()
    exchange.start()
    exchange.close()
    assert exchange.failure is None


def test_a_connection_that_was_lost_is_opened_anew() -> None:
    with HostedMeeting(0, TOKEN, one_host=True) as hosting:
        client = hosting.store()
        place = Place(1, client)
        shared = SharedReplicas(())
        exchange = ReplicaExchange(shared, place)
        exchange.exchange()
        assert place.lost == 0
        client.close()
    exchange.exchange()
    assert (place.lost, exchange.failure) == (1, None)
