"""DD806: ``find_unused_parameters=True`` in a model whose parameters are all used, in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import rule

from .models import built_at, knob, reduced_models
from .steps import MIN_STEPS

if TYPE_CHECKING:
    from .models import ReducedModel
    from .state import SpeedState

DROP = {
    "": "remove find_unused_parameters=True",
    "lightning": 'use strategy="ddp" instead of "ddp_find_unused_parameters_true"',
    "transformers": "TrainingArguments(ddp_find_unused_parameters=False)",
    "accelerate": "DistributedDataParallelKwargs(find_unused_parameters=False)",
}


@rule("DD806", "find-unused-needless", Severity.WARNING, "DDP searches for unused parameters, but there are none")
def check_unused(state: SpeedState) -> Answer:
    """Report a model with find_unused_parameters=True in which every parameter is used in every step.

    ## What it means

    With this flag DDP walks the graph of each forward, and keeps its buckets in the order in which parameters were
    registered. If gradients come in another order, the buckets leave late.

    ## How it is recognized

    DDP itself compares the set of unused parameters of each step with that of the step before. Reported is a model
    whose set never changed on any rank, and was empty, in at least 20 reductions. Models with `static_graph=True` are
    not judged. If the same parameters are always unused, it is a note.

    ## How sure

    It is certain for this run. A very rare branch may not occur in a short run.

    ## What to do

    Drop the flag. If some branch of the model is rare, keep it: without the flag DDP raises an error there. If the same
    parameters are always unused, freeze them, or use `static_graph=True`.

    ## Example

    A model of 600 tensors took 11% more processor time with the flag. In a model whose layers are registered in the
    reverse order of their use, a step took 437 ms with it and 291 to 364 ms without.
    """
    models = [model for model in reduced_models(state) if any(one.finds_unused for one in model.times.values())]
    if not models:
        return skipped("no DDP model on CPUs has find_unused_parameters=True, or too few steps were recorded")
    needless = [problem for model in models for problem in _problems(state, model)]
    return judged(needless) if needless else passed("the unused parameters change, or the run is too short to tell")


def _problems(state: SpeedState, model: ReducedModel) -> list[Problem]:
    ranks = model.times.values()
    is_known = all(one.same_unused and one.reductions >= MIN_STEPS for one in ranks)
    if not is_known or any(one.static_graph for one in ranks):
        return []
    some = any(one.unused_bytes for one in ranks)
    what = "the same parameters are unused in every step" if some else "no parameter is unused in any step"
    drop = f"{knob(state, DROP)}, unless the model has rarely used branches"
    return [
        Problem(
            summary=f"find_unused_parameters=True is not needed: {what}",
            evidence=(f"DDP reported the unused parameters of {state.budget.count} steps",),
            fix="freeze these parameters, or replace the flag with static_graph=True" if some else drop,
            severity=Severity.INFO if some else None,
            ranks=tuple(sorted(model.times)),
            where=built_at(state, model),
        )
    ]
