"""Replicas on several nodes: roots are held against each other, contents only where those differ."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddpdoctor.collect.fingerprint_compare import Comparer, StreamSeen
from ddpdoctor.collect.fingerprint_files import (
    MAX_BATCH_BYTES,
    MAX_KEPT_BYTES,
    NodeIndex,
    RowsRead,
    Written,
    pack_stream,
)
from ddpdoctor.collect.fingerprint_nodes import ANSWER_LIMIT_S, JOINT, POINTS, Joint, unite_consistency
from ddpdoctor.collect.run.evidence import save
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.consistency import Consistency, NodeStreams, StreamClock, StreamKey, StreamRoot, What
from ddpdoctor.model.facts import attempt_name
from tests.fingerprints import FakeRank, only_stream, row

NAMES = ("w", "b")


class FakeNode:
    """A node whose ranks write fingerprints, and what it keeps of them for the others."""

    def __init__(self, folder: Path, ranks: Sequence[int], world: int, names: Sequence[object] = NAMES) -> None:
        self.folder = folder
        self.ranks = [FakeRank(folder / "prints", rank, range(world)).open(list(names)) for rank in ranks]
        self.index = NodeIndex()
        self.comparer = Comparer(folder / "prints", check_every=1, index=self.index)

    def write(self, number: int, *contents: object, **text: object) -> None:
        for rank in self.ranks:
            rank.write(number, *contents, **text)
        self.look()

    def look(self) -> None:
        self.comparer.compare([rank.process() for rank in self.ranks])

    def report(self) -> tuple[StreamRoot, ...]:
        return tuple(decode(StreamRoot, json.loads(json.dumps(encode(one)))) for one in self.index.report())

    def kept(self, names: Sequence[str] | None = None) -> NodeStreams:
        packed = [
            pack_stream(one, self.comparer.found_here(one.key))
            for one in self.index.shared()
            if names is None or one.name in names
        ]
        return decode(NodeStreams, json.loads(json.dumps(encode(NodeStreams(streams=tuple(packed))))))

    def save(self, joint: Joint | None = None) -> Consistency:
        found = self.comparer.close()
        save(self.folder / attempt_name(POINTS), self.kept())
        if joint is not None:
            save(self.folder / attempt_name(JOINT), joint.found())
        return found


class FakeJob:
    """Nodes of equally many ranks, and the first one's view of all."""

    def __init__(self, folder: Path, nodes: int, each: int, names: Sequence[object] = NAMES) -> None:
        world = nodes * each
        self.nodes = [FakeNode(folder / f"n{n}", range(n * each, n * each + each), world, names) for n in range(nodes)]
        self.joint = Joint(self.nodes[0].index, ())
        self.now_s = 0.0
        self.asked: list[int] = []
        self.news = False

    def write(self, number: int, *contents: object, **text: object) -> None:
        for node in self.nodes:
            node.write(number, *contents, **text)

    def tell(self) -> None:
        """Let all nodes tell the first, and hear what it says."""
        self.now_s += 3.0
        for member, node in enumerate(self.nodes[1:], 1):
            self.joint.hear(member, node.report(), self.now_s)
        self.news |= self.joint.compare(self.now_s)
        word = self.joint.word()
        for member, node in enumerate(self.nodes[1:], 1):
            for name, upto in word.settled.items():
                node.index.streams[name].forget(upto)
            if word.wanted:
                self.asked.append(member)
                self.joint.answered(member, node.kept(word.wanted))
        self.news |= self.joint.compare(self.now_s)

    def united(self, joint: Joint | None = None) -> Consistency:
        found = [node.save(joint if number == 0 else None) for number, node in enumerate(self.nodes)]
        folders = [(node.folder, None) for node in self.nodes[1:]]
        united = unite_consistency(self.nodes[0].folder, None, folders, found)
        assert united is not None
        return united


@pytest.mark.parametrize("each", [1, 2])
def test_nodes_with_equal_replicas_exchange_roots_only(tmp_path: Path, each: int) -> None:
    job = FakeJob(tmp_path, 3, each)
    for number in range(1, 30):
        job.write(number, f"w{number}", "b")
        if number % 4 == 0:
            job.tell()
    assert job.asked == []
    stream = only_stream(job.united(job.joint))
    assert (stream.compared, stream.differences, stream.unpaired) == (29, (), ())
    assert stream.ranks == tuple(range(3 * each))
    assert [values.rank for values in dict(stream.values)[1]] == list(range(3 * each))
    assert (stream.last_number, stream.kinds) == (29, (What.PARAMETER,))


