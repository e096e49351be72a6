"""DD509 and DD510: DDP's gradient is not that of one process, or a second run does not repeat the first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped, unknown
from ddpdoctor.rules.consistency.reference_causes import LIMIT, explain, ratio
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.trial import GradientErrors, OneProcess, ReferenceStep, Rerun, Trial

_RANDOM = (
    "the model draws random numbers in training outside dropout layers, which were disabled: one process draws "
    "different numbers than the ranks"
)


@rule("DD509", "reference-gradient", Severity.ERROR, "DDP's gradient differs from one process on the whole batch")
def check_reference(trial: Trial) -> Answer:
    """Report gradients that differ from those of one process on the same global batch by more than rounding.

    ## What it means

    The job does not train what the same script trains in one process: the learning rate is off by a factor, some
    samples weigh more than others, or statistics are taken over parts of the batch.

    ## How it is recognized

    `check-consistency --reference` starts one extra process. From the same state as the replicas, it computes the
    gradient of the batches of all ranks joined together, and the gradient of each rank's batch alone. It does so once
    in the model's precision and once in float64, which shows how much rounding explains for each parameter. An error of
    up to ten times that counts as none. Which gradients agree shows the cause:

    | seen | cause |
    |---|---|
    | DDP's gradient is k times the mean over ranks | the loss or the gradient is scaled by k, such as the world size |
    | DDP's gradient is that of one rank's batch | it was not reduced: `no_sync`, or the model was called without DDP |
    | the whole batch's gradient is the sum over ranks | the loss is a sum over samples, but DDP takes the mean |
    | the whole batch's gradient is a weighted sum | ranks have unequal numbers of samples or tokens: a mean of means |
    | the two agree without batch statistics | BatchNorm takes statistics of each rank's own batch |

    Dropout is turned off for this. A model that still draws random numbers cannot be judged.

    ## How sure

    High if one of these causes explains all parameters. Otherwise the cause is unknown: medium.

    ## What to do

    Make the loss a mean over the samples of all ranks. If it divides by a count that is summed over ranks, multiply the
    result by the world size. Otherwise leave scaling by the world size to DDP.
    `SyncBatchNorm.convert_sync_batchnorm(model)` takes statistics over all ranks. Smaller batches for BatchNorm may
    also be what you want, so this case is a warning, not an error.

    ## Example

        DDP's gradient differs from one process on the whole batch: it is 1/4 of the expected one: the loss is a sum
        over samples, and DDP takes the mean over 4 ranks
    """
    reference = trial.reference
    if reference is None:
        return skipped("--reference was not given")
    for step in reference.steps:
        if not all(math.isfinite(one.whole) for one in step.tensors):
            return unknown(f"the gradients of step {step.step} have inf or NaN")
        if step.random_error > LIMIT:
            return unknown(_RANDOM)
        if step.missing or any(ratio(one.whole, one.rounding) > LIMIT for one in step.tensors):
            return judged([_finding(trial, reference, step)])
    if reference.problem:
        return unknown(reference.problem)
    return passed() if reference.steps else unknown("no step was computed in one process")


def _finding(trial: Trial, reference: OneProcess, step: ReferenceStep) -> Problem:
    found = explain(reference, step)
    worst = worst_tensor(step)
    ranks = tuple(one.rank for one in trial.participants)
    return replace(
        found,
        ranks=ranks,
        hosts=tuple(dict.fromkeys(one.host for one in trial.participants)),
        step=step.step,
        tensor=worst.name if worst is not None else (step.missing[0] if step.missing else None),
        summary=f"DDP's gradient differs from one process on the whole batch: {found.summary}",
        evidence=(*_error_words(step, worst, reference), *found.evidence, *_done(reference, ranks)),
    )


def worst_tensor(step: ReferenceStep) -> GradientErrors | None:
    """Return the parameter whose error is the largest compared with its rounding error."""
    return max(step.tensors, key=lambda one: ratio(one.whole, one.rounding), default=None)


def _error_words(step: ReferenceStep, worst: GradientErrors | None, reference: OneProcess) -> list[str]:
    if worst is None:
        return []
    wrong = sum(ratio(one.whole, one.rounding) > LIMIT for one in step.tensors)
    how = "float64" if reference.float64 else "another order of the samples"
    wrong_words = f"{wrong} of {len(step.tensors)} gradients differ"
    shares = _share(worst.whole, worst.norm), _share(worst.rounding, worst.norm)
    return [
        f"{wrong_words} by more than {LIMIT:g} times the rounding error ({how})",
        f"{worst.name}: relative error {shares[0]}; rounding explains {shares[1]}",
    ]


def _share(error: float, norm: float) -> str:
    return f"{error / norm:.2g}" if norm else f"{error:.2g} of a gradient that is 0"


def _done(reference: OneProcess, ranks: tuple[int, ...]) -> list[str]:
    off = f"; {count_of(reference.dropout, 'dropout layer')} disabled" if reference.dropout else ""
    return [f"the same state and the same batches of {rank_list(ranks)} in one process{off}"]


@rule("DD510", "not-repeatable", Severity.INFO, "Two runs with the same seed differ on the same rank")
def check_repeat(trial: Trial) -> Answer:
    """Report that a second run with the same seed does not give the same bits on the same rank.

    ## What it means

    Nothing is wrong with the replicas, which are compared with each other in each run. The code or the machine does not
    repeat itself. You then cannot compare two runs, or two machines, bit by bit, and a bug that shows in one run may
    not show in the next.

    ## How it is recognized

    `check-consistency --twice` builds and trains the model a second time with the same seed. It compares 16 bytes per
    tensor with the first run on the same rank: the built model, each batch, then gradients, parameters and optimizer
    state of each step.

    ## How sure

    High. The finding does not say which code is to blame; the first tensor that differs shows where to look.

    ## What to do

    Create batches and models with torch's generators, which are seeded, not from the time, os.urandom or the order of a
    set. On GPUs, atomic additions sum in any order: use `torch.use_deterministic_algorithms(True)` and
    `CUBLAS_WORKSPACE_CONFIG`.

    ## Example

        a second run with the same seed differs from the first since step 1: the gradient of embed.weight, 1 of 12
        tensors
    """
    rerun = trial.rerun
    if rerun is None:
        return skipped("--twice was not given")
    if rerun.step is None:
        return passed()
    since = f"since step {rerun.step}" if rerun.step else "when it is built"
    return judged(
        [
            Problem(
                ranks=rerun.ranks,
                step=rerun.step or None,
                tensor=rerun.name if rerun.what is not None else None,
                summary=f"a second run with the same seed differs from the first {since}: {_what(rerun)}",
                evidence=(f"on {rank_list(rerun.ranks)}; this is not drift between ranks",),
                fix="use torch.use_deterministic_algorithms, and draw all random numbers from seeded generators",
            )
        ]
    )


def _what(rerun: Rerun) -> str:
    if rerun.what is None:
        return rerun.name
    part = f" ({rerun.part})" if rerun.part else ""
    return f"the {rerun.what.value} {rerun.name}{part}, {rerun.differing} of {rerun.of} tensors"
