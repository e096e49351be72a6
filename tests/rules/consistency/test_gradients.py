"""Gradients that differ after the reduction: who is to blame, when it was seen, and the likely cause."""

from dataclasses import replace

from ddpdoctor.model import trial as trials
from ddpdoctor.model.consistency import NonFinite, Origin
from ddpdoctor.model.trial import GradientErrors, OneProcess, Participant, ReferenceStep, Trial, TrialSettings
from ddpdoctor.rules.consistency import reference
from tests.golden import table
from tests.rules import build
from tests.rules.build import asking
from tests.rules.consistency import build as streams
from tests.rules.consistency.build import job, stream

# Local gradients that are not finite: who is to blame, when it counts, and what is only a consequence.


check_local_gradients = asking("nonfinite-grad")
judge_separate = asking("not-distributed")


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


def local(*by_rank):
    """Judge what each rank noted of its own gradients."""
    world = len(by_rank)
    ranks = [build.ended(n, world, nonfinite=noted, groups=(build.group(9, world),)) for n, noted in enumerate(by_rank)]
    return check_local_gradients(build.job(*ranks, ended=True))


def unread(**more):
    """A job of whose replicas less was read."""
    made = job(stream())
    return replace(made, consistency=replace(made.consistency, **more))


# DD509 and DD510 over tables: which gradient agrees with which tells the cause.


ROUNDING = 1e-7
check_reference, check_repeat = asking("reference-gradient"), asking("not-repeatable")


def alone(ranks=2, steps=100, joined=(), unrecorded=(), world=None):
    """Ranks of one launch that train, of which only ``joined`` have called init_process_group."""
    members = [
        build.ended(rank, ranks, steps=steps, initialized=rank in joined, recorded=rank not in unrecorded)
        for rank in range(ranks)
    ]
    return replace(build.job(*members, ended=True, launcher_status=0), world_size=world or ranks)


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
    alone = OneProcess(
        steps=(ReferenceStep(**step),), problem=problem, batchnorm=batchnorm, hooked=hooked, float64=float64
    )
    return Trial(
        settings=TrialSettings(model="m:f", reference=True),
        participants=tuple(
            Participant(rank=n, local_rank=n, host="h", pid=n, device="cpu", torch="2") for n in range(ranks)
        ),
        models=(),
        reference=alone,
    )


test_rows = table("gradients", vars(reference), vars(trials), vars(streams), globals())
