"""What ranks wrote of their replicas is compared point by point, also damaged, and over several nodes."""

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from ddpdoctor.collect.fingerprint_compare import MAX_AHEAD, Comparer, StreamSeen
from ddpdoctor.collect.fingerprint_files import (
    MAX_BATCH_BYTES,
    MAX_KEPT_BYTES,
    NodeIndex,
    RowsRead,
    Written,
    pack_stream,
)
from ddpdoctor.collect.fingerprint_nodes import ANSWER_LIMIT_S, JOINT, POINTS, Joint, read_points, unite_consistency
from ddpdoctor.collect.run_files import attempt_name, save
from ddpdoctor.model.codec import decode, encode
from ddpdoctor.model.consistency import (
    Consistency,
    Difference,
    NodeStreams,
    Stream,
    StreamClock,
    StreamKept,
    StreamKey,
    StreamRoot,
    TensorRow,
    TensorSplit,
    What,
)
from ddpdoctor.recorder.storage import fingerprint_file
from tests.fingerprints import TICKS, FakeRank, only_stream, row, write_job
from tests.golden import Cases, outline, table

CASES = Cases(__name__)
test_kept = CASES.test()

# What nodes found of their replicas is put together from run folders, whole or not.


STREAM = Stream(
    clock=StreamClock.STEP, group="0", model=1, optimizer=1, ranks=(0, 1), compared=4, last_number=4, unchanged=3
)  # fmt: skip


def difference(number, *sides):
    split = TensorSplit(row=TensorRow(what=What.PARAMETER, name="w"), sides=sides)
    return Difference(
        what=What.PARAMETER, number=number, last_equal=number - 1, splits=(split,), differing=1, of=1
    )  # fmt: skip


def kept(found):
    one = StreamKept(
        name="s", clock=found.clock, group="0", members=(0, 1, 2, 3), model=1, optimizer=1, tables=(), points=(),
        found=found,
    )  # fmt: skip
    return NodeStreams(streams=(one,))


def node(folder, found):
    folder.mkdir()
    save(folder / attempt_name(POINTS), kept(found))
    return Consistency(check_every=50, streams=(found,))


@CASES
def what_nodes_found_is_united(tmp_path):
    """The view of all nodes goes before that of one, also before their records have come."""
    alone = replace(STREAM, ranks=(2, 3), differences=(difference(3, (2,), (3,)),))
    whole = replace(STREAM, ranks=(0, 1, 2, 3), differences=(difference(3, (0, 1, 2), (3,)),))
    found = [node(tmp_path / "a", STREAM), node(tmp_path / "b", alone)]
    own, others = tmp_path / "a", [(tmp_path / "b", None)]
    by_themselves = unite_consistency(own, None, others, found)
    save(own / attempt_name(JOINT), kept(whole))
    compared = unite_consistency(own, None, others, found)
    nothing = [Consistency(check_every=0)] * 2
    assert unite_consistency(tmp_path, None, [(tmp_path, None)], nothing) == nothing[0]
    return {
        "not compared": told(by_themselves), "compared": told(compared),
        "before the others' records": told(unite_consistency(own, None, [], found[:1])),
    }  # fmt: skip


def test_a_damaged_file_is_one_without_points(tmp_path):
    found = [node(tmp_path / "a", STREAM), node(tmp_path / "b", replace(STREAM, ranks=(2, 3)))]
    for text in ("", "{", "[]", '{"streams": [{}]}', '{"streams": 5}', "[" * 100_000):
        (tmp_path / "b" / attempt_name(POINTS)).write_text(text)
        assert read_points(tmp_path / "b" / attempt_name(POINTS)) == NodeStreams()
        united = unite_consistency(tmp_path / "a", None, [(tmp_path / "b", None)], found)
        assert {rank for stream in united.streams for rank in stream.ranks} == {0, 1, 2, 3}


# What ranks wrote of their replicas is compared point by point, by name, and never the latest with the latest.


def compare(folder, ranks, allowed=()):
    comparer = Comparer(folder, check_every=50, allowed=allowed)
    comparer.compare([rank.process() for rank in ranks])
    return comparer.close()


def told(found):
    """Return what was found, with whose values are known in place of the values."""
    shown = []
    for stream in found.streams if isinstance(found, Consistency) else [found]:
        known = ", ".join(f"{number} of ranks {[one.rank for one in those]}" for number, those in stream.values)
        shown += [outline(replace(stream, values=())) + f"\n  values: {known}"]
    return "\n".join([*shown, *(f"unread: {reason}" for reason in getattr(found, "unread", ()))])


