"""The ranks that DDP keeps equal, their loaders, what counts and digests prove about them, and their descriptions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from operator import xor
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.data import SamplingPlan, Sharing, share_out
from ddpdoctor.model.findings import Confidence, Outcome, Severity
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.words import count_of, grouped, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped
from ddpdoctor.rules.progress.states import to_place
from ddpdoctor.rules.progress.waits import DEFAULT_GROUP, group_table, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from ddpdoctor.model.data import Drawn, EpochSeen, LoaderSeen, Pass
    from ddpdoctor.model.facts import Job, Rank
    from ddpdoctor.model.findings import Place

    _Digests = Mapping[str, Mapping[str, str]]  # digests by leaf, then by batch or sample


def class_name(path: str) -> str:
    return path.rpartition(".")[2]


def drawn_words(epoch: EpochSeen) -> str:
    state = "" if epoch.complete else ", not finished"
    return (
        f"drew {count_of(epoch.drawn, 'index', 'indices')} in {count_of(epoch.batches, 'batch', 'batches')}"
        f" (sum {epoch.total}, xor {epoch.xor}){state}"
    )


def by_rank(values: Mapping[int, object]) -> str:
    """Return "0 on rank 2, 3 on ranks 0 and 1", with only the first few of many different values."""
    sides = grouped((value, rank) for rank, value in sorted(values.items()))
    shown = [f"{value} on {rank_list(ranks)}" for value, ranks in list(sides.items())[:4]]
    return ", ".join(shown) + (f", and {len(sides) - 4} more values" if len(sides) > 4 else "")


def shared_out(loader: LoaderSeen, size: int) -> str:
    """Return what a DistributedSampler would give each rank, or "" if the dataset's size is unknown."""
    if not loader.samples or not loader.batch_size:
        return ""
    drop_last = bool(loader.sampler is not None and loader.sampler.drop_last)
    plan = SamplingPlan(
        samples=loader.samples, world_size=size, batch_size=loader.batch_size, drop_last=bool(loader.drop_last),
        sampler_drop_last=drop_last, sharing=Sharing.SAMPLER,
    )  # fmt: skip
    shares = share_out(plan)
    first = shares.ranks[0]
    repeated = sum(share.repeated for share in shares.ranks)
    return (
        f"a DistributedSampler for {size} ranks gives each {first.drawn} of {loader.samples} samples"
        f" ({count_of(first.batches, 'batch', 'batches')} of {loader.batch_size}): {repeated} repeated,"
        f" {shares.missed or 0} missed per epoch"
    )


