"""DD701 to DD704: duplicated and missed samples, uneven batches, and the same order in every epoch."""

from __future__ import annotations

import math
from functools import reduce
from itertools import pairwise
from operator import xor
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.data import Cut
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.words import count_of, rank_list, verb
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.data.shared import (
    NO_REPLICAS,
    are_distinct,
    by_rank,
    class_name,
    drawn_words,
    drew_all,
    find_overlap,
    judge_loaders,
    must_leave_gap,
    same_batches,
    same_contents,
    shared_out,
    shows_all,
    sum_of_all,
    with_counts,
    xor_of_all,
)
from ddpdoctor.rules.majority import Voice, compare
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpdoctor.model.data import EpochSeen, LoaderSeen, SamplerSeen
    from ddpdoctor.model.stacks import Frame
    from ddpdoctor.rules.data.shared import Replicas, Shared
    from ddpdoctor.rules.majority import Split


MIN_DRAWN = 2  # one equal index proves nothing, and a pass of one index has only one order
FIX = (
    "sampler=DistributedSampler(dataset), created after init_process_group without num_replicas and rank, and call "
    "sampler.set_epoch(epoch) before each epoch"
)
FIX_ITERABLE = (
    "skip the samples of other ranks in the dataset, for example itertools.islice(samples, rank, None, world)"
)
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


@rule("DD701", "duplicate-data", Severity.ERROR, "Ranks train on the same samples", after=("optimizer-drift",))
def check_duplicates(replicas: Replicas) -> Answer:
    """Report ranks of one DDP group that draw the same samples from the same dataset."""
    return with_counts(replicas, judge_loaders(replicas, _judge_duplicates, "no two ranks draw the same samples"))


def _judge_duplicates(shared: Shared) -> Answer:
    loaders = shared.seen.values()
    if any(epoch.split_after for loader in loaders for epoch in loader.epochs):
        return shared.skipped("the script itself distributes its batches")
    if any(loader.samples is not None and loader.samples < shared.size for loader in loaders):
        return shared.skipped("it has fewer samples than there are ranks")
    is_certain = False
    for number, passes in shared.passes(counted=True).items():
        ranks, all_samples, certain = _same_in(shared, passes)
        if ranks:
            return _duplicates(shared, number, {rank: passes[rank] for rank in ranks}, all_samples=all_samples)
        is_certain = is_certain or certain
    return passed() if is_certain else shared.skipped("the samples of the ranks could not be compared")


def _same_in(shared: Shared, passes: Mapping[int, EpochSeen]) -> tuple[tuple[int, ...], bool, bool]:
    """Return the ranks with the same samples, whether each drew the whole dataset, and whether that is certain."""
    # Without such ranks, the last one says whether it is certain that there are none.
    if any(shared.seen[rank].iterable or not shared.seen[rank].indices_seen for rank in passes):
        ranks = _alike(passes, lambda rank, other: same_batches(passes[rank], passes[other]))
        return ranks, False, all(epoch.batch_digests for epoch in passes.values())
    certain = True
    whole = {rank for rank, epoch in passes.items() if drew_all(epoch, shared.seen[rank])}

    def drew_alike(rank: int, other: int) -> bool:
        mine, others = passes[rank], passes[other]
        if mine.drawn < MIN_DRAWN or mine.first != others.first:
            return False
        if mine.drawn == others.drawn:
            return (mine.order, mine.total, mine.xor) == (others.order, others.total, others.xor)
        return not (mine.complete and others.complete) and same_batches(mine, others)

    def hold_alike(rank: int, other: int) -> bool | None:
        return same_contents((shared.seen[rank], shared.seen[other]), (passes[rank], passes[other]))

    for all_samples, drew_same in ((True, lambda rank, other: rank in whole and other in whole), (False, drew_alike)):
        ranks = _alike(passes, drew_same)
        if alike := _alike(ranks, lambda rank, other: hold_alike(rank, other) is True):
            return alike, all_samples, True
        certain = certain and all(hold_alike(ranks[0], rank) is not None for rank in ranks[1:])
    return (), False, certain and any(epoch.drawn for epoch in passes.values())


