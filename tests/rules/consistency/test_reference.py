"""DD509 and DD510 over tables: which gradient agrees with which tells the cause."""

import math
from dataclasses import replace

import pytest

from ddpdoctor.model.consistency import What
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Rerun, Trial, TrialSettings
from ddpdoctor.rules.consistency.reference_causes import LIMIT
from tests.rules.asking import asking

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


def only(ruling):
    (finding,) = ruling.findings
    return finding


WRONG = {"whole": 0.5}


@pytest.mark.parametrize("share", [0.0, 1.0, LIMIT])
def test_what_rounding_explains_is_no_finding(share):
    assert check_reference(trial(errors(whole=share * ROUNDING))).findings == ()


def test_more_than_rounding_explains_is_an_error_that_names_the_worst_parameter():
    finding = only(check_reference(trial(errors(), errors("2.bias", whole=1.1 * LIMIT * ROUNDING))))
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
    finding = only(check_reference(facts))
    assert said in finding.summary
    assert finding.severity is Severity.ERROR
    assert (finding.confidence is Confidence.HIGH) == ("the reason is unknown" not in finding.summary)
    assert finding.fix


def test_batchnorm_is_named_and_is_a_warning():
    facts = trial(
        errors(whole=0.2, maths=0.2, weighted=0.1, local=1.0, without_batchnorm=0.0), batchnorm=("body.1", "body.4")
    )
    finding = only(check_reference(facts))
    assert finding.severity is Severity.WARNING
    assert "in body.1, body.4" in finding.summary


def test_batchnorm_is_not_to_blame_where_the_rest_differs_as_well():
    facts = trial(errors(whole=0.2, maths=0.2, weighted=0.2, local=1.0, without_batchnorm=0.1), batchnorm=("body.1",))
    assert "BatchNorm" not in only(check_reference(facts)).summary


def test_hooks_on_gradients_are_named_where_the_loss_is_right():
    facts = trial(errors(whole=1.0, parts=1.0, local=3.0), ranks=2, scale=2.0, hooked=("0.weight",))
    assert "perhaps by the hooks on 0.weight" in only(check_reference(facts)).summary


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
    finding = only(check_repeat(replace(trial(errors()), rerun=rerun)))
    assert said in finding.summary
    assert (finding.severity, finding.ranks, finding.step) == (Severity.INFO, rerun.ranks, step)