GEAR = [row("w", "g"), row("w"), row("w", "s", "exp_avg"), row("mean", "b")]
CONSTANT = [row("freq", "b", "float32[4]")]


def job(points, names):
    """Return what is found of ranks that write alike, by the numbers of points and what each rank has there."""
    with TemporaryDirectory() as folder:
        return told(compare(Path(folder), write_job(Path(folder), points, names)))


test_rows = table("replicas", globals())


def ranks_of(folder, count, names=("w",), **more):
    return [FakeRank(folder, rank, range(count), **more).open(list(names)) for rank in range(count)]


def processes(ranks, **more):
    return [rank.process(**more) for rank in ranks]


@CASES
def rows_are_matched_by_name_shape_and_dtype(tmp_path):
    def of(name, *tables):
        return [
            FakeRank(tmp_path / name, rank, range(len(tables))).open(list(one)) for rank, one in enumerate(tables)
        ], name

    shapes, _ = of("shapes", *([row("table", "b", f"float32[{n}]", (n,)), *CONSTANT] for n in (0, 1)))
    for rank in shapes:
        rank.write(2, "t", f"f{rank.rank}")
    swapped, _ = of("swapped", ["a", "b"], ["b", "a"])
    for number, other in ((1, "BA"), (2, "AB")):
        swapped[0].write(number, "A", "B")
        swapped[1].write(number, *other)
    added = ranks_of(tmp_path / "added", 3, "ab")
    for rank in added:
        rank.write(1, "A", "B")
    added[1].open(["a", "extra", "b"]).write(2, "A", "E", "B")
    for rank in (added[0], added[2]):
        rank.write(2, "A", "B")
    later = ranks_of(tmp_path / "later", 2)
    for rank in later:
        rank.write(1, "w1")
        rank.open(["w", row("w", "s", "exp_avg")]).write(2, "w2", "s" if rank.rank else "t")
    like = [
        of(f"other {n}", ["w"], [one])[0] for n, one in enumerate((row("w", shape=(2, 2)), row("w", dtype="int32")))
    ]
    for rank in [*like[0], *like[1]]:
        rank.write(1, "same")
    jobs = {"other shapes": shapes, "other order": swapped, "one has a submodule more": added, "rows come later": later}
    jobs |= {"equal bytes of another shape": like[0], "equal bytes of another dtype": like[1]}
    return {name: told(compare(ranks[0].folder, ranks)) for name, ranks in jobs.items()}


@CASES
def who_wrote_alone_is_unpaired_and_who_lives_elsewhere_or_does_not_count_is_not_waited_for(tmp_path):
    alone = FakeRank(tmp_path / "alone", 0, (0, 8)).open(["w"])
    alone.write(1, "w")
    elsewhere = ranks_of(tmp_path / "elsewhere", 4)[:2]
    for rank in elsewhere:
        rank.write(1, rank.rank)
    comparer = Comparer(tmp_path / "elsewhere", check_every=50)
    assert comparer.compare(processes(elsewhere))
    some = write_job(tmp_path / "some", {1: [("w",), ("v",), ("w",)]}, ["w"])
    return {
        "alone": told(compare(alone.folder, [alone])), "elsewhere": told(comparer.consistency()),
        "processes that do not count": told(compare(tmp_path / "some", [some[0], some[2]])),
    }  # fmt: skip


def test_a_rank_that_never_steps_is_unpaired_and_the_others_are_compared(tmp_path):
    ranks = [FakeRank(tmp_path, rank, range(3)).open(["w"], clock="sync", optimizer=0) for rank in range(3)]
    for rank in ranks:
        rank.write(1, "w")
    for rank in ranks[:2]:
        rank.open(["w"])
        for number in range(1, 30):
            rank.write(number, number)
    comparer = Comparer(tmp_path, check_every=1)
    for _ in range(3):
        comparer.compare(processes(ranks))
    streams = {stream.clock: stream for stream in comparer.consistency().streams}
    assert (streams[StreamClock.STEP].ranks, streams[StreamClock.STEP].unpaired) == ((0, 1), (2,))
    assert streams[StreamClock.STEP].compared > MAX_AHEAD, "while the third lives, it is not waited for without end"
    assert {stream.clock: stream.compared for stream in comparer.close().streams}[StreamClock.STEP] == 29


