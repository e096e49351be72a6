"""What ranks wrote of their replicas is compared point by point, also damaged, and over several nodes."""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

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
from ddpdoctor.collect.run_files import save
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
from ddpdoctor.model.facts import attempt_name
from ddpdoctor.recorder.storage import fingerprint_file
from tests.fingerprints import TICKS, FakeRank, only_stream, row, write_job

# What nodes found of their replicas is put together from run folders, whole or not.


STREAM = Stream(
    clock=StreamClock.STEP, group="0", model=1, optimizer=1, ranks=(0, 1), compared=4, last_number=4, unchanged=3
)  # fmt: skip


def difference(number: int, *sides: tuple[int, ...]) -> Difference:
    split = TensorSplit(row=TensorRow(what=What.PARAMETER, name="w"), sides=sides)
    return Difference(
        what=What.PARAMETER, number=number, last_equal=number - 1, splits=(split,), differing=1, of=1
    )  # fmt: skip


def kept(found: Stream) -> NodeStreams:
    one = StreamKept(
        name="s", clock=found.clock, group="0", members=(0, 1, 2, 3), model=1, optimizer=1, tables=(), points=(),
        found=found,
    )  # fmt: skip
    return NodeStreams(streams=(one,))


def node(folder: Path, found: Stream) -> Consistency:
    folder.mkdir()
    save(folder / attempt_name(POINTS), kept(found))
    return Consistency(check_every=50, streams=(found,))


def test_what_a_node_found_by_itself_stands_where_nodes_could_not_be_compared(tmp_path: Path) -> None:
    alone = replace(STREAM, ranks=(2, 3), differences=(difference(3, (2,), (3,)),))
    found = [node(tmp_path / "a", STREAM), node(tmp_path / "b", alone)]
    united = unite_consistency(tmp_path / "a", None, [(tmp_path / "b", None)], found)
    assert united is not None
    numbers = {one.number for stream in united.streams for one in stream.differences}
    assert numbers == {3}


def test_the_view_of_all_nodes_goes_before_that_of_one(tmp_path: Path) -> None:
    alone = replace(STREAM, ranks=(2, 3), differences=(difference(3, (2,), (3,)),))
    found = [node(tmp_path / "a", STREAM), node(tmp_path / "b", alone)]
    whole = replace(STREAM, ranks=(0, 1, 2, 3), differences=(difference(3, (0, 1, 2), (3,)),))
    save(tmp_path / "a" / attempt_name(JOINT), kept(whole))
    united = unite_consistency(tmp_path / "a", None, [(tmp_path / "b", None)], found)
    assert united is not None
    (stream,) = united.streams
    (one,) = stream.differences
    assert (one.splits[0].sides, stream.ranks, stream.compared, stream.unchanged) == (
        ((0, 1, 2), (3,)),
        (0, 1, 2, 3),
        4,
        3,
    )


def test_the_first_node_knows_of_all_before_their_records_have_come(tmp_path: Path) -> None:
    own = node(tmp_path / "a", STREAM)
    whole = replace(STREAM, ranks=(0, 1, 2, 3), differences=(difference(3, (0, 1), (2, 3)),))
    save(tmp_path / "a" / attempt_name(JOINT), kept(whole))
    united = unite_consistency(tmp_path / "a", None, [], [own])
    assert united is not None
    assert united.streams[0].differences[0].splits[0].sides == ((0, 1), (2, 3))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"streams": [{}]}', '{"streams": 5}', "[" * 100_000])
def test_a_damaged_file_is_one_without_points(tmp_path: Path, text: str) -> None:
    found = [node(tmp_path / "a", STREAM), node(tmp_path / "b", replace(STREAM, ranks=(2, 3)))]
    (tmp_path / "b" / attempt_name(POINTS)).write_text(text)
    assert read_points(tmp_path / "b" / attempt_name(POINTS)) == NodeStreams()
    united = unite_consistency(tmp_path / "a", None, [(tmp_path / "b", None)], found)
    assert united is not None
    assert {rank for stream in united.streams for rank in stream.ranks} == {0, 1, 2, 3}


def test_a_run_that_compared_nothing_has_nothing(tmp_path: Path) -> None:
    found = [Consistency(check_every=0), Consistency(check_every=0)]
    assert unite_consistency(tmp_path, None, [(tmp_path, None)], found) == Consistency(check_every=0)


# What ranks wrote of their replicas is compared point by point, by name, and never the latest with the latest.


