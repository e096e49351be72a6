"""The ranks that DDP keeps equal in one group, and the loaders that each of them used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.model.reading import Unread, Why
from ddpdoctor.rules.progress.groups import DEFAULT_GROUP, group_table, world_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.data import LoaderSeen
    from ddpdoctor.model.drawn import Drawn
    from ddpdoctor.model.facts import Job, Rank

NOT_LOOKED = "no use of a DataLoader was recorded"
NO_REPLICAS = "no model of DistributedDataParallel was seen on two ranks or more: which ranks share data is not known"


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
    drawn: Drawn | None = None
    """What `check-data` counted for its only loader, or None for a job that trained."""


def replicas_of(job: Job) -> tuple[Replicas, ...] | Unread:
    """Return the groups in which DDP keeps models equal, each set of ranks once, or why none is known."""
    if all(rank.loaders is None for rank in job.ranks):
        return Unread(why=Why.ABSENT, reason=NOT_LOOKED)
    return _groups(job) or Unread(why=Why.ABSENT, reason=NO_REPLICAS)


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
