"""DD703: samples that no rank gets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpdoctor.model.data import Cut
from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data import words
from ddpdoctor.rules.data.evidence import (
    are_distinct,
    find_overlap,
    must_leave_gap,
    shows_all,
    sum_of_all,
    with_counts,
    xor_of_all,
)
from ddpdoctor.rules.data.shared import NO_REPLICAS, Shared, judge_loaders, was_trained
from ddpdoctor.rules.majority import Voice, compare
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.model.data import EpochSeen, LoaderSeen, SamplerSeen
    from ddpdoctor.rules.data.shared import Replicas


NO_MAJORITY = "there is no majority, so it is unknown which rank is wrong"
SHARE_ALIKE = (
    "use the same sampler seed on all ranks, call set_epoch with the same number on all ranks, and omit num_replicas "
    "and rank"
)
SPLIT_ALIKE = (
    "use the same split on all ranks: random_split(..., generator=torch.Generator().manual_seed(0)), or indices from "
    "one seed; if each rank should have its own part, remove the DistributedSampler"
)
ACCELERATES = "accelerate.data_loader."
TORCHS_OWN = "torch.utils.data.distributed.DistributedSampler"
MIN_MISSING_BATCHES = 2
"""The fewest batches of each rank that must be missing. ``drop_last`` and padding change at most one of them."""


@rule(
    "DD703",
    "shard-gap",
    Severity.ERROR,
    "The ranks' shares of the data overlap or miss samples",
    after=("optimizer-drift",),
)
def check_shards(replicas: Replicas) -> Answer:
    """Report ranks whose shares of a dataset do not add up to the whole dataset."""
    healthy = "the shares of the ranks cover each sample once"
    answer = with_counts(replicas, judge_loaders(replicas, _judge, healthy, of_any_job=True))
    return answer if answer.problems else find_overlap(replicas) or answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShareFault:
    """Why shares do not fit together."""

    words: str
    ranks: tuple[int, ...]
    """The ranks it concerns."""
    evidence: tuple[str, ...]
    sure: bool = True
    """Whether these ranks are certain. If not, they are certain only if other ranks are a majority."""
    fix: str = SHARE_ALIKE
    summary: str = ""
    """The summary without the loader, if it is not about shares that overlap."""


def _judge(replicas: Replicas, shared: Shared) -> Answer:
    name = words.name_of(shared.first())
    twice = _cut_twice(replicas, shared)
    if twice is not None:
        return judged([_finding(replicas, shared, twice)])
    if not replicas.by_model:
        return skipped(NO_REPLICAS)
    if any(loader.iterable or not loader.indices_seen for loader in shared.seen.values()):
        return skipped(f"{name}: the indices of the ranks were not seen")
    if len({loader.samples for loader in shared.seen.values()}) > 1 or not shared.first().samples:
        return skipped(f"{name}: the datasets of the ranks have different or unknown lengths")
    passes = _whole_passes(replicas, shared)
    if not passes:
        return skipped(f"{name}: no training pass was seen on all ranks")
    samplers = {rank: loader.sampler for rank, loader in shared.seen.items() if loader.sampler is not None}
    known = {rank: sampler for rank, sampler in samplers.items() if sampler.replicas is not None}
    if len(known) < len(shared.seen):
        return _judge_drawn(replicas, shared, passes)
    return _judge_samplers(replicas, shared, passes, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """How much of the data all ranks together see in one epoch, if it is divided twice."""

    count: str
    """Such as "216 of 640 samples"."""
    proof: str
    is_counted: bool = False


def _cut_twice(replicas: Replicas, shared: Shared) -> _ShareFault | None:
    """Return the cause if the data is divided among the ranks a second time after each rank has its share."""
    by_rank = [loader.cuts for _, loader in sorted(shared.seen.items())]
    if not shared.is_whole or len({tuple((cut.what, cut.type) for cut in cuts) for cuts in by_rank}) > 1:
        return None
    for level in zip(*by_rank, strict=True):
        numbers = [cut.rank for cut in level if cut.rank is not None]
        if level[0].what != "loader" and len(set(numbers)) < len(numbers):
            return None
    cuts = list(by_rank[0])
    own = _own_part(shared)
    samplers = [cut for cut in cuts if cut.what == "sampler"]
    seen = None
    if shared.first().iterable:
        seen = _seen_of_stream(shared, cuts)
    elif len(samplers) > 1:
        seen = _seen_by_samplers(replicas, shared, samplers)
    elif samplers and own is not None and samplers[0].replicas == shared.size:
        seen, cuts = own, [*samplers, Cut(what="part", type="", replicas=None, rank=None)]
    elif samplers and len(cuts) > 1 and samplers[0].replicas == shared.size:
        seen = _seen_of_own(shared, cuts[-1])
    if seen is None:
        return None
    again, first = cuts[0], cuts[-1]
    return _ShareFault(
        words="",
        summary=f"all ranks together see {seen.count} in an epoch: the data is divided among the ranks twice, by "
        f"{_cut_words(first)} and again by {_cut_words(again)}",
        ranks=shared.ranks,
        evidence=(
            seen.proof,
            *(f"{_cut_words(cut)}: rank {cut.rank} of {cut.replicas} on rank {shared.ranks[0]}"
              for cut in (first, again) if cut.replicas is not None),
        ),
        sure=seen.is_counted,
        fix=_fix_of_cuts(first, again),
    )  # fmt: skip


def _seen_by_samplers(replicas: Replicas, shared: Shared, samplers: list[Cut]) -> _Seen | None:
    """Return what is seen through two samplers that divide, if the drawn indices confirm it."""
    samples, batch = shared.first().samples or 0, shared.first().batch_size or 1
    shares = math.prod(cut.replicas or shared.size for cut in samplers)
    expected = samples / shares
    if shares <= shared.size or (samples - expected * shared.size) / shared.size < MIN_MISSING_BATCHES * batch:
        return None
    passes = _whole_passes(replicas, shared)
    if any(epoch.drawn > expected + 2 * batch for found in passes.values() for epoch in found.values()):
        return None
    for number, found in passes.items():
        drawn = sum(epoch.drawn for epoch in found.values())
        ends = [epoch.complete or _has_drawn_all(shared.seen[rank], epoch) for rank, epoch in found.items()]
        if all(ends) and all(epoch.drawn >= expected - 2 * batch for epoch in found.values()):
            proof = f"indices drawn in pass {number}: {words.by_rank({r: e.drawn for r, e in found.items()})}"
            return _Seen(count=f"{drawn} of {samples} samples", proof=proof, is_counted=True)
    known = samplers[0].type.startswith(ACCELERATES) and samplers[-1].type == TORCHS_OWN
    if not known or not passes:
        return None
    proof = f"no pass was complete; each rank gets {math.ceil(expected)} of {samples} samples"
    return _Seen(count=f"{math.ceil(expected * shared.size)} of {samples} samples", proof=proof, is_counted=True)


def _has_drawn_all(loader: LoaderSeen, epoch: EpochSeen) -> bool:
    """Return whether the sampler had no more indices, although the script left the loop before the loader's end."""
    planned = loader.sampler.planned if loader.sampler is not None else None
    return planned is not None and epoch.drawn >= planned