def compare(folder: Path, ranks: Sequence[FakeRank], allowed: tuple[str, ...] = ()) -> Consistency:
    comparer = Comparer(folder, check_every=50, allowed=allowed)
    comparer.compare([rank.process() for rank in ranks])
    return comparer.close()


def test_equal_replicas_have_no_difference(tmp_path: Path) -> None:
    ranks = write_job(tmp_path, {n: [(n, "w")] * 3 for n in (1, 2, 4, 50)}, ["a", "b"])
    stream = only_stream(compare(tmp_path, ranks))
    assert (stream.clock, stream.group, stream.model, stream.optimizer) == (StreamClock.STEP, "0", 1, 1)
    assert (stream.ranks, stream.compared, stream.last_number, stream.unpaired) == ((0, 1, 2), 4, 50, ())
    assert (stream.differences, stream.kinds) == ((), (What.PARAMETER,))
    assert [number for number, _ in stream.values] == [1, 50]


def test_the_first_difference_is_kept_with_its_sides_and_the_last_good_point(tmp_path: Path) -> None:
    points = {1: [("w", "b")] * 4, 2: [("w", "b")] * 4, 4: [("w", "b"), ("w", "c"), ("w", "b"), ("w", "b")]}
    points |= {8: [("w", "b"), ("v", "c"), ("w", "b"), ("w", "b")]}
    stream = only_stream(compare(tmp_path, write_job(tmp_path, points, ["weight", "bias"])))
    (difference,) = stream.differences
    assert (difference.what, difference.number, difference.last_equal) == (What.PARAMETER, 4, 2)
    assert (difference.differing, difference.of) == (1, 2)
    (split,) = difference.splits
    assert (split.row.name, split.sides, split.absent_on) == ("bias", ((0, 2, 3), (1,)), ())
    assert [number for number, _ in stream.values] == [1, 2, 4, 8]
    assert [values.rank for values in dict(stream.values)[4]] == [0, 1, 2, 3]


def test_kinds_are_distinguished(tmp_path: Path) -> None:
    names = [row("w", "g"), row("w"), row("w", "s", "exp_avg"), row("mean", "b")]
    points = {1: [("g", "p", "s", "m")] * 2, 2: [("g", "p", "s", "m"), ("g", "p", "t", "n")]}
    points |= {4: [("g", "p", "s", "m"), ("g", "q", "t", "n")]}
    stream = only_stream(compare(tmp_path, write_job(tmp_path, points, names)))
    assert set(stream.kinds) == set(What)
    assert {d.what: (d.number, d.last_equal) for d in stream.differences} == {
        What.STATE: (2, 1),
        What.BUFFER: (2, 1),
        What.PARAMETER: (4, 2),
    }
    state = next(d for d in stream.differences if d.what is What.STATE)
    assert (state.splits[0].row.name, state.splits[0].row.part) == ("w", "exp_avg")


def test_a_gradient_that_is_none_on_one_rank_is_absent_there(tmp_path: Path) -> None:
    names = [row("a", "g"), row("b", "g")]
    ranks = write_job(tmp_path, {1: [("g", None), ("g", None)], 2: [("g", None), (None, None)]}, names)
    (difference,) = only_stream(compare(tmp_path, ranks)).differences
    assert (difference.number, difference.last_equal, difference.differing, difference.of) == (2, 1, 1, 1)
    assert (difference.splits[0].sides, difference.splits[0].absent_on) == (((0,), (1,)), (1,))


@pytest.mark.parametrize("seen", [("a", None, "a"), ("a", None, "b"), (None, None, "a")])
def test_a_constant_that_a_rank_lacks_is_no_difference(seen: tuple[str | None, ...], tmp_path: Path) -> None:
    names = [row("freq", "b", "float32[4]")]
    stream = only_stream(compare(tmp_path, write_job(tmp_path, {2: [(one,) for one in seen]}, names)))
    assert (stream.compared, stream.differences) == (1, ())


def test_constants_of_other_shapes_do_not_differ_and_others_do(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)) for rank in (0, 1)]
    for rank in ranks:
        rank.open([row("table", "b", f"float32[{rank.rank}]", (rank.rank,)), row("freq", "b", "float32[4]")])
        rank.write(2, "t", f"f{rank.rank}")
    (difference,) = only_stream(compare(tmp_path, ranks)).differences
    assert [split.row.name for split in difference.splits] == ["freq"]


