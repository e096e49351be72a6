"""DD504: a rank's own gradients held inf or NaN before the reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import Origin
from ddpdoctor.model.findings import Confidence, Place, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.registry import rule

from . import nonfinite_words as say
from .nonfinite_words import NonFiniteStep
from .problems import hosts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.consistency import NonFinite
    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.stacks import Frame

NOT_LOOKED = "local gradients were not looked at"


@rule("DD504", "nonfinite-grad", Severity.ERROR, "A rank's own gradients held inf or NaN before the reduction")
def check_local_gradients(job: Job) -> Answer:
    """Report the rank whose gradients were the first to hold inf or NaN, before DDP averaged them with the others.

    ## What it means

    DDP adds up the gradients of all ranks. One NaN on one rank reaches the gradients of all ranks in the reduction, and
    their parameters in the step. After that, nothing shows where it came from.

    ## How it is recognised

    In each backward, each rank checks its own gradients after all gradients of a DDP model are computed and before DDP
    replaces them by their mean. It computes one sum per tensor, and one for small tensors together. If a sum is not
    finite, it looks closer: which parameters are affected (those computed first come first), and whether an input of
    the model, a parameter or the loss was already not finite. On a GPU it reads the result when it is ready, without
    waiting for it.

    The earliest step counts, and the ranks whose own gradients were not finite in it. What other ranks see later came
    through the reduction.

    It is an error only if the gradients were used: an optimizer stepped with them, or parameters were not finite
    afterwards. Otherwise:

    - a script that discards such gradients (skips the step, calls `nan_to_num_`, raises) gets a note (info);
    - a gradient scaler that skips a step because scaled gradients overflowed works as intended, and gets no finding;
    - a gradient scaler gets a warning if NaN came from the input or the loss, which a smaller scale cannot fix, or if
      it skipped 20 steps in a row (our choice: a scale of 2**16 is far below 1 by then).

    Not checked: models under compiled autograd or DDP's own mixed precision, parameters of Tensor subclasses, and
    gradients that DDP does not reduce.

    ## How sure

    High. Medium if parameters were not finite although no local gradient had been: then the reduction, the optimizer,
    or an edit of the parameters is the cause.

    ## What to do

    If the input was not finite: look at the samples of this rank's share. If the loss: look for a logarithm, root or
    division of zero, or an overflow in half precision. If only a gradient: run that step under
    `torch.autograd.set_detect_anomaly(True)`, which names the operation; `sqrt`, `norm` and `where` can have infinite
    gradients at finite values.

    ## Example

        rank 1 computed NaN as the gradient of layers.3.weight in step 12, and loss and input were finite; the reduction
        gave it to all ranks
    """
    looked = [rank for rank in job.ranks if rank.nonfinite is not None]
    if not looked:
        return skipped(NOT_LOOKED)
    models = _by_model(looked)
    findings = (_judge(job, _sightings(job, looked, seen)) for seen in models)
    return judged(finding for finding in findings if finding is not None)


def _by_model(looked: Iterable[Rank]) -> list[list[tuple[Rank, NonFinite]]]:
    """Group what ranks saw by model. Groups of different ranks may share a name."""
    found: dict[tuple[tuple[int, ...], str, int], list[tuple[Rank, NonFinite]]] = {}
    for rank in looked:
        for seen in rank.nonfinite or ():
            found.setdefault((_members(rank, seen.group), seen.group, seen.model), []).append((rank, seen))
    return list(found.values())


def _members(rank: Rank, name: str) -> tuple[int, ...]:
    """Return the ranks of a group as this rank recorded them, or nothing if it did not."""
    return next((group.ranks for group in rank.groups if group.name == name), ())


def _sightings(job: Job, looked: list[Rank], seen: list[tuple[Rank, NonFinite]]) -> list[NonFiniteStep]:
    """Return the steps of one model, the earliest first."""
    by_step: dict[int, dict[int, NonFinite]] = {}
    for rank, one in seen:
        by_step.setdefault(one.step, {})[rank.rank] = one
    members = set(_members(*_owner(seen))) or {rank.rank for rank in job.ranks}
    known = {rank.rank for rank in looked}
    return [
        NonFiniteStep(
            step=step,
            by_rank=found,
            others=tuple(sorted((members & known) - set(found))),
            unseen=tuple(sorted(members - known)),
        )
        for step, found in sorted(by_step.items())
    ]


def _owner(seen: list[tuple[Rank, NonFinite]]) -> tuple[Rank, str]:
    rank, one = seen[0]
    return rank, one.group


def _judge(job: Job, sightings: list[NonFiniteStep]) -> Problem | None:
    used = [at for at, sighting in enumerate(sightings) if sighting.used]
    if used:
        cause = sightings[_cause(sightings, used[0])]
        sureness = Confidence.MEDIUM if cause.origins == {Origin.PARAMETER} else Confidence.HIGH
        return _finding(job, cause, Severity.ERROR, sureness, say.used(cause))
    scaled = [sighting for sighting in sightings if any(seen.scaled for seen in sighting.by_rank.values())]
    if scaled:
        return _finding(job, scaled[0], Severity.WARNING, Confidence.HIGH, say.skipped(scaled[0]))
    return _finding(job, sightings[0], Severity.INFO, Confidence.HIGH, say.thrown_away(sightings[0]))


def _cause(sightings: list[NonFiniteStep], at: int) -> int:
    """Return the index of the first sighting that was used, or of the one a step earlier if that explains it.

    A rank that ended in between never saw that its gradients were used, but the others have NaN in their parameters.
    """
    before = at - 1
    if sightings[at].origins != {Origin.PARAMETER} or before < 0:
        return at
    return before if sightings[before].step == sightings[at].step - 1 else at


def _finding(job: Job, cause: NonFiniteStep, severity: Severity, sureness: Confidence, summary: str) -> Problem:
    return Problem(
        severity=severity,
        confidence=sureness,
        summary=summary,
        ranks=cause.ranks,
        hosts=hosts_of(job, cause.ranks),
        where=tuple(_place(rank, seen.where) for rank, seen in sorted(cause.by_rank.items()) if seen.where is not None),
        step=cause.step,
        tensor=next(iter(cause.first.tensors), None),
        evidence=(*say.seen_by_rank(cause), *say.rest(cause)),
        fix=say.fix(cause),
    )


def _place(rank: int, frame: Frame) -> Place:
    return Place(rank=rank, file=frame.file, line=frame.line, function=frame.function)
