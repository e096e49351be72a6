"""What the watcher finds of replicas is saved, per attempt, and outlives the files of the ranks."""

import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import pytest

from ddpdoctor.collect.fingerprint_nodes import COMPARISON, read_consistency
from ddpdoctor.launch.replicas.comparing import LiveComparison
from ddpdoctor.launch.watching.progress import Followed
from ddpdoctor.model.consistency import Consistency
from ddpdoctor.model.run import Run, attempt_name
from ddpdoctor.recorder.storage import ring_layout
from tests.fingerprints import TICKS, FakeRank

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