def test_what_no_rank_has_was_not_compared(tmp_path: Path) -> None:
    ranks = write_job(tmp_path, {1: [("p", None)] * 2}, ["w", row("w", "g")])
    assert only_stream(compare(tmp_path, ranks)).kinds == (What.PARAMETER,)


def test_rows_are_matched_by_name_and_not_by_position(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, 0, (0, 1)).open(["a", "b"]), FakeRank(tmp_path, 1, (0, 1)).open(["b", "a"])]
    ranks[0].write(1, "A", "B")
    ranks[1].write(1, "B", "A")
    ranks[0].write(2, "A", "B")
    ranks[1].write(2, "A", "B")
    (difference,) = only_stream(compare(tmp_path, ranks)).differences
    assert (difference.number, difference.last_equal, difference.differing) == (2, 1, 2)
    assert [split.row.name for split in difference.splits] == ["a", "b"]


def test_a_submodule_that_one_rank_has_added_is_absent_on_the_others(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(3)).open(["a", "b"]) for rank in range(3)]
    for rank in ranks:
        rank.write(1, "A", "B")
    ranks[1].open(["a", "extra", "b"])
    ranks[1].write(2, "A", "E", "B")
    for rank in (ranks[0], ranks[2]):
        rank.write(2, "A", "B")
    stream = only_stream(compare(tmp_path, ranks))
    (difference,) = stream.differences
    assert (difference.number, difference.last_equal, difference.differing, difference.of) == (2, 1, 1, 3)
    assert difference.splits[0].row.name == "extra"
    assert (difference.splits[0].sides, difference.splits[0].absent_on) == (((0, 2), (1,)), (0, 2))


@pytest.mark.parametrize("other", [row("w", shape=(2, 2)), row("w", dtype="int32")])
def test_equal_bytes_of_another_shape_or_dtype_differ(tmp_path: Path, other: list[object]) -> None:
    ranks = [FakeRank(tmp_path, 0, (0, 1)).open(["w"]), FakeRank(tmp_path, 1, (0, 1)).open([other])]
    for rank in ranks:
        rank.write(1, "same")
    assert only_stream(compare(tmp_path, ranks)).differences[0].splits[0].sides == ((0,), (1,))


def test_equal_numbers_are_compared_and_not_the_latest(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)).open(["w"]) for rank in range(2)]
    for number in (1, 2, 4):
        ranks[0].write(number, f"w{number}")
    for number in (1, 2):
        ranks[1].write(number, f"w{number}")
    stream = only_stream(compare(tmp_path, ranks))
    assert (stream.compared, stream.last_number, stream.differences) == (2, 2, ())


def test_a_rank_that_never_steps_is_unpaired_and_the_others_are_compared(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(3)) for rank in range(3)]
    for rank in ranks:
        rank.open(["w"], clock="sync", optimizer=0)
        rank.write(1, "w")
    for rank in ranks[:2]:
        rank.open(["w"])
        for number in range(1, 30):
            rank.write(number, number)
    comparer = Comparer(tmp_path, check_every=1)
    for _ in range(3):
        comparer.compare([rank.process() for rank in ranks])
    streams = {stream.clock: stream for stream in comparer.consistency().streams}
    assert (streams[StreamClock.STEP].ranks, streams[StreamClock.STEP].unpaired) == ((0, 1), (2,))
    assert streams[StreamClock.STEP].compared > MAX_AHEAD, "while the third lives, it is not waited for without end"
    assert {stream.clock: stream.compared for stream in comparer.close().streams}[StreamClock.STEP] == 29


def test_a_rank_that_wrote_alone_is_unpaired(tmp_path: Path) -> None:
    rank = FakeRank(tmp_path, 0, (0, 8)).open(["w"])
    rank.write(1, "w")
    stream = only_stream(compare(tmp_path, [rank]))
    assert (stream.compared, stream.last_number, stream.ranks, stream.unpaired) == (0, None, (), (0,))


def test_ranks_of_one_group_that_live_elsewhere_are_not_waited_for(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(4)).open(["w"]) for rank in range(2)]
    for rank in ranks:
        rank.write(1, rank.rank)
    comparer = Comparer(tmp_path, check_every=50)
    assert comparer.compare([rank.process() for rank in ranks])
    assert only_stream(comparer.consistency()).unpaired == ()