def test_a_difference_between_nodes_is_found_with_its_tensor_ranks_and_step(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 3, 2)
    job.write(1, "w", "b")
    job.tell()
    job.write(2, "w", "b")
    for number in (3, 4):
        for node in job.nodes:
            node.write(number, "w", "other" if node is job.nodes[2] else "b")
    job.tell()
    assert job.news
    assert job.asked == [1, 2]
    for stream in (job.joint.found().streams[0].found, only_stream(job.united(job.joint))):
        (difference,) = stream.differences
        assert (difference.what, difference.number, difference.last_equal) == (What.PARAMETER, 3, 2)
        (split,) = difference.splits
        assert (split.row.name, split.sides) == ("b", ((0, 1, 2, 3), (4, 5)))
        assert [values.rank for values in dict(stream.values)[3]] == list(range(6))


def test_a_rank_that_differs_on_its_own_node_is_held_against_all(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 2)
    job.write(1, "w", "b")
    job.tell()
    for node in job.nodes:
        for rank in node.ranks:
            rank.write(2, "w", "other" if rank.rank == 3 else "b")
        node.look()
    job.tell()
    (difference,) = only_stream(job.united(job.joint)).differences
    assert difference.splits[0].sides == ((0, 1, 2), (3,)), "with its own node alone it would be one against one"


def test_the_same_two_sides_on_each_node_are_seen_whole(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 2)
    for node in job.nodes:
        for rank in node.ranks:
            rank.write(1, "w", f"b{rank.rank % 2}")
        node.look()
    job.tell()
    (difference,) = job.joint.found().streams[0].found.differences
    assert difference.splits[0].sides == ((0, 2), (1, 3))


def test_what_was_never_reported_is_compared_from_the_files(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 1)
    job.write(1, "w", "b")
    job.nodes[0].write(2, "w", "b")
    job.nodes[1].write(2, "w", "x")
    (difference,) = only_stream(job.united()).differences
    assert (difference.number, difference.last_equal, difference.splits[0].sides) == (2, 1, ((0,), (1,)))


def test_what_was_reported_goes_before_what_the_files_add(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 1)
    for number in (1, 2):
        job.write(number, "w", "b")
        job.tell()
    job.nodes[0].write(4, "w", "b")
    job.nodes[1].write(4, "w", "x")
    stream = only_stream(job.united(job.joint))
    (difference,) = stream.differences
    assert (difference.number, difference.last_equal, stream.compared) == (4, 2, 3)


def test_kinds_that_part_later_are_found_later(tmp_path: Path) -> None:
    names = [row("w", "g"), row("w")]
    job = FakeJob(tmp_path, 2, 1, names)
    for number, gradient, parameter in ((1, "g", "p"), (2, "g", "q"), (3, "g", "q"), (4, "h", "q")):
        job.nodes[0].write(number, "g", "p")
        job.nodes[1].write(number, gradient, parameter)
        job.now_s += 1000
        job.tell()
    found = {one.what: (one.number, one.last_equal) for one in only_stream(job.united(job.joint)).differences}
    assert found == {What.PARAMETER: (2, 1), What.GRADIENT: (4, 3)}


def test_a_node_that_is_ahead_is_not_held_against_the_latest(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 1)
    for number in range(1, 6):
        job.nodes[1].write(number, number, number)
    job.tell()
    assert job.asked == []
    for number in range(1, 4):
        job.nodes[0].write(number, number, number)
    job.tell()
    assert (job.asked, only_stream(job.united(job.joint)).compared) == ([], 3)


def test_points_that_one_node_lacks_are_left_out(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 1)
    for number in range(1, 6):
        job.nodes[0].write(number, number, number)
        if number != 3:
            job.nodes[1].write(number, number, number)
    job.tell()
    stream = only_stream(job.united(job.joint))
    assert (stream.compared, stream.differences) == (4, ())