def _alike(ranks: Iterable[int], same: Callable[[int, int], bool]) -> tuple[int, ...]:
    """Return the ranks that equal another one. Each is compared with the first rank of each kind."""
    kinds: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        kinds.setdefault(next((first for first in kinds if same(first, rank)), rank), []).append(rank)
    return tuple(sorted(rank for kind in kinds.values() if len(kind) > 1 for rank in kind))


def _duplicates(shared: Shared, number: int, passes: Mapping[int, EpochSeen], *, all_samples: bool) -> Answer:
    ranks = tuple(passes)
    loader, epoch = shared.seen[ranks[0]], passes[ranks[0]]
    # Whether digests of delivered data were available, not only descriptions of datasets
    are_compared = all(epoch.batch_digests or epoch.sample_digests for epoch in passes.values())
    if loader.iterable or not epoch.drawn:
        drew = f"the first batches of {rank_list(ranks)} were equal"
    elif not all_samples:
        drew = f"{rank_list(ranks)} each {drawn_words(epoch)}, in the same order"
    else:
        is_one_order = len({epoch.order for epoch in passes.values()}) == 1
        is_every = epoch.drawn == loader.samples
        which = f"every index from 0 to {epoch.drawn - 1}" if is_every else "all but the incomplete last batch"
        order = "the same order" if is_one_order else "different orders"
        drew = f"{rank_list(ranks)} each {drawn_words(epoch)}, which is {which}, in {order}"
    contents = "the dataset has the same class, length and attributes on them; its values could not be compared"
    if are_compared:
        contents = "the same indices gave the same values, so the ranks have the same dataset"
    samplers = [loader.sampler for loader in shared.seen.values()]
    counts = {sampler.replicas if sampler is not None else None for sampler in samplers}
    count = counts.pop() if len(counts) == 1 else None
    drawn = {sampler.rank for sampler in samplers if sampler is not None}
    unseen = ""
    if count is not None and shared.is_whole and len(drawn) < count and not all_samples:
        unseen = f"no rank draws {count - len(drawn)} of the {count} shares that the samplers make"
    cause, fix = _cause_and_fix(loader, [shared.seen[rank].sampler for rank in ranks])
    samples_words = f"{loader.samples} samples" if all_samples else "samples"
    return shared.failed(
        f"{rank_list(ranks)} train on the same {samples_words}: {shared.name} {cause}",
        ranks,
        (
            f"pass {number}: {drew}",
            "" if loader.iterable else contents,
            unseen,
            f"{f'sampler {loader.sampler.type}, ' if loader.sampler else ''}dataset {loader.dataset}",
            "" if loader.iterable else shared_out(loader, shared.size),
        ),
        fix,
        confidence=Confidence.HIGH if are_compared else Confidence.MEDIUM,
    )


def _cause_and_fix(loader: LoaderSeen, samplers: list[SamplerSeen | None]) -> tuple[str, str]:
    known = [sampler for sampler in samplers if sampler is not None and sampler.replicas is not None]
    numbers = {sampler.rank for sampler in known}
    if loader.iterable:
        return "has an iterable dataset that gives each rank the same batches", FIX_ITERABLE
    if len(known) < len(samplers):
        cause = "has no distributed sampler"
    elif all(sampler.replicas == 1 for sampler in known):
        cause = "has a sampler for a single rank (num_replicas=1)"
    elif len(numbers) == 1:
        cause = f"has a sampler with rank={numbers.pop()} on each rank"
    elif len(numbers) < len(known):
        cause = "has several samplers with the same rank"
    else:
        cause = f"has a {class_name(known[0].type)} that gives each rank the same samples"
    sampler = loader.sampler
    name = class_name(sampler.type) if sampler is not None else ""
    if sampler is None or sampler.type.startswith("torch.utils.data.sampler.SequentialSampler"):
        fix = f"give the DataLoader {FIX}"
    elif sampler.type.startswith("torch.utils.data.sampler.RandomSampler"):
        fix = f"replace shuffle=True with {FIX}"
    elif sampler.replicas is not None and sampler.standard:
        fix = f"create {name}(dataset) after init_process_group without num_replicas and rank"
        fix += ": it uses those of the job"
    else:
        fix = (
            f"make {name} draw other samples on each rank (every world_size-th index from the rank's number on, or a "
            f"generator whose seed depends on the rank), or replace it with {FIX}"
        )
    return cause, fix


