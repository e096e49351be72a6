"""What a rank notes of its loaders: loops of many kinds, run under the recorder and read back."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpdoctor.collect.recorded import read_loaders
from ddpdoctor.model.data import LoaderSeen
from ddpdoctor.recorder.loaders import MAX_BYTES, MAX_PASSES
from ddpdoctor.recorder.storage.ring_reading import read_ring_file
from tests.golden import Cases
from tests.scenarios.harmless.alone import RECORDER, make_folder
from tests.scenarios.running import clean_environment

pytestmark = pytest.mark.usefixtures("preloaded_python")

GOLDEN = Cases(__name__)
JOB = Path(__file__).parent / "loader_job.py"
CASES = (
    "plain", "persistent", "one_by_one", "lists_as_indices", "tensors_as_indices", "words_as_indices", "stream",
    "evaluated", "evaluated_with_gradients", "left_early", "evaluation_left_early", "made_again", "two_at_once",
    "divided_by_samplers", "divided_by_a_dataset", "divided_as_a_stream", "parts", "views",
    "split", "distributed", "in_a_sampler_of_batches", "constant", "failing", "many_passes", "very_many",
)  # fmt: skip


def run(folder, cases, every):
    """Return a job that has run: its loaders by the case that used them, and what the cases printed."""
    environment = clean_environment(
        PYTHONPATH=str(RECORDER / "bootstrap"), RANK="0", DDPDOCTOR_RUN=str(make_folder(folder)),
        DDPDOCTOR_CHECK_EVERY=every,
    )  # fmt: skip
    command = [sys.executable, str(JOB), *cases]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        stdout, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr
    ring = next(path for path in (folder / "rings").iterdir() if path.name.startswith(f"{job.pid}-"))
    notes, reported = list(read_ring_file(ring).notes), json.loads(stdout)
    loaders: dict[str, list[LoaderSeen]] = {}
    for loader in read_loaders(notes, {}) or ():
        assert loader.site.function in {"over", "two_at_once", "failing", "held"}
        began_ns = loader.epochs[0].begun_ns if loader.epochs else time.monotonic_ns()
        case = [name for name, (case_ns, _) in reported.items() if case_ns <= began_ns][-1]
        loaders.setdefault(case, []).append(loader)
    noted = [note for note in notes if note["k"] in ("loader", "pass")]
    return SimpleNamespace(
        loaders=loaders,
        reported={name: what for name, (_, what) in reported.items()},
        noted_bytes=sum(len(json.dumps(note, separators=(",", ":"))) for note in noted),
        defects=[note for note in notes if note["k"] == "defect"],
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(tmp_path_factory.mktemp("loaders"), CASES, "50")


SHUFFLED = ("split", "distributed")


def letters():
    """Return a function that gives equal digests equal letters, in the order in which they come."""
    seen = {}
    return lambda digest: seen.setdefault(digest, f"D{len(seen)}") if digest else ""


def test_each_case_notes_what_its_loop_took(ran):
    """Digests are those of one torch: which of them are equal, within a case and to other cases, is what counts."""
    assert ran.defects == []
    letter, told = letters(), {}
    hidden = {"total": 0, "xor": 0, "highest": 0}  # where torch's own order of a shuffle would show
    for case, loaders in ran.loaders.items():
        if case == "very_many":
            continue
        told[case] = []
        for one in loaders:
            passes = [
                replace(
                    seen, **(hidden if case in SHUFFLED else {}), begun_ns=0, ended_ns=seen.ended_ns and 1,
                    order=letter(seen.order), first=letter(seen.first),
                    batch_digests=tuple(map(letter, seen.batch_digests)),
                    sample_digests=tuple(letter(seen.sample_digests[at : at + 16])
                                         for at in range(0, len(seen.sample_digests), 16)),
                )
                for seen in one.epochs[: 2 if case == "many_passes" else None]
            ]  # fmt: skip
            told[case] += [
                replace(
                    one, number=0, site=None, chosen=None if case in SHUFFLED else one.chosen, epochs=tuple(passes),
                    dataset_digest=letter(one.dataset_digest),
                    part=letter(one.part), part_of=letter(one.part_of), held=letter(one.held),
                )
            ]  # fmt: skip
    GOLDEN.check("what_each_case_notes", told)


def test_loaders_that_are_made_again_are_others_and_each_has_ended_before_the_next_begins(ran):
    again = ran.loaders["made_again"]
    assert [loader.number for loader in again] == list(range(again[0].number, again[0].number + 3))
    ends = [loader.epochs[-1].ended_ns for loader in again]
    assert all(end <= later.epochs[0].begun_ns for end, later in zip(ends, again[1:], strict=False))


def test_an_error_reads_as_it_would_without_us(ran):
    assert not [file for file in ran.reported["failing"] if str(RECORDER) in file]


def test_notes_are_bounded_however_many_loaders_and_passes_there_are(ran):
    assert MAX_BYTES // 2 < ran.noted_bytes <= MAX_BYTES
    (loader,) = ran.loaders["many_passes"]
    assert [seen.number for seen in loader.epochs] == [*range(1, MAX_PASSES + 1), 40]
    assert (loader.passes, loader.trained_batches) == (40, 40)


def test_a_pass_has_ended_with_its_loader_though_its_iterator_is_held(tmp_path):
    (first, *_) = run(tmp_path, ("held",), "50").loaders["held"]
    assert (first.epochs[0].batches, first.epochs[0].complete, first.epochs[0].ended_ns is None) == (1, False, False)


def test_nothing_is_noted_or_touched_where_consistency_is_off(ran, tmp_path):
    off = run(tmp_path, ("words_as_indices",), "0")
    assert off.loaders == {}
    assert off.reported["words_as_indices"] == ran.reported["words_as_indices"]
