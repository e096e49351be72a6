"""Gradients that differ after the reduction: who is to blame, when it was seen, and the likely cause."""

import math
from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import NonFinite, Origin, StreamClock, What
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Rerun, Trial, TrialSettings
from ddpdoctor.rules.consistency.reference import LIMIT
from tests.rules import build
from tests.rules.build import asking, judge_about
from tests.rules.consistency.build import (
    PASSED,
    against,
    apart,
    codes,
    difference,
    everywhere,
    job,
    judged,
    outcome,
    stream,
    verdict,
)

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


# Local gradients that are not finite: who is to blame, when it counts, and what is only a consequence.


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


def judged_local(*by_rank, groups=None):
    world = len(by_rank)
    ranks = [
        build.ended(number, world, nonfinite=noted, groups=groups or (build.group(9, world),))
        for number, noted in enumerate(by_rank)
    ]
    return check_local_gradients(build.job(*ranks, ended=True)).findings


def only(*by_rank, **more):
    (finding,) = judged_local(*by_rank, **more)
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


def test_one_step_before_explains_nothing_where_the_parameters_were_sound():
    found = only((seen(used=False),), (seen(6, origin=Origin.INPUT),))
    assert (found.severity, found.ranks, found.step) == (Severity.ERROR, (1,), 6)


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
    found = judged_local((seen(3, model=2),), (seen(),))
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


# DD509 and DD510 over tables: which gradient agrees with which tells the cause.


ROUNDING = 1e-7
check_reference, check_repeat = asking("reference-gradient"), asking("not-repeatable")


def errors(name="0.weight", **changes):
    """A gradient of norm 1, of which everything agrees up to rounding, unless said otherwise."""
    agreed = dict.fromkeys(("whole", "parts", "local", "scaled", "maths", "weighted"), ROUNDING)
    made = {"elements": 8, "norm": 1.0, "ddp_norm": 1.0, "rounding": ROUNDING, "exact": ROUNDING * 1e-6, **agreed}
    return GradientErrors(name=name, **{**made, "maths": 0.0, "weighted": 0.0, "without_batchnorm": None, **changes})


def trial(*tensors, ranks=4, problem="", batchnorm=(), hooked=(), float64=True, **changes):
    step = {
        "step": 1,
        "scale": 1.0,
        "weights": (1 / ranks,) * ranks,
        "samples": (8,) * ranks,
        "losses": (2.0,) * ranks,
        "part_losses": (2.0,) * ranks,
        "random_error": 0.0,
        "tensors": tensors,
        **changes,
    }
    reference = OneProcess(
        steps=(ReferenceStep(**step),), problem=problem, batchnorm=batchnorm, hooked=hooked, float64=float64
    )
    return Trial(
        settings=TrialSettings(model="m:f", reference=True),
        participants=tuple(
            Participant(rank=n, local_rank=n, host="h", pid=n, device="cpu", torch="2") for n in range(ranks)
        ),
        models=(),
        reference=reference,
    )


def only_compared(ruling):
    (finding,) = ruling.findings
    return finding


WRONG = {"whole": 0.5}


@pytest.mark.parametrize("share", [0.0, 1.0, LIMIT])
def test_what_rounding_explains_is_no_finding(share):
    assert check_reference(trial(errors(whole=share * ROUNDING))).findings == ()


