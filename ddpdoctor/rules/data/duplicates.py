"""DD701: ranks that train on the same samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.model.words import rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data import words
from ddpdoctor.rules.data.evidence import drew_all, same_batches, same_contents, were_compared, with_counts
from ddpdoctor.rules.data.shared import Shared, judge_loaders, was_trained
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpdoctor.model.data import EpochSeen, SamplerSeen
    from ddpdoctor.rules.data.shared import Replicas

MIN_DRAWN = 2
"""One equal index proves nothing."""
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
    return with_counts(replicas, judge_loaders(replicas, _judge, "no two ranks draw the same samples"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SamePass:
    """A pass in which ranks had the same samples."""

    number: int
    ranks: tuple[int, ...]
    passes: Mapping[int, EpochSeen]
    all_samples: bool
    """Whether each of these ranks drew every sample of the dataset."""


def _judge(replicas: Replicas, shared: Shared) -> Answer:
    reason = _unfit(replicas, shared)
    if reason:
        return skipped(reason)
    is_certain = False
    for number, found in shared.passes().items():
        passes = {rank: epoch for rank, epoch in found.items() if was_trained(epoch) or not replicas.trained_only}
        seen, certain = _same_in(shared, number, passes)
        if seen is not None:
            return judged([_finding(replicas, shared, seen)])
        is_certain = is_certain or certain
    if is_certain:
        return passed()
    return skipped(f"{words.name_of(shared.first())}: the samples of the ranks could not be compared")


def _unfit(replicas: Replicas, shared: Shared) -> str:
    """Return why a loader cannot be judged, or "" if it can."""
    loaders = shared.seen.values()
    name = words.name_of(shared.first())
    if any(epoch.split_after for loader in loaders for epoch in loader.epochs):
        return f"{name}: the script itself distributes its batches"
    if any(loader.samples is not None and loader.samples < replicas.size for loader in loaders):
        return f"{name}: it has fewer samples than there are ranks"
    return ""


def _same_in(shared: Shared, number: int, passes: Mapping[int, EpochSeen]) -> tuple[_SamePass | None, bool]:
    """Return the ranks with the same samples in a pass, and whether the answer is certain if there are none."""
    if len(passes) < 2:
        return None, False
    if any(shared.seen[rank].iterable or not shared.seen[rank].indices_seen for rank in passes):
        ranks = _alike(passes, lambda one, other: same_batches(passes[one], passes[other]))
        same = _SamePass(number=number, ranks=ranks, passes=passes, all_samples=False) if ranks else None
        return same, all(epoch.batch_digests for epoch in passes.values())
    certain = True
    for all_samples, drew_same in ((True, _drew_everything(shared, passes)), (False, _drew_alike(passes))):
        ranks = _alike(passes, drew_same)
        alike = _holding_same(shared, passes, ranks)
        if alike:
            return _SamePass(number=number, ranks=alike, passes=passes, all_samples=all_samples), True
        certain = certain and all(_contents(shared, passes, ranks[0], rank) is not None for rank in ranks[1:])
    return None, certain and any(epoch.drawn for epoch in passes.values())


def _drew_everything(shared: Shared, passes: Mapping[int, EpochSeen]) -> Callable[[int, int], bool]:
    whole = {rank for rank, epoch in passes.items() if drew_all(epoch, shared.seen[rank])}
    return lambda one, other: one in whole and other in whole


def _drew_alike(passes: Mapping[int, EpochSeen]) -> Callable[[int, int], bool]:
    def drew_alike(one: int, other: int) -> bool:
        mine, others = passes[one], passes[other]
        if mine.drawn < MIN_DRAWN or mine.first != others.first:
            return False
        if mine.drawn == others.drawn:
            return (mine.order, mine.total, mine.xor) == (others.order, others.total, others.xor)
        return not (mine.complete and others.complete) and same_batches(mine, others)

    return drew_alike


def _holding_same(shared: Shared, passes: Mapping[int, EpochSeen], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Return which of these ranks hold the same data as another one of them."""
    drew = {rank: passes[rank] for rank in ranks}
    return _alike(drew, lambda one, other: _contents(shared, passes, one, other) is True)


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


