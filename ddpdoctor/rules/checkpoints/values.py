"""DD715: values in a checkpoint that are inf or NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import count_of
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.checkpoints.words import some
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from ddpdoctor.model.checkpoint import Checkpoints, FileSeen, OddValues


@rule("DD715", "checkpoint-nonfinite", Severity.ERROR, "A checkpoint holds NaN or inf")
def check_values(seen: Checkpoints) -> Answer:
    """Report tensors with NaN, or with inf among ordinary numbers.

    ## What it means

    Training went wrong before this file was written: if you resume from it, you train on NaN. In optimizer state it
    stays hidden until the next step.

    ## How it is recognized

    All values of all floating-point tensors are checked, through a memory map of the file. Intended values are not
    reported: a tensor that holds only inf (a best value that was never reached, an observer's initial limits) or only
    zeros and -inf (a mask). A tensor whose only non-finite values are -inf among other numbers is a warning, because it
    may be a mask that includes a bias.

    ## How sure

    High for NaN.

    ## What to do

    Go back to an earlier checkpoint and continue training under `ddpdoctor wrap`, which names the rank and step at
    which gradients stop being finite. With mixed precision, save only after a step that the GradScaler did not skip.

    ## Example

        last.pt holds NaN: 12 of 4096 values of model.layers.7.weight
    """
    looked = [one for one in seen.files if one.values is not None]
    if not looked:
        return skipped("no values were looked at")
    problems = [problem for one in looked if (problem := _judge(one)) is not None]
    return judged(problems, f"values of {count_of(len(looked), 'file')} looked at")


def _judge(one: FileSeen) -> Problem | None:
    values = one.values or ()
    broken = [each for each in values if each.nan or (each.above and (each.plain or each.below))]
    doubtful = [each for each in values if each not in broken and each.below and each.plain and not each.above]
    if not broken and not doubtful:
        return None
    worst = broken or doubtful
    first = worst[0]
    names = [each.name for each in worst]
    what = "NaN" if any(each.nan for each in worst) else "inf" if broken else "-inf among other numbers"
    return Problem(
        severity=None if broken else Severity.WARNING,
        summary=f"{one.path} holds {what}: {_words(first)}"
        + (f"; {some(names, 'tensor')} in all" if len(names) > 1 else ""),
        evidence=tuple(_words(each) for each in worst[1:4]),
        fix="go back to an earlier checkpoint, and find the step with ddpdoctor wrap"
        if broken
        else "see whether that tensor is a mask; a weight must not hold it",
        tensor=first.name,
    )


def _words(each: OddValues) -> str:
    kinds = [
        f"{number} {name}" for number, name in ((each.nan, "NaN"), (each.above, "inf"), (each.below, "-inf")) if number
    ]
    return f"{' and '.join(kinds)} among the {count_of(each.of, 'value')} of {each.name}"
