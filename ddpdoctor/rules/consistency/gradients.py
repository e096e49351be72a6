"""DD503: the gradients given to the optimizer differ: they were not reduced, or were changed afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import What
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import group_alike, rank_list
from ddpdoctor.rules.consistency.problems import (
    DriftCause,
    Ground,
    blame_of,
    blame_outvoted,
    problems_of,
    seen,
    sides_words,
)
from ddpdoctor.rules.consistency.survey import ruling, survey
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpdoctor.model.consistency import Values
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.consistency.replicas import Sighting

MAX_NAMES = 3
"""How many parameters a sentence names. Our choice."""
_REDUCING_HOOKS = ("allreduce", "compress", "powersgd", "quantization")
"""Parts of the names of torch's own hooks that leave the same gradients on all ranks."""


@rule(
    "DD503",
    "grad-drift",
    Severity.ERROR,
    "The optimizers of the ranks got different gradients",
    after=("nonfinite-grad",),
)
def check_gradients(job: Job) -> Answer:
    """Report gradients that differ between ranks right before an optimizer's step."""
    seen = survey(job, What.GRADIENT, why_gradients_differ)
    return ruling(job, seen, problems_of(job, seen.found, "gradients"), "gradients")


def why_gradients_differ(sighting: Sighting) -> DriftCause:
    """Return the likely cause of gradients that differ after the reduction."""
    if sighting.replica.mesh_dims:
        return _apart_in_mesh(sighting)
    checks = (_bypassed, _under_no_sync, added_after_wrapping, _unfinished, _by_hook, _scaled_apart, _accumulated_after)
    for check in checks:
        cause = check(sighting)
        if cause is not None:
            return cause
    return _changed_after(sighting)


def _apart_in_mesh(sighting: Sighting) -> DriftCause:
    blame = blame_of(sighting.difference.splits)
    who = f"{rank_list(blame.ranks)} changed them" if blame.ground is Ground.MAJORITY else "they were changed"
    return DriftCause(
        name="apart in a mesh",
        words=f"ranks along the {sighting.replica.mesh_dims} dimension of the mesh have equal copies of these "
        f"parameters, but {who} before the optimizer, or computed them from other inputs",
        fix="give the ranks of one tensor parallel group the same batch and random state, and do the same work between "
        "backward and step() on all ranks",
        at_the_step=True,
    )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES]) + (" and more" if len(names) > MAX_NAMES else "")


def added_after_wrapping(sighting: Sighting) -> DriftCause | None:
    """Return the cause if DDP was never given the tensors that differ, and no majority agrees on one before them.

    DDP may wait for a parameter that was replaced, and then it reduces none of that bucket.
    """
    names = list(dict.fromkeys(name for each in sighting.values for name in each.unreduced))
    splits = sighting.difference.splits
    blame = seen(each for each in sighting.values if each.unreduced)
    differs = [split.row.name in names for split in splits]
    if blame is None or not any(differs) or (not differs[0] and blame_of(splits[:1]).ground is Ground.MAJORITY):
        return None
    named = _first_few(names)
    return DriftCause(
        name="added after wrapping",
        words=f"DDP does not reduce {named}: added, replaced or unfrozen after wrapping",
        fix="wrap the model in DDP after you add all parameters and set requires_grad; if you add, replace or unfreeze "
        "parameters later, wrap the model and create the optimizer again",
        blame=blame,
        evidence=(f"parameters unknown to DDP on {rank_list(blame.ranks)}: {named}",),
    )


def _unfinished(sighting: Sighting) -> DriftCause | None:
    """Return the cause if DDP still waited for gradients when the optimizer made its step."""
    waiting = [each for each in sighting.values if each.unfinished]
    if not waiting:
        return None
    names = list(dict.fromkeys(name for each in waiting for name in each.unfinished))
    named = _first_few(names)
    return DriftCause(
        name="unfinished",
        words=f"backward left {named} without a gradient, so DDP did not finish the reduction",
        fix="pass find_unused_parameters=True to DistributedDataParallel on all ranks; or use every output of "
        "forward in the loss, and remove or freeze unused parameters before you wrap the model",
        blame=seen(waiting),
        at_the_step=True,
        evidence=(
            f"gradients that DDP was waiting for at the step on {rank_list(each.rank for each in waiting)}: {named}",
        ),
    )


