"""DD508: the optimizer trains tensors that are not parameters of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import first_names, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.consistency.problems import hosts_of, model_words
from ddpdoctor.rules.consistency.replicas import replicas_of, step_of, values_at
from ddpdoctor.rules.consistency.survey import why_nothing
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import Stream, Values
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams

MIN_UNCHANGED = 2
"""Comparisons in a row without any change. Our choice: a step may be skipped, or have a learning rate of 0 in a
warm-up."""


MIN_COMPARED = 3
"""Steps to check before a part of the model is called stale. Our choice: a second optimizer may start stepping
later."""


MAKE_ANEW = "create the optimizer from model.parameters() after you move, replace, load and wrap the model"


@rule("DD508", "stale-optimizer", Severity.ERROR, "The optimizer has tensors that are not parameters of the model")
def check_stale_optimizer(job: Job) -> Answer:
    """Report parameters that never change while optimizers step with tensors that are not the model's own."""
    found = [
        one for replica in replicas_of(job) for stream in replica.streams if (one := _finding(job, replica, stream))
    ]
    if found:
        return judged([min(found, key=lambda one: (one.severity or Severity.ERROR).order)])
    followed = any(
        stream.compared > MIN_UNCHANGED and What.PARAMETER in stream.kinds
        for replica in replicas_of(job)
        for stream in replica.streams
    )
    return passed() if followed else skipped(why_nothing(job, "parameters of enough comparisons"))


def _finding(job: Job, replica: ReplicaStreams, stream: Stream) -> Problem | None:
    values = values_at(stream, stream.last_number)
    if stream.last_number is None or not values:
        return None
    last = step_of(stream, stream.last_number)
    checks = (_replaced_part, _added_part, _left_out)
    stale = _whole_model(job, stream, values, last) or next(
        filter(None, (check(stream, values, last) for check in checks)), None
    )
    ranks = tuple(each.rank for each in values)
    evidence = () if stale is None else (*stale.evidence, *model_words(job, replica))
    return stale and replace(stale, ranks=ranks, hosts=hosts_of(job, ranks), evidence=evidence)


def _whole_model(job: Job, stream: Stream, values: tuple[Values, ...], last: int) -> Problem | None:
    if stream.unchanged < MIN_UNCHANGED or What.PARAMETER not in stream.kinds:
        return None
    stepped = all(rank.steps > 0 for rank in job.ranks if rank.rank in stream.ranks)
    if not stepped or not all(each.reductions > 0 and each.stray >= each.unheld > 0 for each in values):
        return None
    some = values[0]
    return Problem(
        step=1 if stream.unchanged == stream.compared - 1 else None,
        summary=f"the model's parameters did not change in {some.reductions} backwards on {rank_list(stream.ranks)}: "
        f"the optimizer has {some.stray} tensors that are not in the model, and none of the {some.unheld} "
        "trained parameters",
        evidence=(f"no parameter changed in the last {stream.unchanged + 1} comparisons, up to step {last}",),
        fix=MAKE_ANEW,
    )


def _replaced_part(stream: Stream, values: tuple[Values, ...], last: int) -> Problem | None:
    if stream.clock is not StreamClock.STEP or stream.compared < MIN_COMPARED:
        return None
    if not all(each.reductions > 0 and each.replaced for each in values):
        return None
    some = values[0]
    names = ", ".join(some.replaced)
    return Problem(
        tensor=some.replaced[0],
        summary=f"no optimizer has {names} on {rank_list(stream.ranks)}; one has tensors of the same shapes that are "
        "not in the model, for example from a layer that was replaced after the optimizer was created",
        evidence=(
            f"up to step {last}, the model's parameters have gradients, and the optimizer's tensors never had one",
        ),
        fix=MAKE_ANEW,
    )


def _added_part(stream: Stream, values: tuple[Values, ...], last: int) -> Problem | None:
    if stream.clock is not StreamClock.STEP or not all(each.late and each.untrained for each in values):
        return None
    some = values[0]
    names = first_names(some.untrained, some.late, count=some.late)
    return Problem(
        tensor=some.untrained[0],
        summary=f"no optimizer has {names} on {rank_list(stream.ranks)}: added or replaced in the model after the "
        "optimizer was created",
        evidence=(f"up to step {last}, they got gradients and did not change",),
        fix=f"{MAKE_ANEW}; or add the new parameters: optimizer.add_param_group({{'params': ...}})",
    )


def _left_out(stream: Stream, values: tuple[Values, ...], last: int) -> Problem | None:
    if stream.clock is not StreamClock.STEP or not all(each.untrained for each in values):
        return None
    some = values[0]
    names = first_names(some.untrained, some.untrained_count, count=some.untrained_count)
    return Problem(
        tensor=some.untrained[0],
        severity=Severity.INFO,
        confidence=Confidence.LOW,
        summary=(
            f"no optimizer has {names} on {rank_list(stream.ranks)}: their gradients are computed and reduced, but "
            "never used"
        ),
        evidence=(f"this is true up to step {last}; layers left out of the optimizer on purpose look the same",),
        fix="to train them, pass them to the optimizer: layers that were frozen when it was created are easily "
        "forgotten; otherwise call requires_grad_(False) before wrapping to save their backward and reduction",
    )
