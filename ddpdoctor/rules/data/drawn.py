"""DD701 to DD704: samples that several ranks get or none, uneven batches, and one order in every epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpdoctor.model.data import Cut
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.words import count_of, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data.shared import (
    NO_REPLICAS,
    Shared,
    are_distinct,
    by_rank,
    class_name,
    drawn_words,
    drew_all,
    find_overlap,
    hosts_of,
    judge_loaders,
    must_leave_gap,
    name_of,
    places_of,
    same_batches,
    same_contents,
    shared_out,
    shows_all,
    sum_of_all,
    was_trained,
    were_compared,
    with_counts,
    xor_of_all,
)
from ddpdoctor.rules.majority import Voice, compare
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.model.data import Drawn, EpochSeen, LoaderSeen, SamplerSeen
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.data.shared import Replicas


MIN_DRAWN = 2  # one equal index proves nothing, and a pass of one index has only one order
FIX = (
    "sampler=DistributedSampler(dataset), created after init_process_group without num_replicas and rank, and call "
    "sampler.set_epoch(epoch) before each epoch"
)
FIX_ITERABLE = (
    "skip the samples of other ranks in the dataset, for example itertools.islice(samples, rank, None, world)"
)


@rule("DD701", "duplicate-data", Severity.ERROR, "Ranks train on the same samples", after=("optimizer-drift",))
def check_duplicates(replicas: Replicas) -> Answer:
    """Report ranks of one DDP group that draw the same samples from the same dataset."""
    return with_counts(replicas, judge_loaders(replicas, _judge_duplicates, "no two ranks draw the same samples"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SamePass:
    """A pass in which ranks had the same samples."""

    number: int
    ranks: tuple[int, ...]
    passes: Mapping[int, EpochSeen]
    all_samples: bool  # whether each of these ranks drew every sample of the dataset


def _judge_duplicates(replicas: Replicas, shared: Shared) -> Answer:
    loaders = shared.seen.values()
    name = name_of(shared.first())
    if any(epoch.split_after for loader in loaders for epoch in loader.epochs):
        reason = f"{name}: the script itself distributes its batches"
    elif any(loader.samples is not None and loader.samples < replicas.size for loader in loaders):
        reason = f"{name}: it has fewer samples than there are ranks"
    else:
        reason = ""
    if reason:
        return skipped(reason)
    is_certain = False
    for number, found in shared.passes().items():
        passes = {rank: epoch for rank, epoch in found.items() if was_trained(epoch) or not replicas.trained_only}
        seen, certain = _same_in(shared, number, passes)
        if seen is not None:
            return judged([_duplicates_finding(replicas, shared, seen)])
        is_certain = is_certain or certain
    if is_certain:
        return passed()
    return skipped(f"{name_of(shared.first())}: the samples of the ranks could not be compared")


def _same_in(shared: Shared, number: int, passes: Mapping[int, EpochSeen]) -> tuple[_SamePass | None, bool]:
    """Return the ranks with the same samples in a pass, and whether the answer is certain if there are none."""
    if len(passes) < 2:
        return None, False
    if any(shared.seen[rank].iterable or not shared.seen[rank].indices_seen for rank in passes):
        ranks = _alike(passes, lambda one, other: same_batches(passes[one], passes[other]))
        same = _SamePass(number=number, ranks=ranks, passes=passes, all_samples=False) if ranks else None
        return same, all(epoch.batch_digests for epoch in passes.values())
    certain = True
    whole = {rank for rank, epoch in passes.items() if drew_all(epoch, shared.seen[rank])}

    def drew_alike(one: int, other: int) -> bool:
        mine, others = passes[one], passes[other]
        if mine.drawn < MIN_DRAWN or mine.first != others.first:
            return False
        if mine.drawn == others.drawn:
            return (mine.order, mine.total, mine.xor) == (others.order, others.total, others.xor)
        return not (mine.complete and others.complete) and same_batches(mine, others)

    for all_samples, drew_same in ((True, lambda one, other: one in whole and other in whole), (False, drew_alike)):
        ranks = _alike(passes, drew_same)
        drew = {rank: passes[rank] for rank in ranks}
        alike = _alike(drew, lambda one, other: _contents(shared, passes, one, other) is True)
        if alike:
            return _SamePass(number=number, ranks=alike, passes=passes, all_samples=all_samples), True
        certain = certain and all(_contents(shared, passes, ranks[0], rank) is not None for rank in ranks[1:])
    return None, certain and any(epoch.drawn for epoch in passes.values())


def _contents(shared: Shared, passes: Mapping[int, EpochSeen], one: int, other: int) -> bool | None:
    return same_contents((shared.seen[one], shared.seen[other]), (passes[one], passes[other]))


def _alike(passes: Mapping[int, EpochSeen], same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """Return the ranks that equal another one. Each is compared with the first rank of each kind."""
    kinds: list[list[int]] = []
    for rank in sorted(passes):
        kind = next((kind for kind in kinds if same(kind[0], rank)), None)
        if kind is None:
            kinds.append([rank])
        else:
            kind.append(rank)
    return tuple(sorted(rank for kind in kinds if len(kind) > 1 for rank in kind))


def _duplicates_finding(replicas: Replicas, shared: Shared, seen: _SamePass) -> Problem:
    loader = shared.seen[seen.ranks[0]]
    passes = [seen.passes[rank] for rank in seen.ranks]
    samples = f"{loader.samples} samples" if seen.all_samples else "samples"
    samplers = {rank: shared.seen[rank].sampler for rank in seen.ranks}
    known = [sampler for sampler in samplers.values() if sampler is not None and sampler.replicas is not None]
    if shared.seen[seen.ranks[0]].iterable:
        cause = "has an iterable dataset that gives each rank the same batches"
    elif len(known) < len(samplers):
        cause = "has no distributed sampler"
    else:
        cause = _sampler_cause(known)
    return Problem(
        confidence=Confidence.HIGH if were_compared(passes) else Confidence.MEDIUM,
        ranks=seen.ranks,
        hosts=hosts_of(replicas, seen.ranks),
        where=places_of(shared, seen.ranks),
        summary=f"{rank_list(seen.ranks)} train on the same {samples}: {name_of(loader)} {cause}",
        evidence=_duplicates_evidence(shared, seen),
        fix=_fix(shared, seen),
    )


def _fix(shared: Shared, seen: _SamePass) -> str:
    loader = shared.seen[seen.ranks[0]]
    sampler = loader.sampler
    if loader.iterable:
        return FIX_ITERABLE
    if sampler is None or sampler.type.startswith("torch.utils.data.sampler.SequentialSampler"):
        return f"give the DataLoader {FIX}"
    if sampler.type.startswith("torch.utils.data.sampler.RandomSampler"):
        return f"replace shuffle=True with {FIX}"
    name = class_name(sampler.type)
    if sampler.replicas is not None and sampler.standard:
        return (
            f"create {name}(dataset) after init_process_group without num_replicas and rank: it takes those of the job"
        )
    return (
        f"make {name} draw other samples on each rank (every world_size-th index from the rank's number on, or a "
        f"generator whose seed depends on the rank), or replace it with {FIX}"
    )


def _sampler_cause(samplers: list[SamplerSeen]) -> str:
    if all(sampler.replicas == 1 for sampler in samplers):
        return "has a sampler for a single rank (num_replicas=1)"
    numbers = {sampler.rank for sampler in samplers}
    if len(numbers) == 1:
        return f"has a sampler with rank={numbers.pop()} on each rank"
    if len(numbers) < len(samplers):
        return "has several samplers with the same rank"
    return f"has a {class_name(samplers[0].type)} that gives each rank the same samples"


def _duplicates_evidence(shared: Shared, seen: _SamePass) -> tuple[str, ...]:
    loader = shared.seen[seen.ranks[0]]
    epoch = seen.passes[seen.ranks[0]]
    samplers = [loader.sampler for loader in shared.seen.values()]
    counts = {sampler.replicas if sampler is not None else None for sampler in samplers}
    count = counts.pop() if len(counts) == 1 else None
    drawn = {sampler.rank for sampler in samplers if sampler is not None}
    if count is None or not shared.is_whole or len(drawn) >= count or seen.all_samples:
        unseen_words = ""
    else:
        unseen_words = f"no rank draws {count - len(drawn)} of the {count} shares that the samplers make"
    return tuple(filter(None, (
        f"pass {seen.number}: {_drawn_words(shared, seen, epoch)}",
        _contents_words(shared, seen),
        unseen_words,
        f"sampler {loader.sampler.type}, dataset {loader.dataset}" if loader.sampler else f"dataset {loader.dataset}",
        "" if loader.iterable else shared_out(loader, shared.size),
    )))  # fmt: skip


def _drawn_words(shared: Shared, seen: _SamePass, epoch: EpochSeen) -> str:
    if shared.seen[seen.ranks[0]].iterable or not epoch.drawn:
        return f"the first batches of {rank_list(seen.ranks)} were equal"
    if not seen.all_samples:
        return f"{rank_list(seen.ranks)} each {drawn_words(epoch)}, in the same order"
    orders = {seen.passes[rank].order for rank in seen.ranks}
    order = "the same order" if len(orders) == 1 else "different orders"
    samples = shared.seen[seen.ranks[0]].samples or 0
    which = f"every index from 0 to {samples - 1}" if epoch.drawn == samples else "all but the incomplete last batch"
    return f"{rank_list(seen.ranks)} each {drawn_words(epoch)}, which is {which}, in {order}"


def _contents_words(shared: Shared, seen: _SamePass) -> str:
    if shared.seen[seen.ranks[0]].iterable:
        return ""
    if were_compared(seen.passes[rank] for rank in seen.ranks):
        return "the same indices gave the same values, so the ranks have the same dataset"
    return "the dataset has the same class, length and attributes on them; its values could not be compared"


@rule("DD702", "no-set-epoch", Severity.ERROR, "Every epoch has the same order", after=("optimizer-drift",))
def check_epochs(replicas: Replicas) -> Answer:
    """Report a distributed sampler that shuffles, but whose epoch is never set."""
    drawn = replicas.drawn
    more = "" if drawn is None else "; this check does not look for set_epoch in your script"
    answer = judge_loaders(replicas, _judge_epochs, f"passes have different orders{more}")
    if answer.outcome is not Outcome.PASSED or drawn is None or not _is_stubborn(replicas, drawn):
        return answer
    return judged([_stubborn(replicas, drawn)], _stubborn(replicas, drawn).summary)


def _is_stubborn(replicas: Replicas, drawn: Drawn) -> bool:
    """Return whether a sampler gives the same order in each pass, although ``set_epoch`` was called."""
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    return drawn.set_epoch and all(
        len(one.epochs) > 1 and len({epoch.order for epoch in one.epochs}) == 1 for one in loaders
    )


def _stubborn(replicas: Replicas, drawn: Drawn) -> Problem:
    ranks = tuple(replicas.hosts)
    return Problem(
        ranks=ranks,
        summary=f"{rank_list(ranks)} draw in the same order in each pass, although the script calls set_epoch",
        evidence=(f"sampler {drawn.sampler} with shuffling enabled",),
        fix="make the sampler's order depend on its epoch, for example with a generator seeded with seed + epoch",
    )


def _judge_epochs(replicas: Replicas, shared: Shared) -> Answer:
    reason = _unfit_epochs(replicas, shared)
    if reason:
        return skipped(f"{name_of(shared.first())}: {reason}")
    passes = {rank: _trained(replicas, shared.seen[rank]) for rank in shared.ranks}
    if any(_is_reordered(epochs) for epochs in passes.values()):
        return passed()
    return judged([_epochs_finding(replicas, shared, passes)])


def _unfit_epochs(replicas: Replicas, shared: Shared) -> str:
    """Return why it is unknown whether a loader reshuffles, or "" if it can be judged."""
    for loader in shared.seen.values():
        sampler = loader.sampler
        if sampler is None or sampler.replicas is None:
            return "it has no distributed sampler"
        if not sampler.shuffle:
            return "its sampler does not shuffle, as far as known"
        passes = _trained(replicas, loader)
        if len(passes) < 2 or any(epoch.drawn < MIN_DRAWN for epoch in passes):
            return "fewer than two training passes were seen on each rank"
        if any(epoch.set_epoch is None or not epoch.first for epoch in passes):
            return "its sampler has no epoch, or its samples were not seen"
    return ""


def _trained(replicas: Replicas, loader: LoaderSeen) -> list[EpochSeen]:
    return [epoch for epoch in loader.epochs if was_trained(epoch) or not replicas.trained_only]


def _is_reordered(epochs: list[EpochSeen]) -> bool:
    """Return whether the epoch was set to another value, or the order changed."""
    one = epochs[0]
    for other in epochs[1:]:
        if other.set_epoch != one.set_epoch or other.first != one.first:
            return True
        if other.drawn == one.drawn and other.order != one.order:
            return True
    return False


def _epochs_finding(replicas: Replicas, shared: Shared, passes: dict[int, list[EpochSeen]]) -> Problem:
    loader = shared.first()
    seen = passes[shared.ranks[0]]
    count = loader.passes if len(seen) == len(loader.epochs) else len(seen)
    calls: dict[int, Frame] = {}
    for rank in shared.ranks:
        first, last = passes[rank][0], passes[rank][-1]
        for call in shared.seen[rank].stray_calls:
            if first.begun_ns <= call.time_ns and (last.ended_ns is None or call.time_ns <= last.ended_ns):
                calls.setdefault(rank, call.site)
    called = next(iter(calls.values()), None)
    why = (
        f"the script never calls set_epoch on the sampler of {name_of(loader)}, or always with the same number"
        if called is None
        else f"{_line(called)} calls set_epoch on another sampler, not that of {name_of(loader)}"
    )
    return Problem(
        ranks=shared.ranks,
        hosts=hosts_of(replicas, shared.ranks),
        where=(*(to_place(rank, site) for rank, site in calls.items()), *places_of(shared, shared.ranks)),
        summary=f"{count} epochs had the same order: {why}",
        evidence=_epochs_evidence(shared, seen, called),
        fix="call sampler.set_epoch(epoch) before the loop over the DataLoader, in each epoch and on all ranks"
        if called is None
        else "pass that sampler to the DataLoader (sampler=...), or call loader.sampler.set_epoch(epoch)",
    )


def _line(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}"


def _epochs_evidence(shared: Shared, seen: list[EpochSeen], called: Frame | None) -> tuple[str, ...]:
    rank, sampler = shared.ranks[0], shared.first().sampler
    epoch = f"its epoch was {seen[0].set_epoch} in each pass on {rank_list(shared.ranks)}"
    again = f"the same indices in the same order in pass {seen[-1].number}"
    other = [f"{_line(called)} sets the epoch of a sampler that no DataLoader uses"] if called is not None else []
    return (
        *other,
        f"sampler {sampler.type if sampler is not None else ''}: shuffle=True, and {epoch}",
        f"pass {seen[0].number}: rank {rank} {drawn_words(seen[0])}, and {again}",
    )


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
# The fewest batches of each rank that must be missing. ``drop_last`` and padding change at most one of them.
MIN_MISSING_BATCHES = 2


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
    answer = with_counts(replicas, judge_loaders(replicas, _judge_shards, healthy, of_any_job=True))
    return answer if answer.problems else find_overlap(replicas) or answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShareFault:
    """Why shares do not fit together."""

    words: str
    ranks: tuple[int, ...]  # the ranks it concerns
    evidence: tuple[str, ...]
    sure: bool = True  # Whether these ranks are certain. If not, they are certain only if other ranks are a majority.
    fix: str = SHARE_ALIKE
    summary: str = ""  # the summary without the loader, if it is not about shares that overlap


def _judge_shards(replicas: Replicas, shared: Shared) -> Answer:
    name = name_of(shared.first())
    twice = _cut_twice(replicas, shared)
    if twice is not None:
        return judged([_shards_finding(replicas, shared, twice)])
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

    count: str  # such as "216 of 640 samples"
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
            proof = f"indices drawn in pass {number}: {by_rank({r: e.drawn for r, e in found.items()})}"
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
    held = by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"the dataset of each rank is another part of {whole} samples: {held}"
    return _Seen(count=f"{seen} of {whole} samples", proof=proof, is_counted=True)


def _seen_of_own(shared: Shared, dataset: Cut) -> _Seen | None:
    """Return what is seen if a dataset divides itself, holds other values on each rank, and a sampler divides again."""
    held = {rank: loader.held for rank, loader in shared.seen.items()}
    if dataset.replicas not in (None, shared.size) or "" in held.values() or len(set(held.values())) < len(held):
        return None
    samples = [loader.samples or 0 for loader in shared.seen.values()]
    seen = sum(math.ceil(count / shared.size) for count in samples)
    counts = by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"each rank's {class_name(dataset.type)} holds other values; samples: {counts}"
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
    name = class_name(cut.type)
    if cut.type.startswith(ACCELERATES):
        return f"accelerate's prepare ({name})"
    if cut.what == "part":
        return "the dataset, which is each rank's own part"
    return f"the dataset ({name})" if cut.what == "dataset" else name


def _fix_of_cuts(first: Cut, again: Cut) -> str:
    name = class_name(first.type)
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
    return f"remove {class_name(again.type)} (shuffle=True does the rest), because {already}; or {whole}"


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
        return judged([_shards_finding(replicas, shared, cause)])
    for number, found in passes.items():
        if not all(sampler.shuffle for sampler in samplers.values()) or not _is_proved(shared, found, samplers):
            continue
        cause = _disagreement(shared, found, samplers, number)
        if cause:
            return judged([_shards_finding(replicas, shared, cause)])
    if not shared.is_whole:
        return skipped(f"{name_of(shared.first())}: it was not seen on all ranks of the group")
    samples = shared.first().samples or 0
    if all(sampler.standard and sampler.rank is not None for sampler in samplers.values()):
        return passed()
    if any(shows_all(samples, tuple(found.values())) for found in passes.values()):
        return passed()
    return skipped(f"{name_of(shared.first())}: the shares of its sampler cannot be derived from its sums")


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
            f"num_replicas={count}; rank: {by_rank({rank: one.rank for rank, one in samplers.items()})}",
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
            f"digest of the indices in the Subset: {by_rank(parts)}",
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
            *(f"{what}: {by_rank(values)} (pass {number})" for what, values in differing.items()),
            _sums_words(shared, found, number),
            "" if split.majority is not None else NO_MAJORITY,
        ),
        sure=False,
    )


def _judge_drawn(replicas: Replicas, shared: Shared, passes: Mapping[int, Mapping[int, EpochSeen]]) -> Answer:
    """Judge shares by sums alone: they must be the same in each pass and not make up the dataset."""
    samples = shared.first().samples or 0
    whole = {number: found for number, found in passes.items() if all(epoch.complete for epoch in found.values())}
    name = name_of(shared.first())
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
        return judged([_shards_finding(replicas, shared, cause)])
    return skipped(f"{name}: its sampler does not describe its shares, and the sums do not show them")


def _shards_finding(replicas: Replicas, shared: Shared, cause: _ShareFault) -> Problem:
    loader = shared.first()
    is_sure = cause.sure or len(cause.ranks) < len(shared.seen)
    return Problem(
        confidence=Confidence.HIGH if is_sure else Confidence.MEDIUM,
        ranks=cause.ranks,
        hosts=hosts_of(replicas, cause.ranks),
        where=places_of(shared, cause.ranks),
        summary=f"{cause.summary or _overlap_words(shared, cause)} ({name_of(loader)})",
        evidence=tuple(filter(None, (
            *cause.evidence,
            "" if cause.summary else shared_out(loader, shared.size),
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


@rule("DD704", "uneven-batches", Severity.ERROR, "Ranks have different numbers of batches", after=("optimizer-drift",))
def check_batches(replicas: Replicas) -> Answer:
    """Report ranks that ran out of batches while others went on."""
    return judge_loaders(replicas, _judge_uneven, "all ranks have the same number of batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uneven:
    """A pass in which ranks had different numbers of batches."""

    number: int
    batches: Mapping[int, int]
    going_on: bool  # whether the ranks with the most batches had not reached their end
    short: tuple[int, ...]  # ranks that reached the end of their batches and trained on fewer than others


def _judge_uneven(replicas: Replicas, shared: Shared) -> Answer:
    name = name_of(shared.first())
    if any(loader.in_join for loader in shared.seen.values()):
        return skipped(f"{name}: it is used inside join, which handles uneven batches")
    ended = False
    for number, passes in shared.passes().items():
        found = _uneven(replicas, shared, number, passes)
        if found is not None:
            return judged([_uneven_finding(replicas, shared, found)])
        ended = ended or sum(epoch.complete for epoch in passes.values()) > 1
    return passed() if ended else skipped(f"{name}: fewer than two ranks completed a pass")


def _uneven(replicas: Replicas, shared: Shared, number: int, passes: Mapping[int, EpochSeen]) -> _Uneven | None:
    if replicas.trained_only:
        passes = {rank: epoch for rank, epoch in passes.items() if was_trained(epoch)}
    batches = {rank: epoch.batches for rank, epoch in passes.items()}
    short = tuple(
        rank
        for rank, epoch in passes.items()
        if epoch.complete
        and any(_went_on(shared, rank, other, batches) for other in passes)
        and (shared.seen[rank].epochs[-1].complete or not replicas.trained_only)
    )
    going_on = bool(batches) and not all(passes[rank].complete for rank in _longest(batches))
    return _Uneven(number=number, batches=batches, going_on=going_on, short=short) if short else None


def _longest(batches: Mapping[int, int]) -> list[int]:
    most = max(batches.values())
    return sorted(rank for rank, count in batches.items() if count == most)


def _went_on(shared: Shared, rank: int, other: int, batches: Mapping[int, int]) -> bool:
    """Return whether another rank got more batches in a pass and trained on more over all passes."""
    mine, others = shared.seen[rank].trained_batches, shared.seen[other].trained_batches
    return batches[other] > batches[rank] and (others > mine or not others)


def _uneven_finding(replicas: Replicas, shared: Shared, found: _Uneven) -> Problem:
    loader = shared.first()
    longest = _longest(found.batches)
    most = f"{found.batches[longest[0]]}{' so far' if found.going_on else ''}"
    fewest = {rank: found.batches[rank] for rank in found.short}
    trained = {rank: loader.trained_batches for rank, loader in shared.seen.items()}
    samples = {rank: loader.samples for rank, loader in shared.seen.items() if loader.samples is not None}
    return Problem(
        severity=Severity.ERROR if replicas.ended_badly else Severity.WARNING,
        ranks=found.short,
        hosts=hosts_of(replicas, found.short),
        where=places_of(shared, found.short),
        summary=f"{rank_list(found.short)} {verb(found.short, 'has', 'have')} {_numbers(fewest)} in pass "
        f"{found.number}, but {rank_list(longest)} {verb(longest, 'has', 'have')} {most}: {name_of(loader)}",
        evidence=tuple(filter(None, (
        f"batches of pass {found.number}: {by_rank(dict(found.batches))}",
        f"batches trained on in total: {by_rank(dict(trained))}" if any(trained.values()) else "",
        f"samples: {by_rank(dict(samples))}" if samples else "",
        shared_out(shared.first(), shared.size) if len(set(samples.values())) == 1 else "",
    ))),
        fix="give all ranks the same number of batches (DistributedSampler, drop_last=True), or wrap the loop in "
        "`with model.join():`",
    )  # fmt: skip


def _numbers(batches: Mapping[int, int]) -> str:
    counts = sorted(set(batches.values()))
    if len(counts) == 1:
        return count_of(counts[0], "batch", "batches")
    return f"{counts[0]} to {counts[-1]} batches"