@rule("DD702", "no-set-epoch", Severity.ERROR, "Every epoch has the same order", after=("optimizer-drift",))
def check_epochs(replicas: Replicas) -> Answer:
    """Report a distributed sampler that shuffles, but whose epoch is never set."""
    drawn = replicas.drawn
    more = "" if drawn is None else "; this check does not look for set_epoch in your script"
    answer = judge_loaders(replicas, _judge_epochs, f"passes have different orders{more}")
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    if answer.outcome is not Outcome.PASSED or drawn is None or not drawn.set_epoch:
        return answer
    if not all(len(loader.epochs) > 1 and len({epoch.order for epoch in loader.epochs}) == 1 for loader in loaders):
        return answer
    ranks = tuple(replicas.hosts)
    problem = Problem(
        ranks=ranks,
        summary=f"{rank_list(ranks)} draw in the same order in each pass, although the script calls set_epoch",
        evidence=(f"sampler {drawn.sampler} with shuffling enabled",),
        fix="make the sampler's order depend on its epoch, for example with a generator seeded with seed + epoch",
    )
    return judged([problem], problem.summary)


def _judge_epochs(shared: Shared) -> Answer:
    passes = {rank: [epoch for epoch in shared.seen[rank].epochs if shared.is_counted(epoch)] for rank in shared.ranks}
    for rank, loader in shared.seen.items():
        sampler, epochs = loader.sampler, passes[rank]
        if sampler is None or sampler.replicas is None:
            return shared.skipped("it has no distributed sampler")
        if not sampler.shuffle:
            return shared.skipped("its sampler does not seem to shuffle")
        if len(epochs) < 2 or any(epoch.drawn < MIN_DRAWN for epoch in epochs):
            return shared.skipped("fewer than two training passes were seen on each rank")
        if any(epoch.set_epoch is None or not epoch.first for epoch in epochs):
            return shared.skipped("its sampler has no epoch, or its samples were not seen")
    for epoch, *others in passes.values():
        for other in others:
            has_other_order = other.drawn == epoch.drawn and other.order != epoch.order
            if has_other_order or (other.set_epoch, other.first) != (epoch.set_epoch, epoch.first):
                return passed()
    return _same_order(shared, passes)


def _same_order(shared: Shared, passes: Mapping[int, list[EpochSeen]]) -> Answer:
    rank, loader = shared.ranks[0], shared.first()
    seen, sampler = passes[rank], loader.sampler
    count = loader.passes if len(seen) == len(loader.epochs) else len(seen)
    calls: dict[int, Frame] = {}
    for number in shared.ranks:
        first, last = passes[number][0], passes[number][-1]
        for call in shared.seen[number].stray_calls:
            if first.begun_ns <= call.time_ns and (last.ended_ns is None or call.time_ns <= last.ended_ns):
                calls.setdefault(number, call.site)
    called = next(iter(calls.values()), None)
    if called is None:
        stray = ""
        why = f"the script never calls set_epoch on the sampler of {shared.name}, or always with the same number"
        fix = "call sampler.set_epoch(epoch) before the loop over the DataLoader, in each epoch and on all ranks"
    else:
        line = f"{called.file.rpartition('/')[2]}:{called.line}"
        stray = f"{line} sets the epoch of a sampler that no DataLoader uses"
        why = f"{line} calls set_epoch on another sampler, not that of {shared.name}"
        fix = "pass that sampler to the DataLoader (sampler=...), or call loader.sampler.set_epoch(epoch)"
    epoch = f"its epoch was {seen[0].set_epoch} in each pass on {rank_list(shared.ranks)}"
    again = f"the same indices in the same order in pass {seen[-1].number}"
    return shared.failed(
        f"{count} epochs had the same order: {why}",
        shared.ranks,
        (
            stray,
            f"sampler {sampler.type if sampler is not None else ''}: shuffle=True, and {epoch}",
            f"pass {seen[0].number}: rank {rank} {drawn_words(seen[0])}, and {again}",
        ),
        fix,
        where=tuple(to_place(number, site) for number, site in calls.items()),
    )