def test_a_late_rank_is_waited_for_while_it_lives_also_for_its_file(tmp_path):
    ranks = [FakeRank(tmp_path, rank, range(3)) for rank in range(3)]
    comparer = Comparer(tmp_path, check_every=50)
    for rank in ranks[:2]:
        rank.open(["w"]).write(1, rank.rank)
    assert not comparer.compare(processes(ranks))
    assert Comparer(tmp_path, check_every=50).compare([*processes(ranks[:2]), ranks[2].process(ended_ns=5)])
    ranks[2].open(["w"])
    assert not comparer.compare(processes(ranks))
    ranks[2].write(1, 1)
    assert comparer.compare(processes(ranks))
    assert not comparer.compare(processes(ranks)), "a difference is reported once"
    assert only_stream(comparer.consistency()).differences[0].splits[0].sides == ((1, 2), (0,))


@CASES
def what_is_compared_by_itself(tmp_path):
    """Groups, models and optimizers; equal numbers, and not the latest; jobs one after the other or at a time."""
    apart = [FakeRank(tmp_path / "apart", rank, (0, 1) if rank < 2 else (2, 3)) for rank in range(4)]
    for rank in apart:
        for model, optimizer in ((1, 1), (2, 1), (2, 2)):
            rank.open(["w"], model=model, optimizer=optimizer).write(1, f"{rank.rank // 2} {model} {optimizer}")
    unlike = ranks_of(tmp_path / "unlike", 2)
    for rank, numbers in zip(unlike, ((1, 2, 4), (1, 2)), strict=True):
        for number in numbers:
            rank.write(number, f"w{number}")
    pids = ((100, 0), (101, 1), (200, 0), (201, 1))
    twice = [FakeRank(tmp_path / "at a time", rank, (0, 1), pid=pid).open(["w"]) for pid, rank in pids]
    later = [FakeRank(tmp_path / "one after the other", rank, (0, 1), pid=pid).open(["w"]) for pid, rank in pids]
    comparer = Comparer(later[0].folder, check_every=50)
    for number, rank in enumerate([*twice, *later]):
        rank.write(1, f"of job {rank.pid // 100}")
        if number == 5:
            comparer.compare(processes(later[:2], began_ns=1))
    comparer.compare([*processes(later[:2], began_ns=1, ended_ns=2), *processes(later[2:], began_ns=3)])
    found = {
        name: compare(ranks[0].folder, ranks)
        for name, ranks in (("apart", apart), ("unlike", unlike), ("at a time", twice))
    }
    return {name: told(one) for name, one in (*found.items(), ("one after the other", comparer.close()))}


@CASES
def names_that_may_differ_are_left_out(tmp_path):
    points = {1: [("w", "x"), ("w", "y")], 2: [("w", "x"), ("v", "y")]}
    found = compare(tmp_path, write_job(tmp_path, points, ["w", "experts.0.w"]), allowed=("experts.*",))
    assert decode(Consistency, encode(found)) == found
    return told(found)


def test_little_is_kept_of_a_long_job(tmp_path):
    ranks = ranks_of(tmp_path, 2)
    comparer = Comparer(tmp_path, check_every=1)
    for number in range(1, 1001):
        for rank in ranks:
            rank.write(number, number)
        if number % 20 == 0:
            assert not comparer.compare(processes(ranks))
    stream = only_stream(comparer.close())
    assert (stream.compared, len(stream.values), stream.unchanged) == (1000, 2, 0)


@CASES
def values_are_those_that_a_rank_wrote_and_equal_random_states_are_counted(tmp_path):
    ranks = ranks_of(tmp_path, 2)
    site = {"f": "/home/me/train.py", "l": 12, "n": "main", "u": 1}
    text = {"settings": [["lr", "0.1"]], "optimizer": "SGD", "scale": 2.0, "dropout": True, "unreduced": ["x.w"]}
    for rank in ranks:
        rank.write(3, "w", reductions=9, unreduced_forwards=2, stray=1, hook="fp16", site=site, **text)
        rank.write(4, "w", random="same")
        rank.write(5, "w", random=f"own {rank.rank}")
    found = only_stream(compare(tmp_path, ranks))
    return found.same_random, found.values[0][1][1]


def test_what_the_largest_rank_wrote_is_counted_and_files_are_removed_when_asked_to(tmp_path):
    ranks = write_job(tmp_path, {1: [("w",)] * 2}, ["w"])
    once = compare(tmp_path, ranks).bytes_written
    ranks[1].write(2, "w")
    assert compare(tmp_path, ranks).bytes_written - once == 2048 + 16 - 32
    assert once > 2000
    (tmp_path / "999-1-0.prints").write_bytes(b"of another")
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare(processes(ranks))
    comparer.remove_files()
    assert [path.name for path in tmp_path.iterdir()] == ["999-1-0.prints"]
    assert only_stream(comparer.close()).compared == 1


