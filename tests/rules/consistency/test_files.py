"""Files that were compared: what is reported of them, and whom it concerns."""

import pytest

from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.saved import Apart, DiffFacts, Kind, SavedFile, Unequal
from tests.rules.build import judge_about

TWO = ((0,), (1,))
ODD = ((0, 2), (1,))


def file(number, rank=..., path=None, stripped=()):
    return SavedFile(
        path=path or f"/runs/ckpt_rank{number}.pt", rank=number if rank is ... else rank, size_bytes=100, tensors=3,
        values=2, stripped=stripped,
    )  # fmt: skip


def apart(file=1, against=0, **more):
    fields = {"differing": 2, "of": 12, "first": (1, 2), "largest": 0.5, "relative": 0.25, "not_finite": 0}
    fields.update(more)
    return Apart(file=file, against=against, **fields)


def unequal(kind=Kind.PARAMETER, name="model.fc.weight", sides=TWO, **more):
    fields = {"seen": ("float32[3, 4]",) * len(sides), "apart": tuple(apart(side[0]) for side in sides[1:])}
    fields.update(more)
    return Unequal(kind=kind, name=name, sides=sides, **fields)


def setting(name="optimizer.param_groups.0.lr", kind=Kind.SETTING, seen=("0.1", "0.2"), sides=TWO):
    return unequal(kind, name, sides, seen=seen, apart=())


def facts(*differences, files=2, incomparable=(), tensors=3):
    named = tuple(map(file, range(files))) if isinstance(files, int) else files
    return DiffFacts(files=named, tensors=tensors, values=2, unequal=differences, incomparable=incomparable)


def judge(*differences, **more):
    asked = judge_about("consistency", facts(*differences, **more))
    return list(asked.findings), asked.checks


def one(*differences, **more):
    findings, _ = judge(*differences, **more)
    assert len(findings) == 1
    return findings[0]


def outcomes(*differences, **more):
    return {check.code: check.outcome for check in judge(*differences, **more)[1]}


PASSED = {"DD501": Outcome.PASSED, "DD502": Outcome.PASSED, "DD505": Outcome.PASSED}


def test_equal_files_pass():
    assert judge()[0] == []
    assert outcomes() == PASSED


@pytest.mark.parametrize(
    ("kind", "code", "slug", "severity"),
    [
        (Kind.PARAMETER, "DD501", "param-drift", Severity.ERROR),
        (Kind.BUFFER, "DD502", "buffer-drift", Severity.WARNING),
        (Kind.STATE, "DD505", "optimizer-drift", Severity.ERROR),
    ],
)
def test_each_kind_has_its_code(kind, code, slug, severity):
    found = one(unequal(kind))
    assert (found.code, found.kind, found.severity, found.tensor) == (code, slug, severity, "fc.weight")
    assert outcomes(unequal(kind)) == {**PASSED, code: Outcome.FAILED}


def test_random_state_may_differ():
    assert judge(unequal(Kind.RANDOM, "rng_state"))[0] == []


def test_two_files_are_both_named_and_it_is_said_that_it_cannot_be_determined():
    found = one(unequal())
    assert found.ranks == (0, 1)
    assert found.confidence is Confidence.MEDIUM
    assert found.summary == "parameter model.fc.weight differs between ckpt_rank0.pt and ckpt_rank1.pt"
    assert any("it is unknown which" in line for line in found.evidence)
    assert found.evidence[0] == (
        "model.fc.weight: 2 of 12 elements differ, the first at [1, 2], by up to 0.5 (0.25 of the larger value)"
    )


def test_the_minority_of_three_is_named():
    found = one(unequal(sides=ODD), files=3)
    assert found.ranks == (1,)
    assert found.confidence is Confidence.HIGH
    assert found.summary == "parameter model.fc.weight differs in ckpt_rank1.pt from the other files"
    assert found.evidence[0].startswith("model.fc.weight: ckpt_rank1.pt against ckpt_rank0.pt: 2 of 12")
    assert not any("it is unknown which" in line for line in found.evidence)