def _own_part(shared: Shared) -> _Seen | None:
    """Return what is seen if each rank's dataset is its own part (Subset) of one dataset, and divided again."""
    loaders = shared.seen.values()
    wholes = {loader.part_of for loader in loaders}
    parts = [loader.chosen for loader in loaders if loader.chosen is not None]
    if len(wholes) > 1 or "" in wholes or len(parts) < shared.size or len({part.of for part in parts}) > 1:
        return None
    whole = parts[0].of
    ranges = sorted((part.start, part.step, part.count) for part in parts if part.start is not None and part.step)
    steps = {step for _, step, _ in ranges}
    in_turn = all(one[0] + one[2] <= other[0] for one, other in pairwise(ranges))
    apart = len(ranges) == len(parts) and len(steps) == 1
    apart = apart and ((steps == {1} and in_turn) or len({start % step for start, step, _ in ranges}) == len(ranges))
    totals, xors = [part.total for part in parts], [part.xor for part in parts]
    if not apart and sum(part.count for part in parts) == whole and None not in totals:
        xor = 0
        for one in xors:
            xor ^= one or 0
        apart = (sum(one or 0 for one in totals), xor) == (sum_of_all(whole), xor_of_all(whole))
    if not apart:
        return None
    seen = sum(math.ceil(part.count / shared.size) for part in parts)
    held = words.by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"the dataset of each rank is another part of {whole} samples: {held}"
    return _Seen(count=f"{seen} of {whole} samples", proof=proof, is_counted=True)


