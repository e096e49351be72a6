"""Sentences about local gradients that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import Origin
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import NonFinite

    from .nonfinite import Sighting

MAX_RANKS = 4
"""Ranks whose gradients are told one by one. Ours."""
LONG_ROW = 20
"""Steps that a gradient scaler may skip one after another. Ours, see the rule's page."""

_FIXES = {
    Origin.INPUT: "look at the samples that this rank was given in that step, and mend or leave out those that are not "
    "finite",
    Origin.PARAMETER: "look at what changed the parameters in the step before: the learning rate, an overflow in the "
    "reduction (a half-precision communication hook), weights that were loaded",
    Origin.LOSS: "look for the logarithm, root or quotient of zero in loss and model, or for an overflow in half "
    "precision",
    Origin.GRADIENT: "run that step on this rank under torch.autograd.set_detect_anomaly(True): it names the operation",
}


def used(cause: Sighting) -> str:
    """Return the summary of gradients that an optimizer used."""
    if cause.origins == {Origin.PARAMETER}:
        return (
            f"parameters of {rank_list(cause.ranks)} were not finite before the backward of step {cause.step}, though "
            f"no local gradient had been"
        )
    return f"{_computed(cause)}; {_spread(cause)}"


def skipped(cause: Sighting) -> str:
    """Return the summary of gradients for whose sake a gradient scaler skipped steps."""
    longest = max(seen.in_a_row for seen in cause.by_rank.values())
    if longest >= LONG_ROW:
        return (
            f"the gradient scaler has skipped {longest} steps in a row, up to step {cause.step}: the "
            f"gradients of {rank_list(cause.ranks)} are not finite at any scale"
        )
    return f"{_computed(cause)}; the gradient scaler skipped the step, and the batches of all ranks are lost"


def thrown_away(cause: Sighting) -> str:
    """Return the summary of gradients that were not seen to be used."""
    return f"{_computed(cause)}; no optimizer was seen to use it"


def _computed(cause: Sighting) -> str:
    value = _value(cause)
    tensor = next(iter(cause.first.tensors), "a parameter")
    return (
        f"{rank_list(cause.ranks)} computed {value} as the gradient of {tensor} in step {cause.step}, {_first(cause)}"
    )


def _value(cause: Sighting) -> str:
    return "NaN" if any(seen.is_nan for seen in cause.by_rank.values()) else "inf"


def _first(cause: Sighting) -> str:
    """Say what was first not to be a number."""
    if cause.origins == {Origin.GRADIENT}:
        return "and loss and input were finite"
    told = [origin.value for origin in Origin if origin in cause.origins and origin is not Origin.GRADIENT]
    return f"and its {' or '.join(told)} was not finite before"


def _spread(cause: Sighting) -> str:
    return "the reduction gave it to all ranks" if cause.others or cause.unseen else "the optimizer used it"


def seen_by_rank(cause: Sighting) -> list[str]:
    """Return what each rank saw in that step."""
    told = [_rank_words(rank, cause.by_rank[rank]) for rank in cause.ranks[:MAX_RANKS]]
    more = len(cause.ranks) - MAX_RANKS
    return [*told, f"{more} more ranks likewise"] if more > 0 else told


def _rank_words(rank: int, seen: NonFinite) -> str:
    names = ", ".join(seen.tensors)
    dots = ", ..." if seen.count > len(seen.tensors) else ""
    held = "NaN" if seen.is_nan else "inf"
    note = f"; {seen.note}" if seen.note else ""
    return f"rank {rank}: {held} in the gradients of {seen.count} of {seen.of} parameters ({names}{dots}){note}"


def rest(cause: Sighting) -> list[str]:
    """Return what is known of the other ranks of the group, and how often it happened."""
    told = []
    if cause.others:
        told.append(
            f"the gradients of {rank_list(cause.others)} were finite in step {cause.step}, before the reduction"
        )
    if cause.unseen:
        told.append(f"the gradients of {rank_list(cause.unseen)} were not looked at")
    often = max(seen.times for seen in cause.by_rank.values())
    if not cause.used and often > 1:
        told.append(f"this was so in {often} backwards until then")
    return told


def fix(cause: Sighting) -> str:
    """Return what to do."""
    return _FIXES[cause.first.origin]