NOT_LOOKED = "no use of a DataLoader was recorded"
NO_REPLICAS = "no DDP model was seen on two or more ranks, so it is unknown which ranks share data"
# The smallest share of a training pass's batches that a backward follows. Our choice: gradients can be accumulated over
# batches only with a backward for each; if an evaluation loop is left early, only its last batch is followed by the
# next backward.
MIN_TRAINED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ranks that should train one model on different data."""

    loaders: Mapping[int, Sequence[LoaderSeen]]  # by rank, in the order of their first use
    size: int  # how many ranks the group has, including those that are not in ``loaders``
    world_size: int  # how many ranks the job has
    hosts: Mapping[int, str] = field(default_factory=dict)
    # Whether only loaders count that run a backward between batches. False if the user named a loader to train with.
    trained_only: bool = True
    ended_badly: bool = False  # whether the job hung or failed, or a loop over this loader would
    # Whether DDP keeps a model equal on them. False: they are all ranks of a job without DDP, which may well share
    # samples.
    by_model: bool = True
    drawn: Drawn | None = None  # what `check-data` counted for its only loader, or None for a job that trained


def replicas_of(job: Job) -> tuple[Replicas, ...] | Unread:
    """Return the groups in which DDP keeps models equal, each set of ranks once, or why none is known."""
    if all(rank.loaders is None for rank in job.ranks):
        return Unread(why=Why.ABSENT, reason=NOT_LOOKED)
    users: dict[str, set[int]] = {}  # by group name: the ranks that gave DDP a model for that group
    for rank in job.ranks:
        for model in rank.models:
            users.setdefault(model.group, set()).add(rank.rank)

    def replicas(ranks: Sequence[Rank], size: int, *, by_model: bool = True) -> Replicas:
        return Replicas(
            loaders={rank.rank: rank.loaders or () for rank in ranks},
            size=max(size, len(ranks)),
            world_size=world_of(job),
            hosts={rank.rank: rank.host for rank in ranks},
            ended_badly=not job.ended or job.launcher_status != 0,
            by_model=by_model,
        )

    table = group_table(job)
    looked = {rank.rank: rank for rank in job.ranks}
    found: dict[tuple[int, ...], Replicas] = {}
    for name, using in sorted(users.items()):
        known = (getattr(table.get((rank, name)), "members", ()) for rank in using)
        for members in sorted({members or tuple(sorted(using)) for members in known}):
            ranks = [looked[number] for number in members if number in looked and number in using]
            size = world_of(job) if name == DEFAULT_GROUP else len(members)
            if len(ranks) > 1:
                found.setdefault(tuple(rank.rank for rank in ranks), replicas(ranks, size))
    if not found and len(job.ranks) > 1 and all(rank.loaders for rank in job.ranks):
        return (replicas(job.ranks, world_of(job), by_model=False),)
    return tuple(found.values()) or Unread(why=Why.ABSENT, reason=NO_REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One loader that two or more ranks of a group used to train."""

    replicas: Replicas
    seen: Mapping[int, LoaderSeen]  # by rank

    @property
    def size(self) -> int:
        return self.replicas.size

    @property
    def name(self) -> str:
        loader = self.first()
        if loader.site is None:
            return f"the DataLoader of {class_name(loader.dataset)}"
        return f"the DataLoader ({loader.site.file.rpartition('/')[2]}:{loader.site.line})"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.seen))

    @property
    def is_whole(self) -> bool:
        return len(self.seen) == self.size

    def first(self) -> LoaderSeen:
        return self.seen[self.ranks[0]]

    def passes(self, least: int = 2, *, counted: bool = False) -> dict[int, dict[int, EpochSeen]]:
        """Return the passes that at least ``least`` ranks made, all or those that count, by number and rank."""
        found: dict[int, dict[int, EpochSeen]] = {}
        for rank in self.ranks:
            for epoch in self.seen[rank].epochs:
                if not counted or self.is_counted(epoch):
                    found.setdefault(epoch.number, {})[rank] = epoch
        return {number: found[number] for number in sorted(found) if len(found[number]) >= least}

    def whole_passes(self) -> dict[int, dict[int, EpochSeen]]:
        return self.passes(len(self.seen), counted=True)

    def is_counted(self, epoch: EpochSeen) -> bool:
        return was_trained(epoch) or not self.replicas.trained_only

    def skipped(self, reason: str) -> Answer:
        return skipped(f"{self.name}: {reason}")

    def failed(
        self, summary: str, ranks: tuple[int, ...], evidence: Iterable[str], fix: str, *,
        where: tuple[Place, ...] = (), **fields: Any,
    ) -> Answer:  # fmt: skip
        """Answer with one problem of these ranks, and the lines that loop over the loader; ``evidence`` may be ""."""
        loops = (to_place(rank, site) for rank in ranks if (site := self.seen[rank].site) is not None)
        hosts = self.replicas.hosts
        problem = Problem(
            summary=summary,
            ranks=ranks,
            hosts=tuple(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts)),
            where=(*where, *loops),
            evidence=tuple(filter(None, evidence)),
            fix=fix,
            **fields,
        )
        return judged([problem])