@rule(
    "DD703", "shard-gap", Severity.ERROR, "The ranks' shares of the data overlap or miss samples",
    after=("optimizer-drift",),
)  # fmt: skip
def check_shards(replicas: Replicas) -> Answer:
    """Report ranks whose shares of a dataset do not add up to the whole dataset."""
    healthy = "the shares of the ranks cover each sample once"
    answer = with_counts(replicas, judge_loaders(replicas, _judge_shards, healthy, of_any_job=True))
    return answer if answer.problems else find_overlap(replicas) or answer


def _judge_shards(shared: Shared) -> Answer:
    if twice := _cut_twice(shared):
        return twice
    if not shared.replicas.by_model:
        return skipped(NO_REPLICAS)
    if any(loader.iterable or not loader.indices_seen for loader in shared.seen.values()):
        return shared.skipped("the indices of the ranks were not seen")
    if len({loader.samples for loader in shared.seen.values()}) > 1 or not shared.first().samples:
        return shared.skipped("the datasets of the ranks have different or unknown lengths")
    passes = shared.whole_passes()
    if not passes:
        return shared.skipped("no training pass was seen on all ranks")
    samplers = {rank: loader.sampler for rank, loader in shared.seen.items() if loader.sampler is not None}
    known = {rank: sampler for rank, sampler in samplers.items() if sampler.replicas is not None}
    return _judge_drawn(shared, passes) if len(known) < len(shared.seen) else _judge_samplers(shared, passes, known)


def _cut_twice(shared: Shared) -> Answer | None:
    by_rank = [loader.cuts for _, loader in sorted(shared.seen.items())]
    if not shared.is_whole or len({tuple((cut.what, cut.type) for cut in cuts) for cuts in by_rank}) > 1:
        return None
    for level in zip(*by_rank, strict=True):
        numbers = [cut.rank for cut in level if cut.rank is not None]
        if level[0].what != "loader" and len(set(numbers)) < len(numbers):
            return None
    cuts = list(by_rank[0])
    samplers = [cut for cut in cuts if cut.what == "sampler"]
    is_counted = True
    seen = None
    if shared.first().iterable:
        shares = math.prod(cut.replicas or shared.size for cut in cuts)
        if shares > shared.size and any(cut.what == "dataset" for cut in cuts):
            taken = f"one of {shared.size} parts of what its dataset yields"
            proof = f"each rank takes {taken}, which is already a share"
            if any(cut.what == "loader" for cut in cuts):
                proof = "rank 0 reads for all ranks, and its dataset yields only the share of rank 0"
            seen, is_counted = (f"only about 1 of {round(shares / shared.size)} samples", proof), False
    elif len(samplers) > 1:
        seen = _seen_by_samplers(shared, samplers)
    elif samplers and samplers[0].replicas == shared.size:
        if seen := _seen_of_parts(shared):
            cuts = [*samplers, Cut(what="part", type="", replicas=None, rank=None)]
        elif len(cuts) > 1:
            seen, is_counted = _seen_of_own(shared, cuts[-1]), False
    if seen is None:
        return None
    (count, proof), again, first = seen, cuts[0], cuts[-1]
    numbered = (cut for cut in (first, again) if cut.replicas is not None)
    parts = (f"{_cut_words(cut)}: rank {cut.rank} of {cut.replicas} on rank {shared.ranks[0]}" for cut in numbered)
    return shared.failed(
        f"all ranks together see {count} in an epoch: the data is divided among the ranks twice, by "
        f"{_cut_words(first)} and again by {_cut_words(again)} ({shared.name})",
        shared.ranks,
        (proof, *parts, _sampler_words(shared)),
        _fix_of_cuts(first, again),
        confidence=Confidence.HIGH if is_counted else Confidence.MEDIUM,
    )