def test_a_late_rank_is_waited_for_while_it_lives(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(3)).open(["w"]) for rank in range(3)]
    comparer = Comparer(tmp_path, check_every=50)
    writers = [rank.process() for rank in ranks]
    ranks[0].write(1, "w")
    ranks[1].write(1, "v")
    assert not comparer.compare(writers)
    ranks[2].write(1, "w")
    assert comparer.compare(writers)
    assert not comparer.compare(writers), "a difference is reported once"
    assert only_stream(comparer.consistency()).differences[0].splits[0].sides == ((0, 2), (1,))


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(3)).open(["w"]) for rank in range(3)]
    ranks[0].write(1, "w")
    ranks[1].write(1, "v")
    comparer = Comparer(tmp_path, check_every=50)
    assert comparer.compare([ranks[0].process(), ranks[1].process(), ranks[2].process(ended_ns=5)])


def test_a_rank_that_has_not_made_its_file_yet_is_waited_for(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, range(3)) for rank in range(3)]
    for rank in ranks[:2]:
        rank.open(["w"]).write(1, rank.rank)
    comparer = Comparer(tmp_path, check_every=50)
    assert not comparer.compare([rank.process() for rank in ranks])
    ranks[2].open(["w"]).write(1, 1)
    assert comparer.compare([rank.process() for rank in ranks])
    assert only_stream(comparer.consistency()).differences[0].splits[0].sides == ((1, 2), (0,))


def test_groups_models_and_optimizers_are_compared_each_by_itself(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1) if rank < 2 else (2, 3)) for rank in range(4)]
    for rank in ranks:
        for model, optimizer in ((1, 1), (2, 1), (2, 2)):
            rank.open(["w"], model=model, optimizer=optimizer).write(1, f"{rank.rank // 2} {model} {optimizer}")
    found = compare(tmp_path, ranks)
    assert len(found.streams) == 6
    assert all(stream.compared == 1 and not stream.differences for stream in found.streams)


def test_rows_that_come_with_a_new_file_go_on_with_the_stream(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)).open(["w"]) for rank in range(2)]
    for rank in ranks:
        rank.write(1, "w1")
        rank.open(["w", row("w", "s", "exp_avg")])
        rank.write(2, "w2", "s" if rank.rank else "t")
    stream = only_stream(compare(tmp_path, ranks))
    assert stream.compared == 2
    assert [(d.what, d.number, d.last_equal) for d in stream.differences] == [(What.STATE, 2, None)]


def test_names_that_may_differ_are_left_out(tmp_path: Path) -> None:
    points = {1: [("w", "x"), ("w", "y")], 2: [("w", "x"), ("v", "y")]}
    stream = only_stream(compare(tmp_path, write_job(tmp_path, points, ["w", "experts.0.w"]), allowed=("experts.*",)))
    (difference,) = stream.differences
    assert (difference.number, difference.last_equal, difference.of) == (2, 1, 1)


def test_all_that_waits_in_full_files_is_compared_at_the_end(tmp_path: Path) -> None:
    points = {number: [(number,), (number,)] for number in range(1, 400)}
    stream = only_stream(compare(tmp_path, write_job(tmp_path, points, ["w"])))
    assert (stream.compared, stream.last_number) == (128, 399)


def test_little_is_kept_of_a_long_job(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)).open(["w"]) for rank in range(2)]
    comparer = Comparer(tmp_path, check_every=1)
    for number in range(1, 1001):
        for rank in ranks:
            rank.write(number, number)
        if number % 20 == 0:
            assert not comparer.compare([rank.process() for rank in ranks])
    stream = only_stream(comparer.close())
    assert (stream.compared, len(stream.values), stream.unchanged) == (1000, 2, 0)


def test_parameters_that_no_longer_change_are_counted(tmp_path: Path) -> None:
    points = {1: [("a",)] * 2, 2: [("b",)] * 2, 4: [("b",)] * 2, 8: [("b",)] * 2}
    assert only_stream(compare(tmp_path, write_job(tmp_path, points, ["w"]))).unchanged == 2
    points |= {16: [("b",), ("c",)]}
    assert only_stream(compare(tmp_path, write_job(tmp_path, points, ["w"]))).unchanged == 0


def test_equal_random_states_are_counted(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)).open(["w"]) for rank in range(2)]
    for rank in ranks:
        rank.write(1, "w", random="same")
        rank.write(2, "w", random=f"own {rank.rank}")
        rank.write(4, "w")
    assert only_stream(compare(tmp_path, ranks)).same_random == 1


