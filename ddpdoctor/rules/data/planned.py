"""Findings computed from sizes alone: DD705, DD706, and DD701, DD703 and DD704 before any rank draws."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.data import Sharing
from ddpdoctor.model.findings import Severity
from ddpdoctor.model.words import count_of, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.registry import also, rule

if TYPE_CHECKING:
    from ddpdoctor.model.data import Shares


@rule(
    "DD705", "last-batch", Severity.INFO, "The last batch of an epoch is smaller than the others, or missing",
    after=("optimizer-drift",),
)  # fmt: skip
def check_last_batch(shares: Shares) -> Answer:
    """Report an epoch without any batch, or with a last batch of one sample or one that is not full."""
    plan, first = shares.plan, shares.ranks[0]
    batches, last = count_of(first.batches, "batch", "batches"), count_of(first.last_batch, "sample", "samples")
    seen = f"rank {first.rank}: {batches}, the last of {last}"
    without = tuple(rank.rank for rank in shares.ranks if not rank.batches)
    single = tuple(rank.rank for rank in shares.ranks if rank.last_batch == 1 < plan.batch_size)
    short = without or single or tuple(rank.rank for rank in shares.ranks if rank.last_batch < plan.batch_size)
    if not short:
        return passed(seen)
    is_each = len(short) == len(shares.ranks)
    whose = "every rank" if is_each else f"{len(short)} of {len(shares.ranks)} ranks"
    share = shares.ranks[short[0]]
    severity: Severity | None = None
    evidence: tuple[str, ...] = ()
    if without:
        severity = Severity.ERROR
        summary = "no rank has a batch, so an epoch trains nothing"
        if not is_each:
            it = verb(short, "it", "them")
            summary = f"{rank_list(short)} {verb(short, 'has', 'have')} no batch, so an epoch trains nothing on {it}"
        evidence = (f"a rank draws {share.drawn} of {plan.samples} samples, for batches of {plan.batch_size}",)
        fix = "find out why the dataset is empty: check its path, split and filter"
        if plan.samples:
            fix = "lower the batch size, start fewer ranks, or set drop_last=False"
    elif single:
        severity = Severity.WARNING
        summary = (
            f"the last batch of {whose} has 1 sample: BatchNorm1d raises an error in training, and other layers that "
            "normalize over the batch see only one sample"
        )
        fix = "set drop_last=True in the DataLoader, or choose another batch size"
    else:
        summary = (
            f"the last batch of {whose} has {share.last_batch} of {plan.batch_size} samples, so each sample has "
            f"{plan.batch_size / share.last_batch:.3g} times the weight"
        )
        fix = "set drop_last=True in the DataLoader if that matters"
    return judged([Problem(severity=severity, ranks=short, summary=summary, evidence=evidence, fix=fix)], seen)


@rule(
    "DD706", "accumulation-rest", Severity.INFO, "The number of batches is not a multiple of the accumulation steps",
    after=("optimizer-drift",),
)  # fmt: skip
def check_accumulation(shares: Shares) -> Answer:
    """Report an epoch whose last gradients are accumulated from fewer batches than those of other steps."""
    every, batches = shares.plan.accumulation, shares.ranks[0].batches
    if every == 1:
        return skipped("gradients are not accumulated (--grad-accumulation)")
    steps, rest = divmod(batches, every)
    seen = f"{count_of(batches, 'batch', 'batches')} are {count_of(steps, 'step', 'steps')} of {every} batches"
    if not rest:
        return passed(seen)
    left = f"{count_of(rest, 'batch is', 'batches are')} left"
    fix = "also step at the last batch of an epoch and divide the loss by the actual number of batches; or drop them"
    return judged([Problem(summary=f"{seen}, and {left}", fix=fix)], f"{seen}, {left}")


@also("DD701")
def judge_duplicates(shares: Shares) -> Answer:
    """DD701: whether ranks get the same samples, beyond those that a sampler repeats to make shares equal."""
    plan = shares.plan
    repeated = sum(rank.repeated for rank in shares.ranks)
    if plan.sharing is not Sharing.NONE or plan.world_size == 1:
        return judged([], f"every sample goes to one rank; {repeated} are repeated to make the shares equal")
    problem = Problem(
        ranks=tuple(rank.rank for rank in shares.ranks),
        summary=f"every rank trains on all {plan.samples} samples: an epoch is {plan.world_size} times the work of one "
        "process",
        evidence=("no sampler splits the samples between the ranks",),
        fix="pass sampler=DistributedSampler(dataset) to the DataLoader, and call sampler.set_epoch(epoch) in each "
        "epoch",
    )
    return judged([problem], problem.summary)


@also("DD703")
def judge_gaps(shares: Shares) -> Answer:
    """DD703: whether the same samples are missed in every epoch. With a shuffle they change each time."""
    missed, plan = shares.missed, shares.plan
    if missed is None:
        return judged([], "the number of missed samples depends on the shuffling of each rank")
    if not missed or plan.shuffle:
        again = ", different ones each time" if missed else ""
        return judged([], f"an epoch misses {missed} of {plan.samples} samples{again}")
    problem = Problem(
        severity=Severity.INFO,
        summary=f"every epoch misses the same {missed} of {plan.samples} samples, because nothing is shuffled",
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
    longer = tuple(rank.rank for rank in shares.ranks if rank.batches == most)
    shorter = tuple(rank.rank for rank in shares.ranks if rank.batches == least)
    problem = Problem(
        ranks=shorter,
        summary=f"{rank_list(longer)} {verb(longer, 'has', 'have')} {count_of(most, 'batch', 'batches')}, but "
        f"{rank_list(shorter)} {verb(shorter, 'has', 'have')} {least}: the job hangs or fails in the last batch",
        evidence=(f"{shares.plan.samples} samples are split over {shares.plan.world_size} ranks without padding",),
        fix="use DistributedSampler, which repeats samples until all ranks have the same number; or use "
        "drop_last=True or DDP's join()",
    )
    return judged([problem], problem.summary)