# how much all ranks together see in an epoch, such as "216 of 640 samples", and how that is known; None: all of it
def _seen_by_samplers(shared: Shared, samplers: list[Cut]) -> tuple[str, str] | None:
    """Return what is seen through two samplers that divide, if the drawn indices confirm it."""
    samples, batch = shared.first().samples or 0, shared.first().batch_size or 1
    shares = math.prod(cut.replicas or shared.size for cut in samplers)
    expected = samples / shares
    if shares <= shared.size or (samples - expected * shared.size) / shared.size < MIN_MISSING_BATCHES * batch:
        return None
    passes = shared.whole_passes()
    if any(epoch.drawn > expected + 2 * batch for found in passes.values() for epoch in found.values()):
        return None
    for number, found in passes.items():
        # A sampler may have no more indices although the script left the loop before the loader's end.
        planned = {rank: sampler.planned for rank in found if (sampler := shared.seen[rank].sampler) is not None}
        ended = all(
            epoch.complete or ((most := planned.get(rank)) is not None and epoch.drawn >= most)
            for rank, epoch in found.items()
        )
        if ended and all(epoch.drawn >= expected - 2 * batch for epoch in found.values()):
            drawn = {rank: epoch.drawn for rank, epoch in found.items()}
            return f"{sum(drawn.values())} of {samples} samples", f"indices drawn in pass {number}: {by_rank(drawn)}"
    known = samplers[0].type.startswith(ACCELERATES) and samplers[-1].type == TORCHS_OWN
    if not known or not passes:
        return None
    proof = f"no pass was complete; each rank gets {math.ceil(expected)} of {samples} samples"
    return f"{math.ceil(expected * shared.size)} of {samples} samples", proof


def _seen_of_parts(shared: Shared) -> tuple[str, str] | None:
    """Return what is seen if each rank's dataset is its own part (Subset) of one dataset, and divided again."""
    loaders = shared.seen.values()
    wholes = {loader.part_of for loader in loaders}
    parts = [loader.chosen for loader in loaders if loader.chosen is not None]
    if len(wholes) > 1 or "" in wholes or len(parts) < shared.size or len({part.of for part in parts}) > 1:
        return None
    whole = parts[0].of
    ranges = sorted((part.start, part.step, part.count) for part in parts if part.start is not None and part.step)
    steps = {step for _, step, _ in ranges}
    in_turn = all(part[0] + part[2] <= other[0] for part, other in pairwise(ranges))
    apart = len(ranges) == len(parts) and len(steps) == 1
    apart = apart and ((steps == {1} and in_turn) or len({start % step for start, step, _ in ranges}) == len(ranges))
    totals = [part.total for part in parts]
    if not apart and sum(part.count for part in parts) == whole and None not in totals:
        sums = sum(total or 0 for total in totals), reduce(xor, (part.xor or 0 for part in parts))
        apart = sums == (sum_of_all(whole), xor_of_all(whole))
    if not apart:
        return None
    seen = sum(math.ceil(part.count / shared.size) for part in parts)
    held = by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"the dataset of each rank is a different part of {whole} samples: {held}"
    return f"{seen} of {whole} samples", proof


def _seen_of_own(shared: Shared, dataset: Cut) -> tuple[str, str] | None:
    """Return what is seen if a dataset divides itself, holds other values on each rank, and a sampler divides again."""
    held = {rank: loader.held for rank, loader in shared.seen.items()}
    if dataset.replicas not in (None, shared.size) or "" in held.values() or len(set(held.values())) < len(held):
        return None
    samples = [loader.samples or 0 for loader in shared.seen.values()]
    seen = sum(math.ceil(count / shared.size) for count in samples)
    counts = by_rank({rank: loader.samples for rank, loader in shared.seen.items()})
    proof = f"each rank's {class_name(dataset.type)} holds different values; samples: {counts}"
    return f"{seen} of {sum(samples)} samples", proof


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
    already = "each rank already has its own part" if first.what == "part" else f"{_cut_words(first)} divides the data"
    return f"remove {class_name(again.type)} (shuffle=True does the rest), because {already}; or {whole}"