def judge_loaders(
    replicas: Replicas, judge: Callable[[Shared], Answer], healthy: str, *, of_any_job: bool = False
) -> Answer:
    """Apply a rule to all loaders of a group. Return all problems, or else "passed" if any loader passed."""
    # ``healthy`` describes a pass. If no loader passed, return the first reason to skip. Ranks without DDP are skipped,
    # unless the rule is ``of_any_job``.
    if not replicas.by_model and not of_any_job:
        return skipped(NO_REPLICAS)
    if replicas.size == 1:
        return skipped("there is only one rank")
    heard = [judge(shared) for shared in shared_loaders(replicas)]
    problems = tuple(problem for answer in heard for problem in answer.problems)
    if problems:
        return judged(problems, problems[0].summary)
    if any(answer.outcome is Outcome.PASSED for answer in heard):
        return passed(healthy)
    return skipped(heard[0].seen if heard else "no DataLoader was used for training on two or more ranks")


def shared_loaders(replicas: Replicas) -> tuple[Shared, ...]:
    """Return the loaders that ranks of a group trained with, paired by the line that loops over them and by order."""
    by_rank = {
        rank: grouped((_pairing_key(loader), loader) for loader in _join_remade(loaders))
        for rank, loaders in replicas.loaders.items()
    }
    paired: list[Shared] = []
    for key in dict.fromkeys(key for found in by_rank.values() for key in found):
        using = {rank: loaders[key] for rank, loaders in by_rank.items() if key in loaders}
        counts = {len(loaders) for loaders in using.values()}
        # Ranks that used different numbers of them cannot be paired.
        if len(using) > 1 and len(counts) == 1:
            rows = zip(*using.values(), strict=True)
            paired += (Shared(replicas=replicas, seen=dict(zip(using, row, strict=True))) for row in rows)
    if not replicas.trained_only:
        return tuple(paired)
    found = []
    for shared in paired:
        loaders = shared.seen.values()
        used = sum(any(map(was_trained, loader.epochs)) for loader in loaders) > 1
        if any(cut.what == "loader" for cut in shared.first().cuts):  # rank 0 reads for all
            used = any(epoch.trained and epoch.backwards > 1 for loader in loaders for epoch in loader.epochs)
        found += [shared] if used else []
    return tuple(found)


def was_trained(epoch: EpochSeen) -> bool:
    enough = epoch.backwards > 1 or (epoch.complete and epoch.batches == 1)
    return epoch.trained and enough and epoch.backwards >= MIN_TRAINED_SHARE * epoch.batches


def _pairing_key(loader: LoaderSeen) -> Hashable:
    site, sampler = loader.site, loader.sampler.type if loader.sampler is not None else ""
    # The line is without the folder, which may differ between nodes.
    line = (site.file.rpartition("/")[2], site.line, site.function) if site is not None else None
    return (line, loader.dataset, loader.iterable, sampler)


def _join_remade(loaders: Sequence[LoaderSeen]) -> tuple[LoaderSeen, ...]:
    """Join each loader that was created again at the same line, for the next pass, to the one before it."""
    joined: list[LoaderSeen] = []
    last: dict[Hashable, int] = {}
    for after in loaders:
        shuffle = after.sampler.shuffle if after.sampler is not None else None
        same = (_pairing_key(after), after.samples, after.batch_size, after.drop_last, after.dataset_digest)
        at = last.get(same)
        before = joined[at] if at is not None else None
        ended = before.epochs[-1].ended_ns if before is not None and before.epochs and after.epochs else None
        shuffled = before.sampler.shuffle if before is not None and before.sampler is not None else None
        # One was finished before the other was first used, and both shuffle alike.
        if at is None or before is None or ended is None or ended > after.epochs[0].begun_ns or shuffle != shuffled:
            last[same] = len(joined)
            joined.append(after)
            continue
        joined[at] = replace(
            before,
            epochs=(*before.epochs, *(replace(epoch, number=before.passes + epoch.number) for epoch in after.epochs)),
            passes=before.passes + after.passes,
            trained_batches=before.trained_batches + after.trained_batches,
            in_join=before.in_join or after.in_join,
        )
    return tuple(joined)