# Files of fingerprints that are damaged, cut short, of another version, or made up: left out, with a reason.


def write_three(folder):
    ranks = [FakeRank(folder, rank, range(3)).open(["w", row("w", "g")]) for rank in range(3)]
    for number in (1, 2):
        for rank in ranks:
            rank.write(number, "w", "g", random="r", settings=[["lr", "1"]])
    return ranks, folder / f"101-{TICKS}-0.prints"


def identity(**changes):
    names = ("magic", "version", "rows", "table", "slots_at", "size", "slots", "pid", "ticks")

    def change(data):
        values = dict(zip(names, fingerprint_file.IDENTITY.unpack_from(data), strict=True)) | changes
        return fingerprint_file.IDENTITY.pack(*values.values()) + data[fingerprint_file.IDENTITY.size :]

    return change


def table(**changes):
    def change(data):
        magic, version, rows, size, slots_at, *rest = fingerprint_file.IDENTITY.unpack_from(data)
        start = fingerprint_file.HEADER_SIZE
        made = zlib.compress(json.dumps(json.loads(zlib.decompress(data[start : start + size])) | changes).encode())
        moved = start + len(made)
        head = fingerprint_file.IDENTITY.pack(magic, version, rows, len(made), moved, *rest)
        return head + data[len(head) : start] + made + data[slots_at:]

    return change