def _judge_samplers(
    shared: Shared, passes: Mapping[int, Mapping[int, EpochSeen]], samplers: Mapping[int, SamplerSeen]
) -> Answer:
    if answer := _missing_shares(shared, samplers) or _other_parts(shared, samplers):
        return answer
    samples = shared.first().samples or 0
    are_standard = all(sampler.standard for sampler in samplers.values())
    shuffled = passes if all(sampler.shuffle for sampler in samplers.values()) else {}
    for number, found in shuffled.items():
        epochs = tuple(found.values())
        done = shared.is_whole and all(epoch.complete for epoch in epochs)
        # Whether different parameters do leave a gap: samplers other than torch's need the sums as proof.
        if are_standard:
            is_proved = not (done and shows_all(samples, epochs))
        else:
            is_proved = done and are_distinct(epochs) and must_leave_gap(samples, epochs)
        if is_proved and (answer := _disagreement(shared, found, samplers, number)):
            return answer
    if not shared.is_whole:
        return shared.skipped("it was not seen on all ranks of the group")
    if are_standard and all(sampler.rank is not None for sampler in samplers.values()):
        return passed()
    if any(shows_all(samples, tuple(found.values())) for found in passes.values()):
        return passed()
    return shared.skipped("the shares of its sampler cannot be derived from its sums")


def _missing_shares(shared: Shared, samplers: Mapping[int, SamplerSeen]) -> Answer | None:
    """Return the answer if samplers are for more ranks than exist. Ranks with equal numbers are duplicates instead."""
    counts = {sampler.replicas for sampler in samplers.values()}
    numbers = {sampler.rank for sampler in samplers.values()}
    if not shared.is_whole or len(counts) > 1 or None in numbers or len(numbers) < len(samplers):
        return None
    count = counts.pop() or 0
    if count <= shared.size or count == shared.replicas.world_size or not all(s.standard for s in samplers.values()):
        return None
    missing = sorted(set(range(count)) - {number for number in numbers if number is not None})
    return _misfit(
        shared,
        f"their samplers are for {count} ranks, but there are {shared.size}",
        f"num_replicas={count}; rank: {by_rank({rank: sampler.rank for rank, sampler in samplers.items()})}",
        f"no rank draws the shares of {rank_list(missing)}, {len(missing)} of {count}",
    )


def _other_parts(shared: Shared, samplers: Mapping[int, SamplerSeen]) -> Answer | None:
    """Return the answer if each rank split off its own part before the dataset was shared out."""
    wholes = {loader.part_of for loader in shared.seen.values()}
    numbers = {(sampler.replicas, sampler.rank) for sampler in samplers.values()}
    if len(wholes) > 1 or "" in wholes or numbers != {(shared.size, rank) for rank in range(shared.size)}:
        return None
    parts = {rank: loader.part for rank, loader in shared.seen.items()}
    split = compare(Voice(host="", value=part or None, ranks=(rank,)) for rank, part in parts.items())
    if split is None or not all(sampler.standard for sampler in samplers.values()):
        return None
    return _misfit(
        shared,
        "the ranks use different parts (Subset) of the dataset",
        f"digest of the indices in the Subset: {by_rank(parts)}",
        "the digests of the underlying dataset are equal",
        split=split,
        fix=SPLIT_ALIKE,
    )


def _disagreement(
    shared: Shared, found: Mapping[int, EpochSeen], samplers: Mapping[int, SamplerSeen], number: int
) -> Answer | None:
    """Return the answer if the sum of seed and epoch, by which torch's sampler shuffles, differs between ranks."""
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
    both = {"seeds": seeds, "epochs (set_epoch)": epochs}
    differing = {what: values for what, values in both.items() if len(set(values.values())) > 1}
    return _misfit(
        shared,
        f"their samplers have different {' and '.join(differing)}",
        *(f"{what}: {by_rank(values)} (pass {number})" for what, values in differing.items()),
        _sums_words(shared, found, number),
        split=split,
    )