def _bypassed(sighting: Sighting) -> DriftCause | None:
    blame = seen(each for each in sighting.values if each.forwards == 0 and not _was_reduced(sighting, each))
    if blame is None:
        return None
    return DriftCause(
        name="bypassed",
        words="the training step bypassed DDP: its forward did not run before the step",
        fix="call the DDP object itself in training, `model(x)`, not `model.module(x)` or the wrapped module",
        blame=blame,
        unsynchronized=True,
        at_the_step=True,
        evidence=(f"no DDP forward with gradients since the previous step on {rank_list(blame.ranks)}",),
    )


def _was_reduced(sighting: Sighting, values: Values) -> bool:
    """Return whether there were at least as many reductions as steps since the last equal state, or since the start."""
    before = next((each for each in sighting.before if each.rank == values.rank), None)
    reductions = values.reductions - (before.reductions if before else 0)
    return reductions >= values.steps - (before.steps if before else 0) > 0


def _under_no_sync(sighting: Sighting) -> DriftCause | None:
    blame = seen(each for each in sighting.values if 0 < each.forwards == each.unreduced_forwards)
    if blame is None:
        return None
    return DriftCause(
        name="no_sync",
        words="all forwards since the previous step ran under no_sync(), which skips the reduction",
        fix="run the forward and backward of the last batch before step() outside no_sync(): the forward decides "
        "whether gradients are reduced",
        blame=blame,
        unsynchronized=True,
        at_the_step=True,
        evidence=(f"all DDP forwards since the previous step were under no_sync() on {rank_list(blame.ranks)}",),
    )


def _by_hook(sighting: Sighting) -> DriftCause | None:
    hooks = sorted({each.hook for each in sighting.values if each.hook})
    own = [hook for hook in hooks if not any(name in hook.lower() for name in _REDUCING_HOOKS)]
    if not own or blame_of(sighting.difference.splits).ground is Ground.MAJORITY:
        return None
    return DriftCause(
        name="communication hook",
        words=f"the communication hook {own[0]} returns different gradients on different ranks",
        fix="make the hook return the same result on all ranks for each bucket, such as the mean by all_reduce",
        evidence=(f"the script registered the communication hook {', '.join(own)}",),
    )


def _scaled_apart(sighting: Sighting) -> DriftCause | None:
    sides = group_alike({each.rank: each.scale for each in sighting.values if each.scale is not None})
    if len(sides) < 2:
        return None
    return DriftCause(
        name="scaled apart",
        words=f"the gradient scaler's scale is {sides_words(sides)}",
        fix="create GradScaler with the same arguments on all ranks, load its state on all ranks, and call update() on "
        "all ranks after each step()",
        blame=blame_outvoted([ranks for _, ranks in sides]),
        at_the_step=True,
    )


def _accumulated_after(sighting: Sighting) -> DriftCause | None:
    some = next((each for each in sighting.values if 0 < each.unreduced_forwards < each.forwards), None)
    if some is None or blame_of(sighting.difference.splits).ground is Ground.MAJORITY:
        return None
    return DriftCause(
        name="accumulated after the reduction",
        words="gradients were added under no_sync() or changed after the last reduction",
        fix="use no_sync() for all accumulated batches but the last one",
        at_the_step=True,
        evidence=(
            f"{some.unreduced_forwards} of {some.forwards} forwards since the previous step were under no_sync()",
        ),
    )


def _changed_after(sighting: Sighting) -> DriftCause:
    blame = blame_of(sighting.difference.splits)
    one = blame.ground is Ground.MAJORITY
    who = f"{rank_list(blame.ranks)} changed them" if one else "they were changed"
    more = "" if one else ", or added to by a second backward, such as that of a reentrant checkpoint"
    return DriftCause(
        name="changed after the reduction",
        words=(
            f"{who} after DDP had reduced them (edited, or clipped or scaled by a value that differs between "
            f"ranks{more})"
        ),
        fix="do the same between backward and step() on all ranks: clip by the norm of the reduced gradients, scale by "
        "a common value, and avoid branches on the rank; checkpoint with use_reentrant=False",
        at_the_step=True,
    )
