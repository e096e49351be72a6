"""Local gradients that are not finite: who is to blame, when it counts, and what is only a consequence."""

import pytest

from ddpdoctor.model.consistency import NonFinite, Origin
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules import build
from tests.rules.asking import asking

check_local_gradients = asking("nonfinite-grad")


def seen(step=5, **more):
    fields = {
        "model": 1, "group": "0", "tensors": ("2.weight", "0.weight"), "count": 2, "of": 6, "origin": Origin.GRADIENT,
        "is_nan": True, "scaled": False, "used": True, "times": 1, "where": build.line(30),
    }  # fmt: skip
    fields.update(more)
    return NonFinite(step=step, **fields)


def ruin(step=6, **more):
    """What the reduction brings a rank: its parameters hold NaN from then on."""
    return seen(step, origin=Origin.PARAMETER, note="0.weight was not finite before this backward", **more)


def judged(*by_rank, groups=None):
    world = len(by_rank)
    ranks = [
        build.ended(number, world, nonfinite=noted, groups=groups or (build.group(9, world),))
        for number, noted in enumerate(by_rank)
    ]
    return check_local_gradients(build.job(*ranks, ended=True)).findings


def only(*by_rank, **more):
    (finding,) = judged(*by_rank, **more)
    return finding


def test_the_rank_whose_own_gradients_were_first_is_to_blame():
    found = only((ruin(),), (seen(), ruin()), (ruin(),))
    assert (found.code, found.kind, found.severity) == ("DD504", "nonfinite-grad", Severity.ERROR)
    assert (found.ranks, found.step, found.tensor) == ((1,), 5, "2.weight")
    assert [(place.rank, place.line) for place in found.where] == [(1, 30)]
    assert found.confidence is Confidence.HIGH
    assert "the gradients of ranks 0 and 2 were finite in step 5, before the reduction" in found.evidence
    assert "the loss and the input were finite" in found.summary


@pytest.mark.parametrize(
    ("origin", "words"), [(Origin.INPUT, "its input was not finite"), (Origin.LOSS, "its loss was not finite")]
)
def test_what_was_first_is_said(origin, words):
    found = only((), (seen(origin=origin, note="argument 0 of forward holds NaN in 3 of 64 values"),))
    assert words in found.summary
    assert "3 of 64" in found.evidence[0]


def test_several_ranks_in_one_step_are_all_to_blame():
    assert only((seen(),), (seen(),), (ruin(),)).ranks == (0, 1)


def test_one_step_before_counts_although_its_rank_did_not_live_to_see_it_used():
    found = only((ruin(),), (seen(used=False),), (ruin(),))
    assert (found.severity, found.ranks, found.step) == (Severity.ERROR, (1,), 5)


def test_gradients_that_were_thrown_away_long_before_explain_nothing():
    found = only((seen(2, used=False), ruin()), (ruin(),))
    assert (found.ranks, found.step, found.confidence) == ((0, 1), 6, Confidence.MEDIUM)
    assert "no earlier local gradient had" in found.summary


def test_ranks_that_were_not_looked_at_are_named():
    assert "the gradients of rank 1 were not checked" in only((ruin(),), None).evidence


def test_gradients_that_no_step_used_are_a_note():
    found = only((), (seen(used=False), seen(9, used=False, times=2)))
    assert (found.severity, found.ranks, found.step) == (Severity.INFO, (1,), 5)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (seen(scaled=True, used=False, origin=Origin.INPUT), "the gradient scaler skipped the step"),
        (seen(40, scaled=True, used=False, in_a_row=20, times=21), "20 steps in a row up to step 40"),
    ],
)
def test_a_scaler_that_skips_what_no_scale_mends_is_a_warning(one, words):
    found = only((), (one,))
    assert (found.severity, found.ranks) == (Severity.WARNING, (1,))
    assert words in found.summary


def test_scaled_gradients_that_were_used_are_an_error():
    assert only((), (seen(scaled=True),)).severity is Severity.ERROR


def test_models_are_judged_by_themselves():
    found = judged((seen(3, model=2),), (seen(),))
    assert sorted((each.ranks, each.step) for each in found) == [((0,), 3), ((1,), 5)]


def test_groups_of_one_name_and_different_ranks_are_apart():
    pairs = [build.group(9, 4, "1", (0, 1)), build.group(9, 4, "1", (2, 3))]
    noted = [(), (seen(group="1"),), (seen(7, group="1"),), ()]
    ranks = [build.ended(n, 4, nonfinite=noted[n], groups=(pairs[n // 2],)) for n in range(4)]
    found = check_local_gradients(build.job(*ranks, ended=True)).findings
    assert sorted((each.ranks, each.step) for each in found) == [((1,), 5), ((2,), 7)]
    assert "the gradients of rank 0 were finite in step 5, before the reduction" in found[0].evidence


@pytest.mark.parametrize(("noted", "outcome"), [(None, Outcome.SKIPPED), ((), Outcome.PASSED)])
def test_nothing_passes_that_was_not_looked_at(noted, outcome):
    job = build.job(build.ended(0, 2, nonfinite=noted), build.ended(1, 2, nonfinite=noted))
    assert check_local_gradients(job).checks[0].outcome is outcome