def test_values_are_those_that_a_rank_wrote(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1)).open(["w"]) for rank in range(2)]
    site = {"f": "/home/me/train.py", "l": 12, "n": "main", "u": 1}
    text = {"settings": [["lr", "0.1"]], "optimizer": "SGD", "scale": 2.0, "dropout": True, "unreduced": ["x.w"]}
    for rank in ranks:
        rank.write(3, "w", reductions=9, unreduced_forwards=2, stray=1, hook="fp16", site=site, **text)
    values = only_stream(compare(tmp_path, ranks)).values[0][1][1]
    assert (values.rank, values.steps, values.reductions, values.unreduced_forwards) == (1, 3, 9, 2)
    assert (values.settings, values.optimizer, values.scale) == ((("lr", "0.1"),), "SGD", 2.0)
    assert (values.dropout, values.unreduced, values.stray, values.hook) == (True, ("x.w",), 1, "fp16")
    assert values.site is not None
    assert (values.site.file, values.site.line) == ("/home/me/train.py", 12)


def test_ranks_of_a_job_that_ended_before_are_not_compared_with_those_of_the_next(tmp_path: Path) -> None:
    first = [FakeRank(tmp_path, rank, (0, 1), pid=100 + rank).open(["w"]) for rank in range(2)]
    second = [FakeRank(tmp_path, rank, (0, 1), pid=200 + rank).open(["w"]) for rank in range(2)]
    for rank in first:
        rank.write(1, "of the first job")
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process(began_ns=1) for rank in first])
    for rank in second:
        rank.write(1, "of the second")
    writers = [rank.process(began_ns=1, ended_ns=2) for rank in first] + [r.process(began_ns=3) for r in second]
    comparer.compare(writers)
    stream = only_stream(comparer.close())
    assert (stream.compared, stream.differences) == (1, ())


