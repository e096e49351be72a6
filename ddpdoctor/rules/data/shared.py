"""The ranks that DDP keeps equal, and their loaders: which loaders of different ranks are one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Outcome
from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.model.words import grouped
from ddpdoctor.rules.answers import Answer, judged, passed, skipped
from ddpdoctor.rules.progress.waits import DEFAULT_GROUP, group_table, world_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from ddpdoctor.model.data import Drawn, EpochSeen, LoaderSeen
    from ddpdoctor.model.facts import Job, Rank

NOT_LOOKED = "no use of a DataLoader was recorded"
NO_REPLICAS = "no DDP model was seen on two or more ranks, so it is unknown which ranks share data"
ONE_RANK = "there is only one rank"
NOT_TRAINED = "no DataLoader was used for training on two or more ranks"
MIN_TRAINED_SHARE = 0.5
"""The smallest share of a training pass's batches that a backward follows. Our choice: gradients can be accumulated
over batches only with a backward for each; if an evaluation loop is left early, only its last batch is followed by the
next backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """Ranks that should train one model on different data."""

    loaders: Mapping[int, Sequence[LoaderSeen]]
    """By rank, in the order of their first use."""
    size: int
    """How many ranks the group has, including those that are not in ``loaders``."""
    world_size: int
    """How many ranks the job has."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    trained_only: bool = True
    """Whether only loaders count that run a backward between batches. False if the user named a loader to train
    with."""
    ended_badly: bool = False
    """Whether the job hung or failed, or a loop over this loader would."""
    by_model: bool = True
    """Whether DDP keeps a model equal on them. False: they are all ranks of a job without DDP, which may well share
    samples."""
    drawn: Drawn | None = None
    """What `check-data` counted for its only loader, or None for a job that trained."""


def replicas_of(job: Job) -> tuple[Replicas, ...] | Unread:
    """Return the groups in which DDP keeps models equal, each set of ranks once, or why none is known."""
    if all(rank.loaders is None for rank in job.ranks):
        return Unread(why=Why.ABSENT, reason=NOT_LOOKED)
    groups = _groups(job)
    if not groups and len(job.ranks) > 1 and all(rank.loaders for rank in job.ranks):
        return (replace(_replicas(job, job.ranks, world_of(job)), by_model=False),)
    return groups or Unread(why=Why.ABSENT, reason=NO_REPLICAS)


def _groups(job: Job) -> tuple[Replicas, ...]:
    table = group_table(job)
    looked = {rank.rank: rank for rank in job.ranks}
    found: dict[tuple[int, ...], Replicas] = {}
    for name, users in sorted(_users(looked.values()).items()):
        for members in sorted({_members(rank, name, table, users) for rank in users}):
            ranks = [looked[number] for number in members if number in looked and number in users]
            size = world_of(job) if name == DEFAULT_GROUP else len(members)
            if len(ranks) > 1:
                found.setdefault(tuple(rank.rank for rank in ranks), _replicas(job, ranks, size))
    return tuple(found.values())


def _users(ranks: Iterable[Rank]) -> dict[str, set[int]]:
    """Return, by group name, the ranks that gave DDP a model for that group."""
    found: dict[str, set[int]] = {}
    for rank in ranks:
        for model in rank.models:
            found.setdefault(model.group, set()).add(rank.rank)
    return found


def _members(rank: int, name: str, table: Mapping[tuple[int, str], object], users: set[int]) -> tuple[int, ...]:
    group = table.get((rank, name))
    members: tuple[int, ...] = getattr(group, "members", ())
    return members or tuple(sorted(users))


def _replicas(job: Job, ranks: Sequence[Rank], size: int) -> Replicas:
    return Replicas(
        loaders={rank.rank: rank.loaders or () for rank in ranks},
        size=max(size, len(ranks)),
        world_size=world_of(job),
        hosts={rank.rank: rank.host for rank in ranks},
        ended_badly=not job.ended or job.launcher_status != 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One loader that two or more ranks of a group used to train."""

    seen: Mapping[int, LoaderSeen]
    """By rank."""
    size: int
    """How many ranks the group has."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that used it, sorted."""
        return tuple(sorted(self.seen))

    @property
    def is_whole(self) -> bool:
        """Whether it was seen on all ranks of the group."""
        return len(self.seen) == self.size

    def first(self) -> LoaderSeen:
        """Return the loader as the lowest rank recorded it."""
        return self.seen[self.ranks[0]]

    def passes(self) -> dict[int, dict[int, EpochSeen]]:
        """Return the passes that two or more ranks made, by number and rank."""
        found: dict[int, dict[int, EpochSeen]] = {}
        for rank in self.ranks:
            for epoch in self.seen[rank].epochs:
                found.setdefault(epoch.number, {})[rank] = epoch
        return {number: found[number] for number in sorted(found) if len(found[number]) > 1}