def _judge_drawn(shared: Shared, passes: Mapping[int, Mapping[int, EpochSeen]]) -> Answer:
    samples = shared.first().samples or 0
    whole = {number: found for number, found in passes.items() if all(epoch.complete for epoch in found.values())}
    if not shared.is_whole or not whole:
        return shared.skipped("no complete pass was seen on all ranks of the group")
    if any(shows_all(samples, tuple(found.values())) for found in whole.values()):
        return passed()
    number, found = next(iter(whole.items()))
    epochs = tuple(found.values())
    shares = {
        tuple((rank, epoch.drawn, epoch.total, epoch.xor) for rank, epoch in sorted(those.items()))
        for those in whole.values()
    }
    as_many = sum(epoch.drawn for epoch in epochs) == samples
    is_proved = as_many and are_distinct(epochs) and must_leave_gap(samples, epochs)
    if is_proved and len(whole) > 1 and len(shares) == 1:
        words = "each rank has the same samples in each epoch, and together they do not cover the dataset"
        return _misfit(shared, words, _sums_words(shared, found, number))
    return shared.skipped("its sampler does not describe its shares, and the sums do not show them")


def _misfit(
    shared: Shared, words: str, *evidence: str, split: Split[Any] | None = None, fix: str = SHARE_ALIKE
) -> Answer:
    """Answer that the shares do not fit together; ``split``: which ranks differ, if not all are concerned."""
    ranks = shared.ranks if split is None else split.ranks
    is_open = split is not None and split.majority is None
    unclear = "no majority, so it is unknown which rank is wrong" if is_open else ""
    return shared.failed(
        f"the shares of {rank_list(shared.ranks)} overlap or miss samples: {words} ({shared.name})",
        ranks,
        (*evidence, unclear, shared_out(shared.first(), shared.size), _sampler_words(shared)),
        fix,
        confidence=Confidence.HIGH if split is None or len(ranks) < len(shared.seen) else Confidence.MEDIUM,
    )


def _sampler_words(shared: Shared) -> str:
    sampler = shared.first().sampler
    return f"sampler {sampler.type}" if sampler is not None else ""


def _sums_words(shared: Shared, found: Mapping[int, EpochSeen], number: int) -> str:
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
    """Report ranks that ran out of batches while others continued."""
    return judge_loaders(replicas, _judge_uneven, "all ranks have the same number of batches")


def _judge_uneven(shared: Shared) -> Answer:
    loaders = shared.seen
    if any(loader.in_join for loader in loaders.values()):
        return shared.skipped("it is used inside join, which handles uneven batches")
    trained = {rank: loader.trained_batches for rank, loader in loaders.items()}
    for number, passes in shared.passes(counted=True).items():
        # Ranks that ended, while another one got more batches in this pass and trained on more over all passes.
        short = tuple(
            rank
            for rank, epoch in passes.items()
            if epoch.complete
            and (loaders[rank].epochs[-1].complete or not shared.replicas.trained_only)
            and any(
                other.batches > epoch.batches and (trained[peer] > trained[rank] or not trained[peer])
                for peer, other in passes.items()
            )
        )
        if not short:
            continue
        batches = {rank: epoch.batches for rank, epoch in passes.items()}
        most = max(batches.values())
        longest = sorted(rank for rank, count in batches.items() if count == most)
        so_far = "" if all(passes[rank].complete for rank in longest) else " so far"
        fewest = sorted({batches[rank] for rank in short})
        fewer = f"{fewest[0]} to {fewest[-1]} batches" if len(fewest) > 1 else count_of(fewest[0], "batch", "batches")
        samples = {rank: loader.samples for rank, loader in loaders.items() if loader.samples is not None}
        return shared.failed(
            f"{rank_list(short)} {verb(short, 'has', 'have')} {fewer} in pass {number}, but {rank_list(longest)} "
            f"{verb(longest, 'has', 'have')} {most}{so_far}: {shared.name}",
            short,
            (
                f"batches of pass {number}: {by_rank(batches)}",
                f"batches trained on in total: {by_rank(trained)}" if any(trained.values()) else "",
                f"samples: {by_rank(samples)}" if samples else "",
                shared_out(shared.first(), shared.size) if len(set(samples.values())) == 1 else "",
            ),
            "give all ranks the same number of batches (DistributedSampler, drop_last=True), or wrap the loop in "
            "`with model.join():`",
            severity=Severity.ERROR if shared.replicas.ended_badly else Severity.WARNING,
        )
    ended = any(sum(epoch.complete for epoch in found.values()) > 1 for found in shared.passes().values())
    return passed() if ended else shared.skipped("fewer than two ranks completed a pass")