BROKEN = {
    "cut": lambda data: data[:-100],
    "empty": lambda _data: b"",
    "cut in its table": lambda data: data[: fingerprint_file.HEADER_SIZE + 5],
    "of another version": lambda data: data[:8] + struct.pack("<I", 99) + data[12:],
    "endless slots": identity(slots=2**63),
    "no slots": identity(slots=0),
    "endless table": identity(table=2**64 - 1),
    "rows that are not there": identity(rows=2**31),
    "unknown clock": table(clock="sundial"),
    "clock that cannot be looked up": table(clock=["step"]),
    "rank as text": table(rank="1"),
    "rank out of its group": table(rank=7),
    "no ranks": table(ranks=None),
    "rows of another form": table(rows=[["p"], ["g"]]),
    "rows of unknown kind": table(rows=[["z", "w", "", [1], "f"], ["p", "w", "", [1], "f"]]),
    "shapes that are none": table(rows=[["p", "w", "", ["x"], "f"], ["g", "w", "", 3, "f"]]),
    "rows that are no list": table(rows={"p": 1}),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_left_out_with_a_reason_and_the_others_are_compared(tmp_path, change):
    ranks, path = write_three(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    found = compare(tmp_path, ranks)
    (stream,) = found.streams
    assert (stream.ranks, stream.compared, stream.differences) == ((0, 2), 2, ())
    (reason,) = found.unread
    assert reason.startswith(path.name)


def test_a_file_that_its_rank_is_making_is_read_once_it_is_there_and_one_that_is_gone_is_reported(tmp_path):
    ranks, path = write_three(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare(processes(ranks))
    path.write_bytes(whole)
    comparer.compare(processes(ranks))
    found = comparer.consistency()
    assert (found.streams[0].ranks, found.unread) == ((0, 1, 2), ())
    path.unlink()
    for rank in (ranks[0], ranks[2]):
        rank.write(4, "w", "g")
    found = comparer.close()
    assert (found.streams[0].compared, len(found.unread)) == (3, 1)


OTHER_FORMS = (
    {"random": ["a"], "settings": 3, "site": [], "unreduced": "x", "steps": "many", "scale": 10**400},
    {"settings": [1, ["lr"], ["a", ["b"]]], "scale": "big", "dropout": 7, "site": {"f": 1, "l": "x"}},
    {"settings": {"lr": 1}, "scale": float("inf"), "hook": 1, "join": [], "optimizer": {}},
)


def test_texts_of_another_form_take_their_defaults_and_one_that_is_nested_without_end_is_left_out(tmp_path):
    for number, text in enumerate(OTHER_FORMS):
        ranks, _ = write_three(tmp_path / str(number))
        for rank in ranks:
            rank.write(4, "w", "g", **text)
        found = compare(tmp_path / str(number), ranks)
        assert found.streams[0].compared == 3
        assert json.dumps(encode(found))
    ranks, path = write_three(tmp_path / "nested")
    data = path.read_bytes()
    at = data.index(b'{"steps"')
    path.write_bytes(data[:at] + b"[" * fingerprint_file.TEXT_SIZE + data[at + fingerprint_file.TEXT_SIZE :])
    assert compare(tmp_path / "nested", ranks).streams[0].compared == 2


def test_no_flipped_byte_raises(tmp_path):
    random = Random(0)
    ranks, path = write_three(tmp_path)
    whole = path.read_bytes()
    used = whole.rindex(b"g") + 1
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.choice((1, 4, 64))):
            data[random.randrange(used)] = random.randrange(256)
        path.write_bytes(data)
        json.dumps(encode(compare(tmp_path, ranks)))


# Replicas on several nodes: roots are held against each other, contents only where those differ.


NAMES = ("w", "b")


class FakeNode:
    """A node whose ranks write fingerprints, and what it keeps of them for the others."""

    def __init__(self, folder, ranks, world, names=NAMES):
        self.folder = folder
        self.ranks = [FakeRank(folder / "prints", rank, range(world)).open(list(names)) for rank in ranks]
        self.index = NodeIndex()
        self.comparer = Comparer(folder / "prints", check_every=1, index=self.index)

    def write(self, number, *contents, **text):
        for rank in self.ranks:
            rank.write(number, *contents, **text)
        self.look()

    def look(self):
        self.comparer.compare([rank.process() for rank in self.ranks])

    def report(self):
        return tuple(decode(StreamRoot, json.loads(json.dumps(encode(one)))) for one in self.index.report())

    def kept(self, names=None):
        packed = [
            pack_stream(one, self.comparer.found_here(one.key))
            for one in self.index.shared()
            if names is None or one.name in names
        ]
        return decode(NodeStreams, json.loads(json.dumps(encode(NodeStreams(streams=tuple(packed))))))

    def save(self, joint=None):
        found = self.comparer.close()
        save(self.folder / attempt_name(POINTS), self.kept())
        if joint is not None:
            save(self.folder / attempt_name(JOINT), joint.found())
        return found


class FakeJob:
    """Nodes of equally many ranks, and the first one's view of all."""

    def __init__(self, folder, nodes, each, names=NAMES):
        world = nodes * each
        self.nodes = [FakeNode(folder / f"n{n}", range(n * each, n * each + each), world, names) for n in range(nodes)]
        self.joint = Joint(self.nodes[0].index, ())
        self.now_s = 0.0
        self.asked: list[int] = []
        self.news = False

    def write(self, number, *contents, **text):
        for node in self.nodes:
            node.write(number, *contents, **text)

    def tell(self):
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

    def united(self, joint=None):
        found = [node.save(joint if number == 0 else None) for number, node in enumerate(self.nodes)]
        folders = [(node.folder, None) for node in self.nodes[1:]]
        united = unite_consistency(self.nodes[0].folder, None, folders, found)
        assert united is not None
        return united


@CASES
def nodes_with_equal_replicas_exchange_roots_only(tmp_path):
    told_of = []
    for each in (1, 2):
        job = FakeJob(tmp_path / str(each), 3, each)
        for number in range(1, 30):
            job.write(number, f"w{number}", "b")
            if number % 4 == 0:
                job.tell()
        assert job.asked == []
        told_of += [told(job.united(job.joint))]
    return told_of


@CASES
def a_difference_between_nodes_is_found_with_its_tensor_ranks_and_step(tmp_path):
    job = FakeJob(tmp_path, 3, 2)
    job.write(1, "w", "b")
    job.tell()
    job.write(2, "w", "b")
    for number in (3, 4):
        for node in job.nodes:
            node.write(number, "w", "other" if node is job.nodes[2] else "b")
    job.tell()
    assert (job.news, job.asked) == (True, [1, 2])
    return told(job.joint.found().streams[0].found), told(job.united(job.joint))


@CASES
def ranks_of_two_nodes_are_held_against_all(tmp_path):
    """With its own node alone one that differs would be one against one."""
    told_of = {}
    for name, differs in {"one rank": lambda rank: rank == 3, "one on each node": lambda rank: rank % 2}.items():
        job = FakeJob(tmp_path / name, 2, 2)
        for number in (1, 2):
            for node in job.nodes:
                for rank in node.ranks:
                    rank.write(number, "w", "other" if number == 2 and differs(rank.rank) else "b")
                node.look()
            job.tell()
        told_of[name] = told(job.united(job.joint))
    return told_of


@CASES
def what_was_never_reported_is_compared_from_the_files_after_what_was(tmp_path):
    told_of = []
    for reported in ((), (1, 2)):
        job = FakeJob(tmp_path / str(len(reported)), 2, 1)
        for number in reported or (1,):
            job.write(number, "w", "b")
            if reported:
                job.tell()
        job.nodes[0].write(4, "w", "b")
        job.nodes[1].write(4, "w", "x")
        told_of += [told(job.united(job.joint) if reported else job.united())]
    return told_of


@CASES
def kinds_that_part_later_are_found_later(tmp_path):
    job = FakeJob(tmp_path, 2, 1, [row("w", "g"), row("w")])
    for number, gradient, parameter in ((1, "g", "p"), (2, "g", "q"), (3, "g", "q"), (4, "h", "q")):
        job.nodes[0].write(number, "g", "p")
        job.nodes[1].write(number, gradient, parameter)
        job.now_s += 1000
        job.tell()
    return told(job.united(job.joint))


@CASES
def a_node_that_is_ahead_is_not_held_against_the_latest_and_points_that_one_lacks_are_left_out(tmp_path):
    told_of = {}
    for name, own, tells in (("it is ahead", (1, 2, 3), 2), ("the other lacks a point", (1, 2, 4, 5), 1)):
        job = FakeJob(tmp_path / name, 2, 1)
        for number in range(1, 6):
            job.nodes[1].write(number, number, number)
        if tells == 2:
            job.tell()
        for number in own:
            job.nodes[0].write(number, number, number)
        job.tell()
        told_of[f"{name}, asked {job.asked}"] = told(job.united(job.joint))
    return told_of


def test_random_states_are_the_same_only_where_they_are_on_all_nodes(tmp_path):
    for seeds, same in (("rr", 3), ("rs", 0)):
        job = FakeJob(tmp_path / seeds, 2, 2)
        for number in (1, 2, 3):
            for node, seed in zip(job.nodes, seeds, strict=True):
                node.write(number, "w", "b", random=seed)
            job.tell()
        stream = only_stream(job.united(job.joint))
        assert (stream.compared, stream.same_random) == (3, same)


def test_streams_of_one_node_alone_are_not_reported_and_stay(tmp_path):
    job = FakeJob(tmp_path, 2, 2)
    for node in job.nodes:
        for rank in node.ranks:
            rank.open(["w"], clock="forward", ranks=[one.rank for one in node.ranks], group=f"{node.folder.name}")
        node.write(1, "w")
        assert node.report() == ()
    united = job.united()
    assert [stream.ranks for stream in united.streams if stream.clock is StreamClock.FORWARD] == [(0, 1), (2, 3)]


def test_contents_that_are_damaged_or_do_not_come_end_nothing(tmp_path):
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


def test_contents_are_asked_for_more_and_more_rarely(tmp_path):
    job = FakeJob(tmp_path, 2, 1, ["w", row("w", "g")])
    for number in range(1, 200):
        job.nodes[0].write(number, "w", "g")
        job.nodes[1].write(number, "v", "g")
        job.tell()
    assert len(job.asked) < 12


def test_what_is_kept_and_what_is_sent_have_limits():
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


def test_one_node_is_as_it_was_and_a_lone_rank_of_it_says_nothing_by_itself(tmp_path):
    node = FakeNode(tmp_path / "one", [0, 1], 2)
    node.write(1, "w", "b")
    found = node.save()
    assert unite_consistency(tmp_path / "one", None, [], [found]) == found
    assert unite_consistency(tmp_path / "one", None, [], [None]) is None
    assert node.report() == ()
    lone = FakeNode(tmp_path / "lone", [0], 2)
    lone.write(1, "w", "b", random="r")
    stream = only_stream(lone.save())
    assert (stream.compared, stream.ranks, stream.unpaired, stream.same_random) == (0, (), (0,), 0)


def test_a_root_is_small_and_a_stream_that_two_processes_write_as_one_rank_is_left_out(tmp_path):
    node = FakeNode(tmp_path / "small", range(8), 512)
    node.write(1, "w", "b", random="r")
    assert len(json.dumps(encode(node.report()[0]))) < 200
    node = FakeNode(tmp_path, [0], 2)
    node.write(1, "w", "b")
    twin = FakeRank(tmp_path / "prints", 0, range(2), pid=900).open(list(NAMES))
    twin.write(1, "w", "b")
    node.comparer.compare([node.ranks[0].process(), twin.process()])
    assert (node.report(), node.kept()) == ((), NodeStreams())