def test_two_jobs_at_a_time_under_one_launcher_are_not_mixed(tmp_path: Path) -> None:
    ranks = [FakeRank(tmp_path, rank, (0, 1), pid=pid).open(["w"]) for pid, rank in enumerate((0, 1, 0, 1), 100)]
    for rank in ranks:
        rank.write(1, rank.pid // 102)
    found = compare(tmp_path, ranks)
    assert found.streams == ()
    assert any("several processes" in reason for reason in found.unread)


def test_files_of_processes_that_do_not_count_are_left_alone(tmp_path: Path) -> None:
    ranks = write_job(tmp_path, {1: [("w",), ("v",), ("w",)]}, ["w"])
    stream = only_stream(compare(tmp_path, [ranks[0], ranks[2]]))
    assert (stream.ranks, stream.differences) == ((0, 2), ())


def test_what_the_largest_rank_wrote_is_counted(tmp_path: Path) -> None:
    ranks = write_job(tmp_path, {1: [("w",)] * 2}, ["w"])
    once = compare(tmp_path, ranks).bytes_written
    ranks[1].write(2, "w")
    assert compare(tmp_path, ranks).bytes_written - once == 2048 + 16 - 32
    assert once > 2000


def test_files_are_removed_when_asked_to(tmp_path: Path) -> None:
    ranks = write_job(tmp_path, {1: [("w",)] * 2}, ["w"])
    (tmp_path / "999-1-0.prints").write_bytes(b"of another")
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    comparer.remove_files()
    assert [path.name for path in tmp_path.iterdir()] == ["999-1-0.prints"]
    assert only_stream(comparer.close()).compared == 1


def test_what_was_found_can_be_saved_and_read_again(tmp_path: Path) -> None:
    found = compare(tmp_path, write_job(tmp_path, {1: [("w",)] * 2, 2: [("w",), ("v",)]}, ["w"]), allowed=("x",))
    assert decode(Consistency, encode(found)) == found


# Files of fingerprints that are damaged, cut short, of another version, or made up: left out, with a reason.


def write_three(folder: Path) -> list[FakeRank]:
    ranks = [FakeRank(folder, rank, range(3)).open(["w", row("w", "g")]) for rank in range(3)]
    for number in (1, 2):
        for rank in ranks:
            rank.write(number, "w", "g", random="r", settings=[["lr", "1"]])
    return ranks


def compare_fingerprints_damaged(folder: Path, ranks: list[FakeRank]) -> Consistency:
    comparer = Comparer(folder, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    return comparer.close()


def cut(data: bytes) -> bytes:
    return data[:-100]


def cut_to_nothing(_data: bytes) -> bytes:
    return b""


def cut_in_table(data: bytes) -> bytes:
    return data[: fingerprint_file.HEADER_SIZE + 5]


def other_version(data: bytes) -> bytes:
    return data[:8] + struct.pack("<I", 99) + data[12:]


def identity(**changes: int) -> Callable[[bytes], bytes]:
    names = ("magic", "version", "rows", "table", "slots_at", "size", "slots", "pid", "ticks")

    def change(data: bytes) -> bytes:
        values = dict(zip(names, fingerprint_file.IDENTITY.unpack_from(data), strict=True)) | changes
        return fingerprint_file.IDENTITY.pack(*values.values()) + data[fingerprint_file.IDENTITY.size :]

    return change


def table(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        magic, version, rows, size, slots_at, *rest = fingerprint_file.IDENTITY.unpack_from(data)
        start = fingerprint_file.HEADER_SIZE
        made = zlib.compress(json.dumps(json.loads(zlib.decompress(data[start : start + size])) | changes).encode())
        moved = start + len(made)
        head = fingerprint_file.IDENTITY.pack(magic, version, rows, len(made), moved, *rest)
        return head + data[len(head) : start] + made + data[slots_at:]

    return change


BROKEN = {
    "cut": cut,
    "empty": cut_to_nothing,
    "cut in its table": cut_in_table,
    "of another version": other_version,
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
def test_a_broken_file_is_left_out_with_a_reason_and_the_others_are_compared(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    path.write_bytes(change(path.read_bytes()))
    found = compare_fingerprints_damaged(tmp_path, ranks)
    (stream,) = found.streams
    assert (stream.ranks, stream.compared, stream.differences) == ((0, 2), 2, ())
    (reason,) = found.unread
    assert reason.startswith(path.name)


def test_a_file_that_its_rank_is_making_is_read_once_it_is_there(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    path.write_bytes(whole)
    comparer.compare([rank.process() for rank in ranks])
    found = comparer.close()
    assert (found.streams[0].ranks, found.unread) == ((0, 1, 2), ())


def test_a_file_that_is_gone_while_it_is_read_is_reported(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    comparer = Comparer(tmp_path, check_every=50)
    comparer.compare([rank.process() for rank in ranks])
    (tmp_path / f"101-{TICKS}-0.prints").unlink()
    ranks[0].write(4, "w", "g")
    ranks[2].write(4, "w", "g")
    found = comparer.close()
    assert found.streams[0].compared == 3
    assert len(found.unread) == 1


@pytest.mark.parametrize(
    "text",
    [
        {"random": ["a"], "settings": 3, "site": [], "unreduced": "x", "steps": "many", "scale": 10**400},
        {"settings": [1, ["lr"], ["a", ["b"]]], "scale": "big", "dropout": 7, "site": {"f": 1, "l": "x"}},
        {"settings": {"lr": 1}, "scale": float("inf"), "hook": 1, "join": [], "optimizer": {}},
    ],
)
def test_texts_of_another_form_take_their_defaults(tmp_path: Path, text: dict[str, Any]) -> None:
    ranks = write_three(tmp_path)
    for rank in ranks:
        rank.write(4, "w", "g", **text)
    found = compare_fingerprints_damaged(tmp_path, ranks)
    assert found.streams[0].compared == 3
    assert json.dumps(encode(found))


def test_a_text_that_is_nested_without_end_is_left_out(tmp_path: Path) -> None:
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    data = path.read_bytes()
    at = data.index(b'{"steps"')
    path.write_bytes(data[:at] + b"[" * fingerprint_file.TEXT_SIZE + data[at + fingerprint_file.TEXT_SIZE :])
    assert compare_fingerprints_damaged(tmp_path, ranks).streams[0].compared == 2


def test_no_flipped_byte_raises(tmp_path: Path) -> None:
    random = Random(0)
    ranks = write_three(tmp_path)
    path = tmp_path / f"101-{TICKS}-0.prints"
    whole = path.read_bytes()
    used = whole.rindex(b"g") + 1
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.choice((1, 4, 64))):
            data[random.randrange(used)] = random.randrange(256)
        path.write_bytes(data)
        json.dumps(encode(compare_fingerprints_damaged(tmp_path, ranks)))


# Replicas on several nodes: roots are held against each other, contents only where those differ.


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
