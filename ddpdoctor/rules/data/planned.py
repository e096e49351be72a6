"""What arithmetic alone says about DD701, DD703 and DD704. Elsewhere these rules use what ranks actually drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Severity
from ddpdoctor.model.rank_words import rank_list
from ddpdoctor.model.sharing import Sharing
from ddpdoctor.rules.answers import Answer, Problem, judged
from ddpdoctor.rules.registry import also

if TYPE_CHECKING:
    from ddpdoctor.model.sharing import Shares


@also("DD701")
def judge_duplicates(shares: Shares) -> Answer:
    """DD701: whether ranks get the same samples, beyond those that a sampler repeats to make shares equal."""
    plan = shares.plan
    repeated = sum(one.repeated for one in shares.ranks)
    if plan.sharing is not Sharing.NONE or plan.world_size == 1:
        return judged([], f"every sample goes to one rank, {repeated} repeated to come out even")
    problem = Problem(
        severity=Severity.ERROR,
        ranks=tuple(one.rank for one in shares.ranks),
        summary=f"every rank goes over all {plan.samples} samples: an epoch is {plan.world_size} times the work of one "
        "process, and its ranks train on the same data",
        evidence=("no sampler shares the samples out",),
        fix="give the DataLoader sampler=DistributedSampler(dataset), and call sampler.set_epoch(epoch) each epoch",
    )
    return judged([problem], problem.summary)


@also("DD703")
def judge_gaps(shares: Shares) -> Answer:
    """DD703: whether the same samples are missed in every epoch. With a shuffle they change each time."""
    missed, plan = shares.missed, shares.plan
    if missed is None:
        return judged([], "how many samples are missed depends on how each rank shuffles")
    if not missed or plan.shuffle:
        again = ", others in each epoch" if missed else ""
        return judged([], f"{missed} of {plan.samples} samples are missed{again}")
    problem = Problem(
        severity=Severity.INFO,
        summary=f"the same {missed} of {plan.samples} samples are missed in every epoch, because nothing is shuffled",
        fix="set drop_last=False, or shuffle",
    )
    return judged([problem], problem.summary)


@also("DD704")
def judge_batches(shares: Shares) -> Answer:
    """DD704: whether ranks have different numbers of batches."""
    batches = shares.batches
    if len(batches) == 1:
        return judged([], f"{batches[0]} on every rank")
    most, least = batches[0], batches[-1]
    longer = tuple(one.rank for one in shares.ranks if one.batches == most)
    shorter = tuple(one.rank for one in shares.ranks if one.batches == least)
    problem = Problem(
        severity=Severity.ERROR,
        ranks=shorter,
        summary=f"{rank_list(longer)} {_have(longer)} {most} batches and {rank_list(shorter)} {_have(shorter)} "
        f"{least}: in the last of them the others wait for {rank_list(shorter)}, and the job hangs or fails",
        evidence=(f"{shares.plan.samples} samples are split over {shares.plan.world_size} ranks without padding",),
        fix="use DistributedSampler, which repeats samples until all ranks have equally many; or drop_last=True; or "
        "train inside DDP's join()",
    )
    return judged([problem], problem.summary)


def _have(ranks: tuple[int, ...]) -> str:
    return "has" if len(ranks) == 1 else "have"