def test_random_states_are_the_same_only_where_they_are_on_all_nodes(tmp_path: Path) -> None:
    for which, seeds in enumerate(({0: "r", 1: "r"}, {0: "r", 1: "s"})):
        job = FakeJob(tmp_path / str(which), 2, 2)
        for number in (1, 2, 3):
            for at, node in enumerate(job.nodes):
                node.write(number, "w", "b", random=seeds[at])
            job.tell()
        stream = only_stream(job.united(job.joint))
        assert (stream.compared, stream.same_random) == (3, 3 if seeds[1] == "r" else 0)


def test_streams_of_one_node_alone_are_not_reported_and_stay(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 2)
    for node in job.nodes:
        for rank in node.ranks:
            rank.open(["w"], clock="forward", ranks=[one.rank for one in node.ranks], group=f"{node.folder.name}")
        node.write(1, "w")
        assert node.report() == ()
    united = job.united()
    assert [stream.ranks for stream in united.streams if stream.clock is StreamClock.FORWARD] == [(0, 1), (2, 3)]


def test_contents_that_are_damaged_or_do_not_come_end_nothing(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 3, 1)
    for node in job.nodes:
        node.write(1, "w", "x" if node is job.nodes[1] else "b")
    for member, node in enumerate(job.nodes[1:], 1):
        job.joint.hear(member, node.report(), 0)
    wanted = job.joint.word().wanted
    text = json.dumps(encode(job.nodes[1].kept(wanted))).replace('"table": 0', '"table": 9')
    job.joint.answered(1, decode(NodeStreams, json.loads(text)))
    assert not job.joint.compare(1), "the other is waited for"
    assert not job.joint.compare(ANSWER_LIMIT_S + 1)
    assert 1 in job.joint.unread
    assert job.joint.word().wanted == ()
    job.now_s = 100
    job.tell()
    assert job.news


def test_contents_are_asked_for_more_and_more_rarely(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, 2, 1, ["w", row("w", "g")])
    for number in range(1, 200):
        job.nodes[0].write(number, "w", "g")
        job.nodes[1].write(number, "v", "g")
        job.tell()
    assert len(job.asked) < 12


def test_what_is_kept_and_what_is_sent_have_limits() -> None:
    key = StreamKey(clock=StreamClock.STEP, group="0", members=(0, 1), model=1, optimizer=1)
    rows = RowsRead(()).read([row(f"layer{number}") for number in range(4000)])
    index = NodeIndex()
    for number in range(400):
        index.note(key, number, {0: Written(rows, number.to_bytes(4, "little") * 16_000, {})})
    (kept,) = index.streams.values()
    assert MAX_KEPT_BYTES * 0.9 < sum(len(one.seen[0].fingerprints) for one in kept.points) < MAX_KEPT_BYTES
    assert kept.since == kept.points[0].number - 1
    sent = pack_stream(kept, StreamSeen(key).stream(())).points
    assert [one.number for one in sent] == [one.number for one in kept.points][: len(sent)], "the oldest first"
    assert MAX_BATCH_BYTES * 0.9 < sum(len(one.sides[0].fingerprints) for one in sent) < MAX_BATCH_BYTES


def test_one_node_is_as_it_was(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, [0, 1], 2)
    node.write(1, "w", "b")
    found = node.save()
    assert unite_consistency(tmp_path, None, [], [found]) == found
    assert unite_consistency(tmp_path, None, [], [None]) is None
    assert node.report() == ()


def test_a_lone_rank_of_a_node_says_nothing_by_itself(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, [0], 2)
    node.write(1, "w", "b", random="r")
    stream = only_stream(node.save())
    assert (stream.compared, stream.ranks, stream.unpaired, stream.same_random) == (0, (), (0,), 0)


def test_a_root_is_small(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, range(8), 512)
    node.write(1, "w", "b", random="r")
    assert len(json.dumps(encode(node.report()[0]))) < 200


def test_a_stream_that_two_processes_write_as_one_rank_is_left_out(tmp_path: Path) -> None:
    node = FakeNode(tmp_path, [0], 2)
    node.write(1, "w", "b")
    twin = FakeRank(tmp_path / "prints", 0, range(2), pid=900).open(list(NAMES))
    twin.write(1, "w", "b")
    node.comparer.compare([node.ranks[0].process(), twin.process()])
    assert (node.report(), node.kept()) == ((), NodeStreams())