def judge_loaders(
    replicas: Replicas, judge: Callable[[Replicas, Shared], Answer], healthy: str, *, of_any_job: bool = False
) -> Answer:
    """Apply a rule to all loaders of a group. Return all problems, or else "passed" if any loader passed.

    ``healthy`` describes a pass. If no loader passed, return the first reason to skip. Ranks without DDP are skipped,
    unless the rule is ``of_any_job``.
    """
    if not replicas.by_model and not of_any_job:
        return skipped(NO_REPLICAS)
    if replicas.size == 1:
        return skipped(ONE_RANK)
    heard = [judge(replicas, shared) for shared in shared_loaders(replicas)]
    problems = tuple(problem for answer in heard for problem in answer.problems)
    if problems:
        return judged(problems, problems[0].summary)
    if any(answer.outcome is Outcome.PASSED for answer in heard):
        return passed(healthy)
    return skipped(heard[0].seen if heard else NOT_TRAINED)


def shared_loaders(replicas: Replicas) -> tuple[Shared, ...]:
    """Return the loaders that ranks of a group trained with, paired by the line that loops over them and by order."""
    by_rank = {
        rank: grouped((_pairing_key(loader), loader) for loader in join_remade(loaders))
        for rank, loaders in replicas.loaders.items()
    }
    keys = dict.fromkeys(key for found in by_rank.values() for key in found)
    paired = (_pair(by_rank, key, replicas.size) for key in keys)
    return tuple(shared for pairs in paired for shared in pairs if not replicas.trained_only or is_trained(shared))


def _pair(by_rank: Mapping[int, Mapping[Hashable, list[LoaderSeen]]], key: Hashable, size: int) -> list[Shared]:
    """Pair the loaders of one line in order. Return nothing if ranks used different numbers of them."""
    found = {rank: loaders[key] for rank, loaders in by_rank.items() if key in loaders}
    if len(found) < 2 or len({len(loaders) for loaders in found.values()}) > 1:
        return []
    count = len(next(iter(found.values())))
    return [Shared(seen={rank: loaders[i] for rank, loaders in found.items()}, size=size) for i in range(count)]


def is_trained(shared: Shared) -> bool:
    """Return whether at least two ranks used it for training, or rank 0 for all."""
    if any(cut.what == "loader" for cut in shared.first().cuts):
        return any(epoch.trained and epoch.backwards > 1 for loader in shared.seen.values() for epoch in loader.epochs)
    return sum(any(was_trained(epoch) for epoch in loader.epochs) for loader in shared.seen.values()) > 1


def was_trained(epoch: EpochSeen) -> bool:
    """Return whether a pass was for training. One backward is not enough unless the pass had only one batch."""
    enough = epoch.backwards > 1 or (epoch.complete and epoch.batches == 1)
    return epoch.trained and enough and epoch.backwards >= MIN_TRAINED_SHARE * epoch.batches


def _pairing_key(loader: LoaderSeen) -> Hashable:
    sampler = loader.sampler.type if loader.sampler is not None else ""
    return (_line(loader), loader.dataset, loader.iterable, sampler)


def _line(loader: LoaderSeen) -> Hashable:
    """Return the line of a loader without the folder, which may differ between nodes."""
    site = loader.site
    return (site.file.rpartition("/")[2], site.line, site.function) if site is not None else None


def join_remade(loaders: Sequence[LoaderSeen]) -> tuple[LoaderSeen, ...]:
    """Join each loader that was created again at the same line, for the next pass, to the one before it."""
    joined: list[LoaderSeen] = []
    last: dict[Hashable, int] = {}
    for loader in loaders:
        key = (_pairing_key(loader), loader.samples, loader.batch_size, loader.drop_last, loader.dataset_digest)
        before = last.get(key)
        if before is not None and _continues(joined[before], loader):
            joined[before] = _joined(joined[before], loader)
        else:
            last[key] = len(joined)
            joined.append(loader)
    return tuple(joined)


def _continues(before: LoaderSeen, after: LoaderSeen) -> bool:
    """Return whether one loader was finished before the other was first used, and both shuffle alike."""
    if not before.epochs or not after.epochs or _shuffle(before) != _shuffle(after):
        return False
    ended = before.epochs[-1].ended_ns
    return ended is not None and ended <= after.epochs[0].begun_ns


def _shuffle(loader: LoaderSeen) -> bool | None:
    return loader.sampler.shuffle if loader.sampler is not None else None


def _joined(before: LoaderSeen, after: LoaderSeen) -> LoaderSeen:
    more = tuple(replace(epoch, number=before.passes + epoch.number) for epoch in after.epochs)
    return replace(
        before,
        epochs=before.epochs + more,
        passes=before.passes + after.passes,
        trained_batches=before.trained_batches + after.trained_batches,
        in_join=before.in_join or after.in_join,
    )