ORDER_LENGTH = 4096  # how many first indices of a pass are checked one by one for repeats: the recorder's ``MAX_ORDER``
# If draws with replacement would repeat this many of the first indices and none repeats, the draws were without
# replacement. Our choice: the chance of an error is 1 in 3,000 passes (a Poisson distribution with this mean).
MIN_EXPECTED_REPEATS = 8
# A leaf counts only with at least this many different digests. Our choice: a value that is the same in every batch
# proves nothing.
MIN_BATCHES = 2
# If other leaves differ, a leaf counts only with at least this many equal samples. Our choice: labels of few classes
# are often equal by chance on one or two samples.
MIN_SAMPLES = 4


def sum_of_all(samples: int) -> int:
    return samples * (samples - 1) // 2


def xor_of_all(samples: int) -> int:
    """Return 0 ^ 1 ^ ... ^ (samples - 1), which has a period of four."""
    last = samples - 1
    return (last, 1, last + 1, 0)[last % 4] if samples > 0 else 0


def drew_all(epoch: EpochSeen, loader: LoaderSeen) -> bool:
    """Return whether a pass drew each index of a dataset once, except for a dropped incomplete last batch."""
    samples = loader.samples
    if not samples or not epoch.complete:
        return False
    if epoch.drawn == samples:
        return (epoch.total, epoch.xor) == (sum_of_all(samples), xor_of_all(samples))
    dropped = (loader.batch_size or 1) - 1 if loader.drop_last else 0
    # With replacement, some of the first indices would have repeated.
    looked_at = min(epoch.drawn, ORDER_LENGTH)
    draws_once = epoch.repeats == 0 and looked_at * looked_at >= 2 * MIN_EXPECTED_REPEATS * samples
    return samples - dropped <= epoch.drawn < samples and draws_once


def are_distinct(epochs: Iterable[EpochSeen]) -> bool:
    """Return whether it is certain that no rank drew an index twice in its pass."""
    return all(epoch.repeats == 0 and epoch.drawn <= ORDER_LENGTH for epoch in epochs)


