"""DD509 and DD510: DDP's gradient is not that of one process, or a second run does not repeat the first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import count_of, rank_list
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
    """Report gradients that differ from those of one process on the same global batch by more than rounding."""
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
    """Report that a second run with the same seed does not give the same bits on the same rank."""
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
