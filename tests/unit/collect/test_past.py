"""How far the starts of a job came, and where their run folders are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpdoctor.collect.rank.steps import read_first_step
from ddpdoctor.collect.run.past import _passes_of, find_runs
from ddpdoctor.model.data import EpochSeen, LoaderSeen
from ddpdoctor.model.history import PassSeen

S = 1_000_000_000


def content(kept, last, started_ns=5 * S) -> Any:
    """Make the part of a ring that is read: numbers and ends of steps, by column."""
    columns = [[list(column) for column in zip(*rows, strict=True)] for rows in (kept, last)]
    return SimpleNamespace(kept=columns[0], steps=columns[1], cells={"started_ns": started_ns})


@pytest.mark.parametrize(
    ("kept", "last", "first_ns"),
    [
        ([], [], None),
        ([], [(1, 9 * S), (2, 10 * S)], 9 * S),
        ([(1, 9 * S)], [(500, 900 * S)], 9 * S),
        ([(11, 30 * S)], [(21, 50 * S)], 10 * S),  # two seconds a step
        ([(11, 12 * S)], [(21, 32 * S)], 5 * S),  # not before it started
        ([], [(7, 9 * S)], 9 * S),
    ],
)
def test_the_first_step_is_known_or_inferred_from_the_pace(kept, last, first_ns):
    assert read_first_step(content(kept, last)) == first_ns


def seen(number, epoch, batches=4, *, trained=True):
    return EpochSeen(
        number=number, set_epoch=epoch, batches=batches, drawn=16, total=0, xor=0, order="", first="", complete=True,
        trained=trained, backwards=batches,
    )  # fmt: skip


def loader(*epochs, trained_batches=0):
    return LoaderSeen(
        number=1, site=None, dataset="", dataset_digest="", samples=64, batch_size=4, drop_last=False, iterable=False,
        workers=0, indices_seen=True, sampler=None, epochs=epochs, passes=len(epochs),
        trained_batches=trained_batches or sum(one.batches for one in epochs),
    )  # fmt: skip


def test_passes_have_their_epochs_and_steps():
    passes = (PassSeen(epoch=2, steps=4), PassSeen(epoch=3, steps=4))
    assert _passes_of(loader(seen(1, 2), seen(2, 3)), 8) == (passes, 2)


def test_a_step_may_take_several_batches():
    assert _passes_of(loader(seen(1, 0), seen(2, 1)), 2)[0] == (PassSeen(epoch=0, steps=1), PassSeen(epoch=1, steps=1))


def test_of_many_passes_those_before_a_gap_are_left_out_but_for_the_first_epoch():
    many = loader(seen(1, 0), seen(2, 1), seen(9, 8), seen(10, 9), trained_batches=40)
    assert _passes_of(many, 40) == ((PassSeen(epoch=8, steps=4), PassSeen(epoch=9, steps=4)), 0)


def test_a_script_that_sets_no_epoch_has_none():
    assert _passes_of(loader(seen(1, 0), seen(2, 0)), 8)[1] is None


def make(folder: Path, mark: str = "run.json", text: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / mark).write_text(text)
    return folder


def test_run_folders_are_found_below_a_folder_but_not_their_parts(tmp_path):
    wanted = [make(tmp_path / name) for name in ("a", "a/restart-1", "b/c")]
    reported = make(tmp_path / "d", "report.json")
    for part in ("a/dumps/1", "a/nodes/1", "a/gathered/1"):
        make(tmp_path / part, "report.json")
    make(tmp_path / "1/2/3/4")
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)
    assert find_runs(tmp_path) == [*wanted, reported]
    assert find_runs(wanted[0]) == wanted[:2]


def test_of_several_members_the_first_counts_and_without_it_the_others(tmp_path):
    first = make(tmp_path / "train", text='{"node_rank": 0}')
    second = make(tmp_path / "train-node-1", text='{"node_rank": 1}')
    assert find_runs(tmp_path) == [first]
    (first / "run.json").unlink()
    assert find_runs(tmp_path) == [second]