def _seen_of_own(shared: Shared, dataset: Cut) -> _Seen | None:
    """Return what is seen if a dataset divides itself, holds other values on each rank, and a sampler divides again."""
    held = {rank: loader.held for rank, loader in shared.seen.items()}
    if dataset.replicas not in (None, shared.size) or "" in held.values() or len(set(held.values())) < len(held):
        return None
    samples = [loader.samples or 0 for loader in shared.seen.values()]
    seen = sum(math.ceil(count / shared.size) for count in samples)
    counts = words.by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"each rank's {words.class_name(dataset.type)} holds other values; samples: {counts}"
    return _Seen(count=f"{seen} of {sum(samples)} samples", proof=proof)


def _seen_of_stream(shared: Shared, cuts: list[Cut]) -> _Seen | None:
    """Return what is seen of a dataset without indices, if two places divide it."""
    shares = math.prod(cut.replicas or shared.size for cut in cuts)
    if shares <= shared.size or not any(cut.what == "dataset" for cut in cuts):
        return None
    if any(cut.what == "loader" for cut in cuts):
        proof = "rank 0 reads for all ranks, and its dataset yields only the share of rank 0"
    else:
        proof = f"each rank takes one of {shared.size} parts of what its dataset yields, and that is a share already"
    return _Seen(count=f"only about 1 of {round(shares / shared.size)} samples", proof=proof)


def _cut_words(cut: Cut) -> str:
    name = words.class_name(cut.type)
    if cut.type.startswith(ACCELERATES):
        return f"accelerate's prepare ({name})"
    if cut.what == "part":
        return "the dataset, which is each rank's own part"
    return f"the dataset ({name})" if cut.what == "dataset" else name


def _fix_of_cuts(first: Cut, again: Cut) -> str:
    name = words.class_name(first.type)
    if first.what == "part":
        whole = "pass the whole dataset to the DataLoader instead of each rank's part"
    elif first.what == "dataset":
        whole = f"let {name} give all samples on every rank"
    else:
        whole = f"remove sampler={name}(...) from the DataLoader"
    if again.type.startswith(ACCELERATES):
        return (
            f"{whole}: accelerate's prepare(), which transformers' Trainer uses too, divides the batches among the "
            "ranks; or do not pass that DataLoader to prepare()"
        )
    if "lightning" in again.type:
        return f"pass use_distributed_sampler=False to the Trainer, or {whole}"
    already = "each rank has its own part already" if first.what == "part" else f"{_cut_words(first)} divides the data"
    return f"remove {words.class_name(again.type)} (shuffle=True does the rest), because {already}; or {whole}"


def _whole_passes(replicas: Replicas, shared: Shared) -> dict[int, dict[int, EpochSeen]]:
    """Return the passes that all ranks made, only those of training unless the user named the loader."""
    return {
        number: found
        for number, found in shared.passes().items()
        if len(found) == len(shared.seen)
        and (not replicas.trained_only or all(was_trained(epoch) for epoch in found.values()))
    }


def _judge_samplers(
    replicas: Replicas,
    shared: Shared,
    passes: Mapping[int, Mapping[int, EpochSeen]],
    samplers: Mapping[int, SamplerSeen],
) -> Answer:
    """Judge samplers that expose their parameters."""
    cause = _missing_shares(replicas, shared, samplers) or _other_parts(shared, samplers)
    if cause:
        return judged([_finding(replicas, shared, cause)])
    for number, found in passes.items():
        if not all(sampler.shuffle for sampler in samplers.values()) or not _is_proved(shared, found, samplers):
            continue
        cause = _disagreement(shared, found, samplers, number)
        if cause:
            return judged([_finding(replicas, shared, cause)])
    if not shared.is_whole:
        return skipped(f"{words.name_of(shared.first())}: it was not seen on all ranks of the group")
    return _settle_samplers(shared, passes, samplers)