def test_more_than_rounding_explains_is_an_error_that_names_the_worst_parameter():
    finding = only_compared(check_reference(trial(errors(), errors("2.bias", whole=1.1 * LIMIT * ROUNDING))))
    assert (finding.code, finding.severity, finding.tensor, finding.step) == ("DD509", Severity.ERROR, "2.bias", 1)
    assert finding.ranks == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        # A loss that is a sum: one process adds the parts up, and DDP takes the mean.
        (
            trial(errors(whole=0.75, maths=0.75), weights=(1.0,) * 4),
            "1/4 of the expected one: the loss is a sum over samples",
        ),
        # The loss times the world size.
        (
            trial(errors(whole=3.0, parts=3.0, local=9.0), scale=4.0, losses=(8.0,) * 4),
            "4 times (the world size) the mean over ranks, and so is the loss",
        ),
        # Reduced once more by hand.
        (
            trial(errors(whole=3.0, parts=3.0, local=9.0), scale=4.0),
            "4 times (the world size) the mean over ranks, and the loss is not scaled",
        ),
        (
            trial(errors(whole=0.75, parts=0.75, local=1.0), scale=0.25, losses=(0.5,) * 4),
            "1/4 of (one over the world size) the mean over ranks, and so is the loss",
        ),
        # Not reduced, all or some.
        (trial(errors(whole=1.0, parts=1.0, scaled=1.0)), "rank 0's own batch, so gradients were not reduced"),
        (
            trial(errors(local=1.0), errors("head.weight", whole=1.0, parts=1.0, scaled=1.0)),
            "1 of 2 parameters have the gradient of rank 0's own batch, such as head.weight",
        ),
        # Samples or tokens that count differently.
        (
            trial(errors(whole=0.2, maths=0.2, local=1.0), weights=(0.1, 0.3, 0.3, 0.3), samples=(2, 6, 6, 6)),
            "a mean of means",
        ),
        (trial(errors(whole=0.2, maths=0.2, local=1.0), weights=(0.5, 0.5, 0.5, 0.5)), "2 times the mean over ranks"),
        (trial(errors(), missing=("2.bias",)), "2.bias has a gradient on one side only"),
        (trial(errors(whole=0.2, maths=0.2, weighted=0.2, local=1.0)), "the reason is unknown"),
        (trial(errors(whole=0.2, parts=0.2, scaled=0.2, local=1.0)), "the reason is unknown"),
    ],
)
def test_the_cause_follows_from_what_agrees(facts, said):
    finding = only_compared(check_reference(facts))
    assert said in finding.summary
    assert finding.severity is Severity.ERROR
    assert (finding.confidence is Confidence.HIGH) == ("the reason is unknown" not in finding.summary)
    assert finding.fix


def test_batchnorm_is_named_and_is_a_warning():
    facts = trial(
        errors(whole=0.2, maths=0.2, weighted=0.1, local=1.0, without_batchnorm=0.0), batchnorm=("body.1", "body.4")
    )
    finding = only_compared(check_reference(facts))
    assert finding.severity is Severity.WARNING
    assert "in body.1, body.4" in finding.summary


def test_batchnorm_is_not_to_blame_where_the_rest_differs_as_well():
    facts = trial(errors(whole=0.2, maths=0.2, weighted=0.2, local=1.0, without_batchnorm=0.1), batchnorm=("body.1",))
    assert "BatchNorm" not in only_compared(check_reference(facts)).summary


def test_hooks_on_gradients_are_named_where_the_loss_is_right():
    facts = trial(errors(whole=1.0, parts=1.0, local=3.0), ranks=2, scale=2.0, hooked=("0.weight",))
    assert "perhaps by the hooks on 0.weight" in only_compared(check_reference(facts)).summary


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (trial(errors(**WRONG), random_error=2 * LIMIT), "draws random numbers"),
        (trial(errors(whole=math.nan)), "inf or NaN"),
        (replace(trial(errors()), reference=OneProcess(problem="no batch can be made")), "no batch can be made"),
        (replace(trial(errors()), reference=OneProcess()), "no step"),
    ],
)
def test_what_cannot_be_determined_is_neither_passed_nor_a_finding(facts, said):
    ruling = check_reference(facts)
    assert ruling.findings == ()
    assert ruling.checks[0].outcome is Outcome.INCONCLUSIVE
    assert said in ruling.checks[0].reason


def test_nobody_asked():
    assert check_reference(replace(trial(errors()), reference=None)).checks[0].outcome is Outcome.SKIPPED
    assert check_repeat(trial(errors())).checks[0].outcome is Outcome.SKIPPED


def test_a_run_that_repeats_itself_has_passed():
    assert check_repeat(replace(trial(errors()), rerun=Rerun(steps=5))).findings == ()


@pytest.mark.parametrize(
    ("rerun", "said", "step"),
    [
        (
            Rerun(steps=5, step=2, what=What.GRADIENT, name="0.weight", ranks=(1,), differing=1, of=12),
            "since step 2: the gradient 0.weight, 1 of 12 tensors",
            2,
        ),
        (
            Rerun(steps=5, step=0, what=What.PARAMETER, name="0.weight", ranks=(0, 1), differing=3, of=4),
            "when it is built: the parameter 0.weight",
            None,
        ),
        (Rerun(steps=5, step=1, name="the batch", ranks=(0,)), "since step 1: the batch", 1),
    ],
)
def test_a_run_that_does_not_is_a_note_and_no_drift(rerun, said, step):
    finding = only_compared(check_repeat(replace(trial(errors()), rerun=rerun)))
    assert said in finding.summary
    assert (finding.severity, finding.ranks, finding.step) == (Severity.INFO, rerun.ranks, step)
