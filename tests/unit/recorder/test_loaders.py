"""What a rank notes of its loaders: loops of many kinds, run under the recorder and read back."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ddpdoctor.recorder
from ddpdoctor.collect.rank import read_loaders
from ddpdoctor.model.data import EpochSeen, LoaderSeen
from ddpdoctor.recorder.loaders import MAX_BYTES, MAX_PASSES
from ddpdoctor.recorder.storage.ring_reading import read_ring_file

pytestmark = pytest.mark.usefixtures("preloaded_python")

BOOTSTRAP = Path(ddpdoctor.recorder.__file__).parent / "bootstrap"
JOB = Path(__file__).parent / "loader_job.py"
CASES = (
    "plain", "persistent", "one_by_one", "lists_as_indices", "tensors_as_indices", "words_as_indices", "stream",
    "evaluated", "evaluated_with_gradients", "left_early", "evaluation_left_early", "made_again", "two_at_once",
    "divided_by_samplers", "divided_by_a_dataset", "divided_as_a_stream", "parts", "views",
    "split", "distributed", "in_a_sampler_of_batches", "constant", "failing", "many_passes", "very_many",
)  # fmt: skip


@dataclass
class Ran:
    """A job that has run: its loaders by the case that used them, and what the cases printed."""

    loaders: dict[str, list[LoaderSeen]]
    reported: dict[str, Any]
    noted_bytes: int
    defects: list[dict[str, Any]]

    def one(self, case: str) -> LoaderSeen:
        (loader,) = self.loaders[case]
        return loader

    def passes(self, case: str) -> tuple[EpochSeen, ...]:
        return self.one(case).epochs


def run(folder: Path, cases: tuple[str, ...], every: str) -> Ran:
    for name in ("rings", "evidence"):
        (folder / name).mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DDPDOCTOR_")}
    environment |= {"PYTHONPATH": str(BOOTSTRAP), "OMP_NUM_THREADS": "1", "RANK": "0"}
    environment |= {"DDPDOCTOR_RUN": str(folder), "DDPDOCTOR_CHECK_EVERY": every}
    command = [sys.executable, str(JOB), *cases]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr
    ring = next(path for path in (folder / "rings").iterdir() if path.name.startswith(f"{job.pid}-"))
    notes = list(read_ring_file(ring).notes)
    loaders: dict[str, list[LoaderSeen]] = {}
    for loader in read_loaders(notes, {}) or ():
        assert loader.site is not None
        loaders.setdefault(loader.site.function, []).append(loader)
    noted = [note for note in notes if note["k"] in ("loader", "pass")]
    return Ran(
        loaders=loaders,
        reported=json.loads(stdout),
        noted_bytes=sum(len(json.dumps(note, separators=(",", ":"))) for note in noted),
        defects=[note for note in notes if note["k"] == "defect"],
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("loaders"), CASES, "50")


def test_no_hook_fails(ran: Ran) -> None:
    assert ran.defects == []


@pytest.mark.parametrize("case", ["plain", "persistent"])
def test_each_pass_is_counted(ran: Ran, case: str) -> None:
    loader = ran.one(case)
    assert (loader.samples, loader.batch_size, loader.drop_last, loader.passes) == (20, 4, False, 2)
    assert (loader.indices_seen, loader.trained_batches) == (True, 10)
    for number, seen in enumerate(loader.epochs, 1):
        assert (seen.number, seen.batches, seen.drawn, seen.total, seen.xor) == (number, 5, 20, 190, 0)
        assert (seen.highest, seen.repeats, seen.backwards, seen.complete, seen.trained) == (19, 0, 5, True, True)
        assert len(seen.batch_digests) == 8
        assert len(seen.sample_digests) == 2 * 16
    assert loader.epochs[0].order == loader.epochs[1].order
    assert loader.epochs[0].sample_digests == loader.epochs[1].sample_digests


def test_the_same_data_have_the_same_digests_however_they_are_loaded(ran: Ran) -> None:
    plain, again = ran.passes("plain")[0], ran.passes("persistent")[0]
    assert (plain.order, plain.first) == (again.order, again.first)
    assert plain.batch_digests == again.batch_digests
    assert plain.sample_digests == again.sample_digests
    assert ran.one("plain").dataset_digest == ran.one("persistent").dataset_digest != ""


def test_a_part_of_a_dataset_is_distinguished_from_another_and_what_it_is_a_part_of_is_not(ran: Ran) -> None:
    one, again, other = ran.loaders["split"]
    assert one.part == again.part != other.part
    assert one.part_of == other.part_of == ran.one("plain").dataset_digest
    assert (ran.one("plain").part, ran.one("plain").part_of) == ("", "")


def test_a_sample_has_one_digest_in_whatever_order_it_comes(ran: Ran) -> None:
    forward, backward = ran.passes("plain")[0], ran.passes("tensors_as_indices")[0]
    assert (forward.total, forward.xor) == (backward.total, backward.xor)
    assert forward.order != backward.order
    assert sorted(forward.sample_digests) == sorted(backward.sample_digests)


@pytest.mark.parametrize("case", ["one_by_one", "lists_as_indices"])
def test_indices_are_seen_without_batching(ran: Ran, case: str) -> None:
    (seen,) = ran.passes(case)
    assert (seen.drawn, seen.total, seen.order) == (20, 190, ran.passes("plain")[0].order)


def test_words_are_counted_and_are_no_numbers_of_samples(ran: Ran) -> None:
    loader = ran.one("words_as_indices")
    assert (loader.samples, loader.epochs[0].drawn, loader.epochs[0].complete) == (None, 4, True)
    assert len(loader.epochs[0].batch_digests) == 4


def test_of_a_stream_batches_alone_are_seen(ran: Ran) -> None:
    loader = ran.one("stream")
    assert (loader.iterable, loader.indices_seen, loader.samples, loader.sampler) == (True, False, None, None)
    (seen,) = loader.epochs
    assert (seen.batches, seen.drawn, seen.complete, len(seen.batch_digests)) == (3, 0, True, 3)


@pytest.mark.parametrize("case", ["evaluated", "evaluated_with_gradients", "evaluation_left_early"])
def test_an_evaluation_is_not_trained_on(ran: Ran, case: str) -> None:
    assert [seen.backwards for seen in ran.passes(case)] == [0]


def test_a_pass_that_was_left_has_ended_and_is_not_complete(ran: Ran) -> None:
    assert [(seen.batches, seen.complete, seen.backwards) for seen in ran.passes("left_early")] == [(2, False, 2)] * 2
    again = ran.loaders["made_again"]
    assert [loader.number for loader in again] == list(range(again[0].number, again[0].number + 3))
    ends = [loader.epochs[-1].ended_ns for loader in again]
    assert all(end is not None for end in ends)
    assert all(end <= later.epochs[0].begun_ns for end, later in zip(ends, again[1:], strict=False) if end is not None)


def test_batches_that_are_taken_together_are_all_trained_on(ran: Ran) -> None:
    (seen,) = ran.passes("two_at_once")
    assert (seen.batches, seen.backwards, seen.complete) == (4, 4, True)


def test_the_sampler_is_described(ran: Ran) -> None:
    loader = ran.one("distributed")
    sampler = loader.sampler
    assert sampler is not None
    assert sampler.type == "torch.utils.data.distributed.DistributedSampler"
    assert (sampler.replicas, sampler.rank, sampler.seed, sampler.shuffle, sampler.drop_last) == (3, 1, 5, True, True)
    assert (sampler.standard, loader.epochs[0].set_epoch, loader.drop_last) == (True, 4, True)


def test_a_sampler_inside_a_sampler_of_batches_is_found(ran: Ran) -> None:
    loader = ran.one("in_a_sampler_of_batches")
    sampler = loader.sampler
    assert sampler is not None
    assert (sampler.replicas, sampler.rank, sampler.standard) == (2, 0, False)
    assert loader.batch_size == 5


def test_each_place_that_divides_the_data_is_described(ran: Ran) -> None:
    (outer, inner) = ran.one("divided_by_samplers").cuts
    assert (outer.what, outer.replicas, outer.rank, inner.what, inner.replicas) == ("sampler", 2, 1, "sampler", None)
    assert inner.type.endswith(".Turns")
    one, same, other = ran.loaders["divided_by_a_dataset"]
    assert [(cut.what, cut.replicas, cut.rank) for cut in other.cuts] == [("dataset", 2, 1)]
    assert one.held == same.held != other.held
    (stream,) = ran.one("divided_as_a_stream").cuts
    assert (stream.what, stream.replicas, stream.rank) == ("dataset", 2, 1)
    assert [len(ran.one(case).cuts) for case in ("plain", "stream", "distributed")] == [0, 0, 1]


def test_the_indices_of_a_part_are_added_up(ran: Ran) -> None:
    chosen = [loader.chosen for loader in ran.loaders["parts"] if loader.chosen is not None]
    found = [(one.of, one.count, one.total, one.xor, one.start, one.step) for one in chosen]
    assert found == [(20, 10, 100, 2, 1, 2), (20, 4, 12, 0, 0, 2), (20, 3, 6, 0, None, None)]


def test_a_part_of_a_tensor_s_rows_is_a_part_of_a_dataset(ran: Ran) -> None:
    one, other, *whole = ran.loaders["views"]
    assert one.chosen is not None
    assert other.chosen is not None
    assert (one.chosen.of, one.chosen.count, one.chosen.start, one.chosen.step) == (20, 10, 1, 2)
    assert (other.chosen.of, other.chosen.count, other.chosen.start, other.chosen.step) == (20, 10, 10, 1)
    assert one.part_of == other.part_of != ""
    assert [loader.chosen for loader in whole] == [None, None]


def test_a_leaf_that_is_the_same_all_over_shows_nothing(ran: Ran) -> None:
    assert ran.passes("constant")[0].batch_digests == ()


def test_an_error_reads_as_it_would_without_us(ran: Ran) -> None:
    assert not [file for file in ran.reported["failing"] if str(BOOTSTRAP.parent) in file]


def test_however_many_loaders_there_are_their_notes_are_bounded(ran: Ran) -> None:
    assert MAX_BYTES // 2 < ran.noted_bytes <= MAX_BYTES


def test_of_many_passes_the_first_and_the_last_are_noted(ran: Ran) -> None:
    loader = ran.one("many_passes")
    assert [seen.number for seen in loader.epochs] == [*range(1, MAX_PASSES + 1), 40]
    assert (loader.passes, loader.trained_batches) == (40, 40)


def test_nothing_is_noted_or_touched_where_consistency_is_off(ran: Ran, tmp_path: Path) -> None:
    off = run(tmp_path, ("words_as_indices",), "0")
    assert off.loaders == {}
    assert off.reported["words_as_indices"] == ran.reported["words_as_indices"]