def _settle_samplers(
    shared: Shared, passes: Mapping[int, Mapping[int, EpochSeen]], samplers: Mapping[int, SamplerSeen]
) -> Answer:
    """Pass if torch's own sampler has parameters that agree, or if the arithmetic shows all samples."""
    samples = shared.first().samples or 0
    if all(sampler.standard and sampler.rank is not None for sampler in samplers.values()):
        return passed()
    if any(shows_all(samples, tuple(found.values())) for found in passes.values()):
        return passed()
    return skipped(f"{words.name_of(shared.first())}: the shares of its sampler cannot be derived from its sums")


def _missing_shares(replicas: Replicas, shared: Shared, samplers: Mapping[int, SamplerSeen]) -> _ShareFault | None:
    """Return the cause if samplers are for more ranks than exist. Ranks with equal numbers are duplicates instead."""
    counts = {sampler.replicas for sampler in samplers.values()}
    numbers = {sampler.rank for sampler in samplers.values()}
    if not shared.is_whole or len(counts) > 1 or None in numbers or len(numbers) < len(samplers):
        return None
    count = counts.pop() or 0
    if count <= shared.size or count == replicas.world_size or not all(s.standard for s in samplers.values()):
        return None
    missing = sorted(set(range(count)) - {number for number in numbers if number is not None})
    return _ShareFault(
        words=f"their samplers are for {count} ranks, but there are {shared.size}",
        ranks=shared.ranks,
        evidence=(
            f"num_replicas={count}; rank: {words.by_rank({rank: one.rank for rank, one in samplers.items()})}",
            f"no rank draws the shares of {rank_list(missing)}, {len(missing)} of {count}",
        ),
    )


def _other_parts(shared: Shared, samplers: Mapping[int, SamplerSeen]) -> _ShareFault | None:
    """Return the cause if each rank split off its own part before the dataset was shared out."""
    wholes = {loader.part_of for loader in shared.seen.values()}
    numbers = {(sampler.replicas, sampler.rank) for sampler in samplers.values()}
    if len(wholes) > 1 or "" in wholes or numbers != {(shared.size, rank) for rank in range(shared.size)}:
        return None
    parts = {rank: loader.part for rank, loader in shared.seen.items()}
    split = compare(Voice(host="", value=part or None, ranks=(rank,)) for rank, part in parts.items())
    if split is None or not all(sampler.standard for sampler in samplers.values()):
        return None
    return _ShareFault(
        words="the ranks use different parts (Subset) of the dataset",
        ranks=split.ranks,
        evidence=(
            f"digest of the indices in the Subset: {words.by_rank(parts)}",
            "the digests of the underlying dataset are equal",
            "" if split.majority is not None else NO_MAJORITY,
        ),
        sure=False,
        fix=SPLIT_ALIKE,
    )


def _is_proved(shared: Shared, found: Mapping[int, EpochSeen], samplers: Mapping[int, SamplerSeen]) -> bool:
    """Return whether different parameters do leave a gap. Samplers other than torch's need the sums as proof."""
    samples = shared.first().samples or 0
    epochs = tuple(found.values())
    done = shared.is_whole and all(epoch.complete for epoch in epochs)
    if all(sampler.standard for sampler in samplers.values()):
        return not (done and shows_all(samples, epochs))
    return done and are_distinct(epochs) and must_leave_gap(samples, epochs)


