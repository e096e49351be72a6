"""Gradients that differ after the reduction: who is to blame, when it was seen, and the likely cause."""

from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from tests.rules.asking import judge_about

from .build import PASSED, against, apart, codes, difference, everywhere, job, judged, outcome, stream, verdict

FIRST = difference(What.GRADIENT, 1, None)
LATER = difference(What.GRADIENT, 50, 32)
CAUSES = {
    "bypassed DDP": (FIRST, {"forwards": 0, "reductions": 0}, (0, 1), "bypassed DDP"),
    "past DDP at one step only": (LATER, {"forwards": 0, "reductions": 49}, (0, 1), "bypassed DDP"),
    "step inside no_sync": (
        FIRST,
        {"forwards": 4, "unreduced_forwards": 4, "reductions": 0},
        (0, 1),
        "under no_sync()",
    ),
    "no_sync for the last batch": (LATER, {"forwards": 4, "unreduced_forwards": 3}, (0, 1), "after the last reduction"),
    "added after wrapping": (FIRST, {"unreduced": ("0.weight", "head.bias")}, (0, 1), "added, replaced or unfrozen"),
    "a hook of the script's": (FIRST, {"hook": "noop_hook"}, (0, 1), "communication hook noop_hook"),
    "a hook of torch's": (FIRST, {"hook": "fp16_compress_hook"}, (0, 1), "after DDP had reduced them"),
    "edited": (LATER, {}, (0, 1), "after DDP had reduced them"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name):
    first, more, ranks, words = CAUSES[name]
    found = verdict(stream(first, now=everywhere(2, first.number, **more)))
    assert (found.code, found.kind, found.severity, found.ranks) == ("DD503", "grad-drift", Severity.ERROR, ranks)
    assert (found.step, found.tensor) == (first.number, "0.weight")
    assert words in found.summary
    assert found.fix


def test_ranks_that_were_seen_to_do_it_are_named_without_a_vote():
    """Where a gradient is zero on two of three ranks, a majority means nothing."""
    first = difference(What.GRADIENT, 1, None, sides=against(2))
    found = verdict(stream(first, ranks=3, now=everywhere(3, 1, forwards=0, reductions=0)), ranks=3)
    assert (found.ranks, found.confidence) == ((0, 1, 2), Confidence.HIGH)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_minority_has_edited_its_gradients(odd):
    found = verdict(stream(difference(What.GRADIENT, sides=against(odd)), ranks=3), ranks=3)
    assert (found.ranks, found.confidence) == ((odd,), Confidence.HIGH)
    assert f"rank {odd} changed them" in found.summary
    assert [(place.rank, place.line) for place in found.where] == [(odd, 30)]
    assert any("equal at step 32" in sentence for sentence in found.evidence)


def test_scalers_that_have_parted_are_reported_with_their_scales():
    now = everywhere(3, 50, scale=1024.0, odd={1: {"scale": 512.0}})
    found = verdict(stream(difference(What.GRADIENT, sides=against(1)), ranks=3, now=now), ranks=3)
    assert (found.code, found.ranks) == ("DD503", (1,))
    assert "scale is 1024.0 on ranks 0 and 2, 512.0 on rank 1" in found.summary
    same = everywhere(3, 50, scale=1024.0)
    found = verdict(stream(difference(What.GRADIENT, sides=against(1)), ranks=3, now=same), ranks=3)
    assert "scaler's" not in found.summary


def test_of_two_it_cannot_be_determined_which():
    found = verdict(stream(LATER))
    assert (found.ranks, found.confidence) == ((0, 1), Confidence.LOW)
    assert any("it is unknown which" in sentence for sentence in found.evidence)


@pytest.mark.parametrize("sides", [((0, 1), (2, 3)), ((0, 1), (2,), (3,)), apart(4)])
def test_without_a_majority_all_are_named(sides):
    found = verdict(stream(difference(What.GRADIENT, sides=sides), ranks=4), ranks=4)
    assert (found.ranks, found.confidence) == ((0, 1, 2, 3), Confidence.LOW)


def test_an_unfrozen_parameter_of_one_rank_blames_that_rank():
    first = difference(What.GRADIENT, 8, 4, sides=((0,), (1,)), absent_on=(0,))
    now = everywhere(2, 8, odd={1: {"unreduced": ("0.weight",)}})
    found = verdict(stream(first, now=now))
    assert (found.ranks, found.confidence) == ((1,), Confidence.HIGH)
    assert any("none on rank 0" in sentence for sentence in found.evidence)


def test_an_unreduced_parameter_is_no_cause_where_another_differs_first():
    first = difference(What.GRADIENT, sides=against(1), names=("0.weight", "head.bias"))
    found = verdict(stream(first, ranks=3, now=everywhere(3, 50, unreduced=("head.bias",))), ranks=3)
    assert "rank 1 changed them" in found.summary


def test_a_replaced_parameter_that_ddp_waits_for_keeps_its_whole_bucket_from_being_reduced():
    first = difference(What.GRADIENT, 1, None, names=("0.weight", "head.bias"), sides=apart(3))
    found = verdict(stream(first, ranks=3, now=everywhere(3, 1, unreduced=("head.bias",))), ranks=3)
    assert (found.ranks, "added, replaced or unfrozen" in found.summary) == ((0, 1, 2), True)


def test_accumulation_done_right_is_no_cause_where_one_rank_is_odd():
    now = everywhere(3, 50, forwards=4, unreduced_forwards=3)
    found = verdict(stream(difference(What.GRADIENT, sides=against(1)), ranks=3, now=now), ranks=3)
    assert (found.ranks, "rank 1 changed them" in found.summary) == ((1,), True)


def test_a_compiled_forward_that_was_not_seen_is_not_past_ddp():
    found = verdict(stream(LATER, now=everywhere(2, 50, forwards=0)))
    assert "bypassed DDP" not in found.summary


def test_gradients_come_before_the_parameters_that_they_move():
    both = (FIRST, difference(What.PARAMETER, 1, None), difference(What.STATE, 1, None, part="exp_avg"))
    seen = stream(*both, now=everywhere(2, 1, forwards=0, reductions=0))
    assert verdict(seen).code == "DD503"
    assert codes(seen) == ["DD501", "DD503"]
    assert "DD503" in outcome("DD505", seen)[1]
    drift = next(finding for finding in judged(seen)[0] if finding.code == "DD501")
    assert "the gradients differ since step 1: the training step bypassed DDP" in drift.summary


def test_equal_causes_of_two_models_are_one_finding_and_others_are_apart():
    first = stream(replace(LATER, number=64), model=1, now=everywhere(2, 64, forwards=0, reductions=0))
    second = stream(LATER, model=2, now=everywhere(2, 50, forwards=0, reductions=0))
    third = stream(LATER, model=3, now=everywhere(2, 50, forwards=1, unreduced_forwards=1))
    findings = judged(first, second, third)[0]
    assert [(finding.step, finding.code) for finding in findings] == [(50, "DD503"), (50, "DD503")]
    assert any("the same in DDP model 1" in sentence for sentence in findings[0].evidence)
    assert any("DDP model 2" in sentence for sentence in findings[0].evidence)


def test_ranks_are_those_of_the_job():
    sides = ((5,), (7,))
    seen = stream(difference(What.GRADIENT, sides=sides), ranks=2)
    now = tuple(replace(each, rank=rank) for each, rank in zip(everywhere(), (5, 7), strict=True))
    seen = replace(seen, ranks=(5, 7), values=((50, now),))
    assert verdict(seen, ranks=8).ranks == (5, 7)


def test_hosts_are_named_where_there_are_several():
    assert verdict(stream(LATER), nnodes=2).hosts == ("node0",)
    assert verdict(stream(LATER)).hosts == ()


SILENT = {
    "equal": (stream(), PASSED),
    "inside join": (
        stream(LATER, now=everywhere(2, 50, join=True)),
        (Outcome.SKIPPED, "ranks may make different numbers of steps inside DDP's join: only the end is compared"),
    ),
    "post-local SGD": (
        stream(LATER, now=everywhere(2, 50, hook="post_localSGD_hook")),
        (Outcome.SKIPPED, "local SGD: ranks differ by design until their parameters are averaged"),
    ),
    "nothing but the end": (stream(clock=StreamClock.END), (Outcome.SKIPPED, "no gradients were compared")),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_alarm(name):
    seen, expected = SILENT[name]
    assert codes(seen) == []
    assert outcome("DD503", seen) == expected


def test_ranks_that_had_not_come_equally_far_are_not_compared():
    now = everywhere(2, 1, odd={1: {"reductions": 0}})
    seen = stream(FIRST, now=now)
    assert codes(seen) == []
    result, reason = outcome("DD503", seen)
    assert (result, "at different points" in reason) == (Outcome.SKIPPED, True)


def test_points_before_ranks_parted_count():
    assert outcome("DD503", stream(LATER, now=everywhere(2, 50, odd={1: {"reductions": 49}}))) == PASSED


@pytest.mark.parametrize("more", [{"forwards": 0, "reductions": 0}, {"forwards": 2, "unreduced_forwards": 2}])
def test_local_sgd_that_ends_equal_is_meant_so(more):
    """A script that averages parameters by itself."""
    seen = stream(FIRST, difference(What.PARAMETER, 1, None), now=everywhere(2, 1, **more))
    assert codes(seen, stream(clock=StreamClock.END)) == []
    assert codes(seen, stream(difference(What.PARAMETER, 100, None), clock=StreamClock.END)) == ["DD501", "DD503"]
    assert codes(seen, stream(clock=StreamClock.END, compared=0)) == ["DD501", "DD503"]


def test_an_edit_that_ends_equal_is_an_alarm():
    assert "DD503" in codes(stream(LATER), stream(clock=StreamClock.END))


def test_without_facts_nothing_has_passed():
    none = replace(job(), consistency=None)
    checks = judge_about("consistency", none).checks
    assert {(check.outcome, check.reason) for check in checks if check.code not in {"DD504", "DD506"}} == {
        (Outcome.SKIPPED, "replicas were not compared")
    }
    assert outcome("DD503") == (Outcome.SKIPPED, "no DDP model was trained on two or more visible ranks")


def test_what_was_turned_off_or_could_not_be_read_has_not_passed():
    facts = job(stream())
    for more, reason in (
        ({"check_every": 0, "streams": ()}, "comparing replicas was disabled"),
        ({"streams": (), "unread": ("a is damaged",)}, "a is damaged"),
    ):
        checks = judge_about("consistency", replace(facts, consistency=replace(facts.consistency, **more))).checks
        assert {(check.outcome, check.reason) for check in checks if check.code in ("DD503", "DD508")} == {
            (Outcome.SKIPPED, reason)
        }


def test_a_rank_whose_points_nobody_shares_is_named():
    seen = stream(compared=0, ranks=0, last_number=None, kinds=(), values=(), unpaired=(1,))
    result, reason = outcome("DD503", seen)
    assert result is Outcome.SKIPPED
    assert reason.endswith("rank 1 wrote fingerprints for steps that no other rank has")