def must_leave_gap(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether ranks must have missed a sample although they drew at least as many indices as there are."""
    # With exactly as many draws as samples, each must come once. Draws beyond that are repeats. For one repeat, the sum
    # shows which index it is, and the exclusive or must agree. For more, their sum must be possible.
    if not _are_of(samples, epochs):
        return False
    drawn = sum(epoch.drawn for epoch in epochs)
    beyond, excess = drawn - samples, sum(epoch.total for epoch in epochs) - sum_of_all(samples)
    if beyond < 0:
        return False
    if not 0 <= excess <= beyond * (samples - 1):
        return True
    return beyond < 2 and reduce(xor, (epoch.xor for epoch in epochs), xor_of_all(samples)) != excess


def shows_all(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether all ranks together drew each index once, judged by count, sum and exclusive or."""
    as_many = sum(epoch.drawn for epoch in epochs) == samples
    return as_many and _are_of(samples, epochs) and not must_leave_gap(samples, epochs)


def _are_of(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether the indices are within the dataset, rather than in a larger one that contains it."""
    return all(epoch.highest is None or epoch.highest < samples for epoch in epochs)


def same_contents(loaders: tuple[LoaderSeen, LoaderSeen], passes: tuple[EpochSeen, EpochSeen]) -> bool | None:
    """Return whether two ranks hold the same dataset, or None if that is unknown."""
    # The same index must give the same values in at least one leaf: random augmentation changes some leaves, but not
    # the labels. If no digest helps, equal descriptions of the dataset decide.
    epoch, other = passes
    described_alike = bool(loaders[0].dataset_digest) and loaders[0].dataset_digest == loaders[1].dataset_digest
    alike = _compare_digests(_by_leaf(epoch.sample_digests, 2), _by_leaf(other.sample_digests, 2), MIN_SAMPLES)
    if alike is None and epoch.first and epoch.first == other.first:
        alike = _compare_digests(_by_leaf(epoch.batch_digests, 1), _by_leaf(other.batch_digests, 1), MIN_BATCHES)
    if alike is False:
        return None if described_alike else False
    if alike is None and not all(each.batch_digests or each.sample_digests for each in passes):
        return described_alike or None
    return alike


def same_batches(epoch: EpochSeen, other: EpochSeen) -> bool:
    mine, others = (_by_leaf(each.batch_digests, 1) for each in (epoch, other))
    return mine == others and any(len(set(digests.values())) >= MIN_BATCHES for digests in mine.values())


def _compare_digests(digests: _Digests, other: _Digests, least: int) -> bool | None:
    """Return whether any leaf is equal wherever both have it, False if every leaf differs somewhere, else None."""
    leaves = [leaf for leaf in digests if leaf in other]
    common = {leaf: [key for key in digests[leaf] if key in other[leaf]] for leaf in leaves}
    differ = [any(digests[leaf][key] != other[leaf][key] for key in common[leaf]) for leaf in leaves]
    for leaf, differs in zip(leaves, differ, strict=True):
        enough = len(common[leaf]) >= least or not any(differ)
        if not differs and enough and len({digests[leaf][key] for key in common[leaf]}) >= MIN_BATCHES:
            return True
    return False if leaves and all(differ) else None


def _by_leaf(digests: Iterable[str], colons: int) -> dict[str, dict[str, str]]:
    """Return digests by leaf and index; "leaf:digest" of a batch has none, and is numbered within the leaf."""
    found: dict[str, dict[str, str]] = {}
    for entry in digests:
        *index, leaf, digest = entry.split(":", colons)
        known = found.setdefault(leaf, {})
        known[index[0] if index else str(len(known))] = digest
    return found


def with_counts(replicas: Replicas, answer: Answer) -> Answer:
    words = [_count_words(epoch) for epoch in _counted(replicas) if epoch.unique is not None][:1]
    return replace(
        answer, problems=tuple(replace(problem, evidence=(*words, *problem.evidence)) for problem in answer.problems)
    )


def find_overlap(replicas: Replicas) -> Answer | None:
    """Judge shares by samples that overlap or are left out, which sums do not show. None without counts."""
    counted = [epoch for epoch in _counted(replicas) if epoch.unique is not None and epoch.missed is not None]
    if not counted or replicas.drawn is None or replicas.size == 1:
        return None
    for epoch in counted:
        if any(row.repeated for row in epoch.ranks):
            return skipped("the ranks draw with replacement or repeat samples, so their shares cannot be checked")
        # Drawn again while others are not drawn at all, which padding never causes.
        beyond = min(epoch.drawn - (epoch.unique or 0), epoch.missed or 0) if replicas.drawn.samples else 0
        if beyond and not epoch.alike:
            problem = Problem(
                severity=Severity.WARNING,
                confidence=Confidence.MEDIUM,
                ranks=tuple(row.rank for row in epoch.ranks),
                summary=f"in pass {epoch.number}, the ranks draw {beyond} samples too often and miss as many others",
                evidence=(_count_words(epoch),),
                fix="use one order on all ranks: the same seed, and each rank its own part of it; or use "
                "DistributedSampler",
            )
            return judged([problem], problem.summary)
    return passed("the shares of the ranks cover each sample once")


def _counted(replicas: Replicas) -> tuple[Pass, ...]:
    """Return the passes with exact counts, or nothing if equal indices do not mean equal samples."""
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    if replicas.drawn is None or not loaders:
        return ()
    first = loaders[0]
    alike = all(same_contents((first, other), (first.epochs[0], other.epochs[0])) is not False for other in loaders[1:])
    return replicas.drawn.passes if alike else ()


def _count_words(epoch: Pass) -> str:
    return (
        f"counted in pass {epoch.number}: {epoch.drawn} drawn, {epoch.unique} of them different, {epoch.shared} drawn "
        f"by two or more ranks, {epoch.missed} not drawn"
    )