def _disagreement(
    shared: Shared, found: Mapping[int, EpochSeen], samplers: Mapping[int, SamplerSeen], number: int
) -> _ShareFault | None:
    """Return the cause if the sum of seed and epoch, by which torch's sampler shuffles, differs between ranks."""
    seeds = {rank: sampler.seed for rank, sampler in samplers.items()}
    epochs = {rank: epoch.set_epoch for rank, epoch in found.items()}
    if None in seeds.values():
        return None
    if None in epochs.values():
        epochs = dict.fromkeys(epochs, 0)
    sums = {rank: (seed or 0) + (epochs[rank] or 0) for rank, seed in seeds.items()}
    split = compare(Voice(host="", value=value, ranks=(rank,)) for rank, value in sums.items())
    if split is None:
        return None
    differing = {
        what: values
        for what, values in (("seeds", seeds), ("epochs (set_epoch)", epochs))
        if len(set(values.values())) > 1
    }
    return _ShareFault(
        words=f"their samplers have different {' and '.join(differing)}",
        ranks=split.ranks,
        evidence=(
            *(f"{what}: {words.by_rank(values)} (pass {number})" for what, values in differing.items()),
            _sums_words(shared, found, number),
            "" if split.majority is not None else NO_MAJORITY,
        ),
        sure=False,
    )


def _judge_drawn(replicas: Replicas, shared: Shared, passes: Mapping[int, Mapping[int, EpochSeen]]) -> Answer:
    """Judge shares by sums alone: they must be the same in each pass and not make up the dataset."""
    samples = shared.first().samples or 0
    whole = {number: found for number, found in passes.items() if all(epoch.complete for epoch in found.values())}
    name = words.name_of(shared.first())
    if not shared.is_whole or not whole:
        return skipped(f"{name}: no complete pass was seen on all ranks of the group")
    if any(shows_all(samples, tuple(found.values())) for found in whole.values()):
        return passed()
    number, found = next(iter(whole.items()))
    epochs = tuple(found.values())
    as_many = sum(epoch.drawn for epoch in epochs) == samples
    shares = {
        tuple((rank, epoch.drawn, epoch.total, epoch.xor) for rank, epoch in sorted(those.items()))
        for those in whole.values()
    }
    is_proved = as_many and are_distinct(epochs) and must_leave_gap(samples, epochs)
    if is_proved and len(whole) > 1 and len(shares) == 1:
        cause = _ShareFault(
            words="each rank has the same samples in each epoch, and together they do not cover the dataset",
            ranks=shared.ranks,
            evidence=(_sums_words(shared, found, number),),
        )
        return judged([_finding(replicas, shared, cause)])
    return skipped(f"{name}: its sampler does not describe its shares, and the sums do not show them")


def _finding(replicas: Replicas, shared: Shared, cause: _ShareFault) -> Problem:
    loader = shared.first()
    is_sure = cause.sure or len(cause.ranks) < len(shared.seen)
    return Problem(
        confidence=Confidence.HIGH if is_sure else Confidence.MEDIUM,
        ranks=cause.ranks,
        hosts=words.hosts_of(replicas, cause.ranks),
        where=words.places_of(shared, cause.ranks),
        summary=f"{cause.summary or _overlap_words(shared, cause)} ({words.name_of(loader)})",
        evidence=tuple(filter(None, (
            *cause.evidence,
            "" if cause.summary else words.shared_out(loader, shared.size),
            f"sampler {loader.sampler.type}" if loader.sampler is not None else "",
        ))),
        fix=cause.fix,
    )  # fmt: skip


def _overlap_words(shared: Shared, cause: _ShareFault) -> str:
    return f"the shares of {rank_list(shared.ranks)} overlap or miss samples: {cause.words}"


def _sums_words(shared: Shared, found: Mapping[int, EpochSeen], number: int) -> str:
    """Compare what was drawn with the dataset, and estimate how many samples independent shares leave out."""
    samples = shared.first().samples
    if not samples or not shared.is_whole or not all(epoch.complete for epoch in found.values()):
        return ""
    drawn, total = (sum(getattr(epoch, name) for epoch in found.values()) for name in ("drawn", "total"))
    unseen = round(samples * math.prod(1 - min(1, epoch.drawn / samples) for epoch in found.values()))
    return (
        f"pass {number}: all ranks together drew {drawn} indices with a sum of {total}; {samples} samples drawn once "
        f"have {sum_of_all(samples)}; independent shares miss about {unseen} of {samples} samples"
    )
