"""Turns differences into findings: why replicas differ, who is to blame, and the sentences about both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import first_names, grouped, majority_of, outvoted, rank_list
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.consistency.replicas import replicas_of
from ddpdoctor.rules.progress.states import to_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from ddpdoctor.model.consistency import TensorRow, TensorSplit, Values
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams, Sighting

Value = TypeVar("Value")
MAX_SIDES = 4
"""How many sides a sentence lists. Our choice."""
_ALIKE = "should have equal values along the {} dimension of the mesh"
WHO_IS_UNKNOWN = "it is unknown which of them is correct"


class Ground(Enum):
    """The reason to blame these ranks."""

    SEEN = "seen"
    """These ranks were seen to do something wrong."""
    MAJORITY = "majority"
    """More than half of the ranks agree with each other but not with these."""
    NONE = "none"
    """It is unknown which of these ranks are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBlame:
    """Ranks to blame, and why these."""

    ranks: tuple[int, ...]
    ground: Ground

    @property
    def confidence(self) -> Confidence:
        """Return how sure it is that these ranks are to blame."""
        return Confidence.LOW if self.ground is Ground.NONE else Confidence.HIGH


def seen(values: Iterable[Values]) -> DriftBlame | None:
    """Blame ranks that were seen to do something wrong. Return None if there are none."""
    ranks = tuple(sorted(each.rank for each in values))
    return DriftBlame(ranks=ranks, ground=Ground.SEEN) if ranks else None


def blame_outvoted(sides: Collection[Collection[int]]) -> DriftBlame:
    """Blame the ranks outside the majority, or all ranks if no side has more than half."""
    return DriftBlame(ranks=outvoted(sides), ground=Ground.MAJORITY if majority_of(sides) else Ground.NONE)


def blame_of(splits: Iterable[TensorSplit]) -> DriftBlame:
    """Blame the ranks that are outvoted on any of the tensors that differ."""
    each = [blame_outvoted(split.sides) for split in splits]
    ranks = tuple(sorted({rank for blame in each for rank in blame.ranks}))
    is_known = all(blame.ground is Ground.MAJORITY for blame in each)
    return DriftBlame(ranks=ranks, ground=Ground.MAJORITY if is_known else Ground.NONE)