def _finding(replicas: Replicas, shared: Shared, seen: _SamePass) -> Problem:
    loader = shared.seen[seen.ranks[0]]
    passes = [seen.passes[rank] for rank in seen.ranks]
    samples = f"{loader.samples} samples" if seen.all_samples else "samples"
    return Problem(
        confidence=Confidence.HIGH if were_compared(passes) else Confidence.MEDIUM,
        ranks=seen.ranks,
        hosts=words.hosts_of(replicas, seen.ranks),
        where=words.places_of(shared, seen.ranks),
        summary=f"{rank_list(seen.ranks)} train on the same {samples}: {words.name_of(loader)} {_cause(shared, seen)}",
        evidence=_evidence(shared, seen),
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
    name = words.class_name(sampler.type)
    if sampler.replicas is not None and sampler.standard:
        return (
            f"create {name}(dataset) after init_process_group without num_replicas and rank: it takes those of the job"
        )
    return (
        f"make {name} draw other samples on each rank (every world_size-th index from the rank's number on, or a "
        f"generator whose seed depends on the rank), or replace it with {FIX}"
    )


def _cause(shared: Shared, seen: _SamePass) -> str:
    samplers = {rank: shared.seen[rank].sampler for rank in seen.ranks}
    known = [sampler for sampler in samplers.values() if sampler is not None and sampler.replicas is not None]
    if shared.seen[seen.ranks[0]].iterable:
        return "has an iterable dataset that gives each rank the same batches"
    if len(known) < len(samplers):
        return "has no distributed sampler"
    return _sampler_cause(known)


def _sampler_cause(samplers: list[SamplerSeen]) -> str:
    if all(sampler.replicas == 1 for sampler in samplers):
        return "has a sampler for a single rank (num_replicas=1)"
    numbers = {sampler.rank for sampler in samplers}
    if len(numbers) == 1:
        return f"has a sampler with rank={numbers.pop()} on each rank"
    if len(numbers) < len(samplers):
        return "has several samplers with the same rank"
    return f"has a {words.class_name(samplers[0].type)} that gives each rank the same samples"


def _evidence(shared: Shared, seen: _SamePass) -> tuple[str, ...]:
    loader = shared.seen[seen.ranks[0]]
    epoch = seen.passes[seen.ranks[0]]
    return tuple(filter(None, (
        f"pass {seen.number}: {_drawn_words(shared, seen, epoch)}",
        _contents_words(shared, seen),
        _unseen_words(shared, seen),
        f"sampler {loader.sampler.type}, dataset {loader.dataset}" if loader.sampler else f"dataset {loader.dataset}",
        "" if loader.iterable else words.shared_out(loader, shared.size),
    )))  # fmt: skip


def _drawn_words(shared: Shared, seen: _SamePass, epoch: EpochSeen) -> str:
    if shared.seen[seen.ranks[0]].iterable or not epoch.drawn:
        return f"the first batches of {rank_list(seen.ranks)} were equal"
    if not seen.all_samples:
        return f"{rank_list(seen.ranks)} each {words.drawn_words(epoch)}, in the same order"
    orders = {seen.passes[rank].order for rank in seen.ranks}
    order = "the same order" if len(orders) == 1 else "different orders"
    samples = shared.seen[seen.ranks[0]].samples or 0
    which = f"every index from 0 to {samples - 1}" if epoch.drawn == samples else "all but the incomplete last batch"
    return f"{rank_list(seen.ranks)} each {words.drawn_words(epoch)}, which is {which}, in {order}"


def _contents_words(shared: Shared, seen: _SamePass) -> str:
    if shared.seen[seen.ranks[0]].iterable:
        return ""
    if were_compared(seen.passes[rank] for rank in seen.ranks):
        return "the same indices gave the same values, so the ranks have the same dataset"
    return "the dataset has the same class, length and attributes on them; its values could not be compared"


def _unseen_words(shared: Shared, seen: _SamePass) -> str:
    """Return how much of the dataset is in no share, if the samplers of all ranks leave some out."""
    samplers = [loader.sampler for loader in shared.seen.values()]
    counts = {sampler.replicas if sampler is not None else None for sampler in samplers}
    count = counts.pop() if len(counts) == 1 else None
    drawn = {sampler.rank for sampler in samplers if sampler is not None}
    if count is None or not shared.is_whole or len(drawn) >= count or seen.all_samples:
        return ""
    return f"no rank draws {count - len(drawn)} of the {count} shares that the samplers make"