def test_minorities_of_several_tensors_are_joined():
    found = one(unequal(sides=((0, 2, 3), (1,))), unequal(name="model.b", sides=((0, 1, 2), (3,))), files=4)
    assert found.ranks == (1, 3)
    assert found.summary == (
        "2 parameters differ in ckpt_rank1.pt and ckpt_rank3.pt from the other files, model.fc.weight first"
    )


def test_without_a_majority_for_one_tensor_all_are_named():
    assert one(unequal(sides=ODD), unequal(name="model.b", sides=((0,), (1,), (2,))), files=3).ranks == (0, 1, 2)


def test_a_tensor_that_one_file_does_not_have():
    found = one(unequal(sides=((0, 2),), absent_in=(1,)), files=3)
    assert found.ranks == (1,)
    assert found.evidence[0] == "model.fc.weight: missing in ckpt_rank1.pt"
    assert one(unequal(sides=((1,),), absent_in=(0, 2)), files=3).ranks == (1,)


def test_shapes_that_differ_are_reported():
    found = one(unequal(seen=("float32[3]", "float32[4]"), apart=()))
    assert found.evidence[0] == "model.fc.weight: float32[3] in ckpt_rank0.pt, float32[4] in ckpt_rank1.pt"


def test_what_is_not_finite_is_reported():
    found = one(unequal(apart=(apart(largest=None, relative=None, not_finite=2),)))
    assert found.evidence[0].endswith("the first at [1, 2], 2 of them inf or NaN")


def test_settings_are_reported_with_their_values():
    found = one(setting())
    assert (found.code, found.tensor) == ("DD505", None)
    assert found.summary.endswith(": 0.1 in ckpt_rank0.pt, 0.2 in ckpt_rank1.pt")


def test_state_and_settings_are_one_finding():
    found = one(unequal(Kind.STATE, "optimizer.state.0.exp_avg"), setting())
    assert found.summary.startswith("2 parts of the optimizer differ between")


def test_other_values_are_no_alarm_and_make_the_rest_less_sure():
    (found,) = judge(setting("epoch", Kind.VALUE, ("3", "4")))[0]
    assert (found.severity, found.evidence) == (Severity.INFO, ("epoch: 3 in ckpt_rank0.pt, 4 in ckpt_rank1.pt",))
    assert outcomes(setting("epoch", Kind.VALUE)) == PASSED
    drift = judge(unequal(sides=ODD), setting("epoch", Kind.VALUE, ("3", "4"), ODD), files=3)[0][0]
    assert drift.confidence is Confidence.MEDIUM
    assert any("may be from different times: epoch is 3" in line for line in drift.evidence)
    drift = judge(unequal(sides=ODD), setting("best_loss", Kind.VALUE, ("3", "4"), ODD), files=3)[0][0]
    assert drift.confidence is Confidence.HIGH


def test_ranks_are_left_out_where_names_do_not_tell_them():
    unnamed = tuple(file(i, rank=None, path=f"/runs/{i}/model.pt") for i in range(2))
    found = one(unequal(), files=unnamed)
    assert found.ranks == ()
    assert found.summary == "parameter model.fc.weight differs between /runs/0/model.pt and /runs/1/model.pt"
    twice = (file(0), file(1, rank=0, path="/other/ckpt_rank0.pt"))
    assert one(unequal(), files=twice).ranks == ()


def test_prefixes_of_some_files_are_reported():
    files = (file(0), file(1, stripped=("module.",)))
    assert "names were compared without the prefix module. in ckpt_rank1.pt" in one(unequal(), files=files).evidence
    both = tuple(file(i, stripped=("module.",)) for i in range(2))
    assert not any("names were compared" in line for line in one(unequal(), files=both).evidence)


def test_many_tensors_and_many_files_are_reported_shortly():
    everywhere = tuple((i,) for i in range(9))
    many = [unequal(name=f"model.{i}", sides=everywhere) for i in range(12)]
    found = one(*many, files=9)
    assert found.summary == "12 parameters differ between the files of ranks 0-8, model.0 first"
    assert "and 7 more" in found.evidence


def test_what_could_not_be_compared_has_not_passed():
    assert outcomes(incomparable=("q",))["DD501"] is Outcome.INCONCLUSIVE
    assert set(outcomes(tensors=0).values()) == {Outcome.SKIPPED}