def sides_words(sides: Sequence[tuple[Value, Sequence[int]]], words: Callable[[Value], str] = str) -> str:
    """Return "0.1 on ranks 0 and 1, 0.01 on rank 2"."""
    shown = [f"{words(what)} on {rank_list(ranks)}" for what, ranks in sides[:MAX_SIDES]]
    more = [f"{len(sides) - MAX_SIDES} more different values"] if len(sides) > MAX_SIDES else []
    return ", ".join([*shown, *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCause:
    """Why replicas differ."""

    name: str
    """Findings with the same code and the same cause are merged into one."""
    words: str
    """A clause that can follow a colon."""
    fix: str
    blame: DriftBlame | None = None
    """The ranks that the cause itself shows, or None if only the tensors show who differs."""
    unsynchronized: bool = False
    """Gradients were not reduced. A script that averages parameters by itself may want that."""
    at_the_step: bool = False
    """The fault is at, or right before, the line that makes the step."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDifference:
    """A difference that counts, and its likely cause."""

    sighting: Sighting
    cause: DriftCause
    since: int | None = None
    """The step at which it began, if known to be before the step at which it was seen."""


def problems_of(job: Job, found: Iterable[FoundDifference], nouns: str) -> list[Problem]:
    """Return a finding for each cause. ``nouns`` names what differs, such as "gradients"."""
    by_cause = grouped((one.cause.name, one) for one in found)
    return [_finding(job, first, others, nouns) for first, *others in by_cause.values()]


def blamed(found: FoundDifference) -> DriftBlame:
    """Return the ranks that the cause itself shows, or else those that differ from the majority."""
    return found.cause.blame or blame_of(found.sighting.difference.splits)


def hosts_of(job: Job, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of ranks, or nothing if the job has only one node."""
    if job.nnodes <= 1:
        return ()
    wanted = set(ranks)
    hosts = {rank.host for rank in job.ranks if rank.rank in wanted}
    nodes = job.members.nodes if job.members is not None else ()
    return tuple(sorted(hosts | {node.host for node in nodes if wanted & set(node.ranks) and node.host}))


def model_words(job: Job, replica: ReplicaStreams) -> list[str]:
    """Return which model it is if there are several, or the mesh dimension in which its ranks hold it alike."""
    if replica.mesh_dims:
        return [f"{rank_list(replica.members)} {_ALIKE.format(replica.mesh_dims)}"]
    replicas = replicas_of(job)
    if len(replicas) < 2 or replica.model < 0:
        return []
    return [f"it is DDP model {replica.model} of {rank_list(replica.members)}"]


def row_words(row: TensorRow) -> str:
    """Return the name of a tensor, with its part if it is optimizer state."""
    return f"{row.part} of {row.name}" if row.part else row.name


def _finding(job: Job, first: FoundDifference, others: Sequence[FoundDifference], nouns: str) -> Problem:
    blame, sighting = blamed(first), first.sighting
    everybody = [rank for side in sighting.difference.splits[0].sides for rank in side]
    sites = {each.rank: each.site for each in sighting.values if each.site is not None and each.site.user}
    where = [to_place(rank, sites[rank]) for rank in blame.ranks if rank in sites]
    return Problem(
        confidence=blame.confidence,
        ranks=blame.ranks,
        hosts=hosts_of(job, blame.ranks),
        where=tuple(where) if first.cause.at_the_step else (),
        step=first.since or sighting.step,
        tensor=sighting.difference.splits[0].row.name,
        summary=f"{nouns} differ between {rank_list(everybody)} {_when(sighting)}: {first.cause.words}",
        evidence=(
            when_words(sighting),
            _count_words(sighting, nouns),
            *_side_words(sighting),
            *([WHO_IS_UNKNOWN] if blame.ground is Ground.NONE else []),
            *first.cause.evidence,
            *model_words(job, sighting.replica),
            *(_also_words(one) for one in others),
        ),
        fix=first.cause.fix,
    )


def when_words(sighting: Sighting) -> str:
    """Return when the tensors were last equal, and when they first differed."""
    seen = f"different {_step_words(sighting) if sighting.step else _when(sighting)}"
    if sighting.last_good is None:
        return f"{seen}, in the first comparison"
    if not sighting.last_good:
        return f"equal before the first step, {seen}: they diverged in between"
    return f"equal at step {sighting.last_good}, {seen}: they diverged in between"


def _when(sighting: Sighting) -> str:
    if not sighting.step:
        return "before the first step"
    if sighting.stream.clock is StreamClock.END:
        return "at the end"
    return f"{'at' if sighting.difference.what is What.GRADIENT else 'after'} step {sighting.step}"


def _step_words(sighting: Sighting) -> str:
    words = {
        StreamClock.STEP: "before" if sighting.difference.what is What.GRADIENT else "after",
        StreamClock.FORWARD: "after",
        StreamClock.SYNC: "as DDP had broadcast them, in",
        StreamClock.END: "at the end, after",
    }
    return f"{words[sighting.stream.clock]} step {sighting.step}"


def _count_words(sighting: Sighting, nouns: str) -> str:
    difference = sighting.difference
    names = list(dict.fromkeys(row_words(split.row) for split in difference.splits))
    return f"{difference.differing} of {difference.of} {nouns} differ: {first_names(names, count=difference.differing)}"


def _side_words(sighting: Sighting) -> list[str]:
    """Return who agrees with whom at the first tensor. With two ranks that differ there is nothing to say."""
    split = sighting.difference.splits[0]
    if all(len(side) == 1 for side in split.sides) and not split.absent_on:
        return [f"{row_words(split.row)}: no two ranks are equal"] if len(split.sides) > 2 else []
    sides = [(_side_name(split, side, at), side) for at, side in enumerate(split.sides)]
    return [f"{row_words(split.row)}: {sides_words(sides)}"]


def _side_name(split: TensorSplit, side: tuple[int, ...], at: int) -> str:
    if side == split.absent_on:
        return "none"
    return "the same" if at == 0 and len(side) > 1 else "others"


def _also_words(found: FoundDifference) -> str:
    sighting = found.sighting
    name = row_words(sighting.difference.splits[0].row)
    if sighting.replica.mesh_dims:
        return f"the same on {rank_list(sighting.replica.members)}: {name} {_when(sighting)}"
    return (
        f"the same in {'DDP' if sighting.replica.model > 0 else 'unwrapped'} model {abs(sighting.replica.model)} of "
        f"{rank_list(sighting.replica.members)}: {name} {_when(sighting)}"
    )
