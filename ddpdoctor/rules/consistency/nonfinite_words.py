"""Non-finite local gradients of one step, and the sentences about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import Origin
from ddpdoctor.model.rank_words import rank_list

if TYPE_CHECKING:
    from ddpdoctor.model.consistency import NonFinite

MAX_RANKS = 4
"""Ranks whose gradients are described one by one. Our choice."""
LONG_ROW = 20
"""Skipped steps in a row that earn a gradient scaler a warning. Our choice, see the rule's page."""

_FIXES = {
    Origin.INPUT: "look at the samples that this rank was given in that step, and mend or leave out those that are not "
    "finite",
    Origin.PARAMETER: "look at what changed the parameters in the step before: the learning rate, an overflow in the "
    "reduction (a half-precision communication hook), weights that were loaded",
    Origin.LOSS: "look for the logarithm, root or quotient of zero in loss and model, or for an overflow in half "
    "precision",
    Origin.GRADIENT: "run that step on this rank under torch.autograd.set_detect_anomaly(True): it names the operation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteStep:
    """Ranks whose own gradients of one step of one model were not finite."""

    step: int
    by_rank: dict[int, NonFinite]
    others: tuple[int, ...]
    """Ranks of the same group whose gradients were checked and were finite in this step."""
    unseen: tuple[int, ...]
    """Ranks of the group whose gradients were not checked."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks, sorted."""
        return tuple(sorted(self.by_rank))

    @property
    def first(self) -> NonFinite:
        """Return what the lowest of the ranks saw."""
        return self.by_rank[min(self.by_rank)]

    @property
    def used(self) -> bool:
        """Return whether training used these gradients."""
        return any(seen.used for seen in self.by_rank.values())

    @property
    def origins(self) -> set[Origin]:
        """Return what was the first to be non-finite, over all ranks."""
        return {seen.origin for seen in self.by_rank.values()}


def used(cause: NonFiniteStep) -> str:
    """Return the summary of gradients that an optimizer used."""
    if cause.origins == {Origin.PARAMETER}:
        return (
            f"parameters of {rank_list(cause.ranks)} were not finite before the backward of step {cause.step}, though "
            f"no local gradient had been"
        )
    return f"{_computed(cause)}; {_spread(cause)}"


def skipped(cause: NonFiniteStep) -> str:
    """Return the summary for steps that a gradient scaler skipped because of these gradients."""
    longest = max(seen.in_a_row for seen in cause.by_rank.values())
    if longest >= LONG_ROW:
        return (
            f"the gradient scaler has skipped {longest} steps in a row, up to step {cause.step}: the "
            f"gradients of {rank_list(cause.ranks)} are not finite at any scale"
        )
    return f"{_computed(cause)}; the gradient scaler skipped the step, and the batches of all ranks are lost"


def thrown_away(cause: NonFiniteStep) -> str:
    """Return the summary for gradients of which no use was seen."""
    return f"{_computed(cause)}; no optimizer was seen to use it"


def _computed(cause: NonFiniteStep) -> str:
    value = _value(cause)
    tensor = next(iter(cause.first.tensors), "a parameter")
    return (
        f"{rank_list(cause.ranks)} computed {value} as the gradient of {tensor} in step {cause.step}, {_first(cause)}"
    )


def _value(cause: NonFiniteStep) -> str:
    return "NaN" if any(seen.is_nan for seen in cause.by_rank.values()) else "inf"


def _first(cause: NonFiniteStep) -> str:
    """Say what was the first to be non-finite."""
    if cause.origins == {Origin.GRADIENT}:
        return "and loss and input were finite"
    told = [origin.value for origin in Origin if origin in cause.origins and origin is not Origin.GRADIENT]
    return f"and its {' or '.join(told)} was not finite before"


def _spread(cause: NonFiniteStep) -> str:
    return "the reduction gave it to all ranks" if cause.others or cause.unseen else "the optimizer used it"


def seen_by_rank(cause: NonFiniteStep) -> list[str]:
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


def rest(cause: NonFiniteStep) -> list[str]:
    """Return what is known of the group's other ranks, and how often it happened."""
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


def fix(cause: NonFiniteStep) -> str:
    """Return what to do."""
    return _FIXES[cause.first.origin]
