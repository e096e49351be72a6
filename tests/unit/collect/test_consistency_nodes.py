"""What nodes found of their replicas is put together from run folders, whole or not."""

from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.collect.fingerprints.saved_nodes import JOINT, POINTS, read_points, unite_consistency
from ddpdoctor.collect.run.evidence import save
from ddpdoctor.model.consistency import Consistency, Difference, Stream, StreamClock, TensorRow, TensorSplit, What
from ddpdoctor.model.replica_records import NodeStreams, StreamKept
from ddpdoctor.model.run import attempt_name

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
