"""Turns differences into findings: one per cause, for the model in which it was seen first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Place
from ddpdoctor.model.rank_words import first_names, rank_list
from ddpdoctor.rules.answers import Problem
from ddpdoctor.rules.consistency.blame import Ground, blame_of, sides_words
from ddpdoctor.rules.consistency.replicas import replicas_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.consistency import Split, TensorRow
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.consistency.blame import DriftBlame
    from ddpdoctor.rules.consistency.replicas import Replica, Sighting
    from ddpdoctor.rules.consistency.survey import Found

"""How many tensors that differ are named. Our choice."""
_ALIKE = "hold the same in the {} dimension of the mesh"
WHO_IS_UNKNOWN = "it is unknown which of them is right"


def problems_of(job: Job, found: Iterable[Found], nouns: str) -> list[Problem]:
    """Return a finding for each cause. ``nouns`` names what differs, such as "gradients"."""
    by_cause: dict[str, list[Found]] = {}
    for one in found:
        by_cause.setdefault(one.cause.name, []).append(one)
    return [_finding(job, first, others, nouns) for first, *others in by_cause.values()]


def blamed(found: Found) -> DriftBlame:
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


def model_words(job: Job, replica: Replica) -> list[str]:
    """Return which model it is if there are several, or the mesh dimension in which its ranks hold it alike."""
    if replica.mesh_dims:
        return [f"{rank_list(replica.members)} {_ALIKE.format(replica.mesh_dims)}"]
    replicas = replicas_of(job.consistency) if job.consistency is not None else ()
    if len(replicas) < 2 or replica.model < 0:
        return []
    return [f"it is DDP model {replica.model} of {rank_list(replica.members)}"]


def row_words(row: TensorRow) -> str:
    """Return the name of a tensor, with its part if it is optimizer state."""
    return f"{row.part} of {row.name}" if row.part else row.name


def _finding(job: Job, first: Found, others: Sequence[Found], nouns: str) -> Problem:
    blame, sighting = blamed(first), first.sighting
    return Problem(
        confidence=blame.confidence,
        ranks=blame.ranks,
        hosts=hosts_of(job, blame.ranks),
        where=_places(first, blame) if first.cause.at_the_step else (),
        step=first.since or sighting.step,
        tensor=sighting.difference.splits[0].row.name,
        summary=f"{nouns} differ between {rank_list(_everybody(sighting))} {_when(sighting)}: {first.cause.words}",
        evidence=(
            moments_words(sighting),
            _count_words(sighting, nouns),
            *_side_words(sighting),
            *([WHO_IS_UNKNOWN] if blame.ground is Ground.NONE else []),
            *first.cause.evidence,
            *model_words(job, sighting.replica),
            *(_also_words(one) for one in others),
        ),
        fix=first.cause.fix,
    )


def moments_words(sighting: Sighting) -> str:
    """Return when the tensors were last equal, and when they first differed."""
    seen = f"different {_moment_words(sighting) if sighting.step else _when(sighting)}"
    if sighting.last_good is None:
        return f"{seen}, the first moment that was compared"
    if not sighting.last_good:
        return f"equal before the first step, {seen}: it happened in between"
    return f"equal at step {sighting.last_good}, {seen}: it happened in between"


def _when(sighting: Sighting) -> str:
    if not sighting.step:
        return "before the first step"
    if sighting.stream.clock is StreamClock.END:
        return "at the end"
    return f"{'at' if sighting.difference.what is What.GRADIENT else 'after'} step {sighting.step}"


def _moment_words(sighting: Sighting) -> str:
    words = {
        StreamClock.STEP: "before" if sighting.difference.what is What.GRADIENT else "after",
        StreamClock.FORWARD: "after",
        StreamClock.SYNC: "as DDP had sent them, in",
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
    return [f"{row_words(split.row)}: {_split_words(split)}"]


def _split_words(split: Split) -> str:
    sides = [(_side_name(split, side, at), side) for at, side in enumerate(split.sides)]
    return sides_words(sides)


def _side_name(split: Split, side: tuple[int, ...], at: int) -> str:
    if side == split.absent_on:
        return "none"
    return "the same" if at == 0 and len(side) > 1 else "others"


def _also_words(found: Found) -> str:
    sighting = found.sighting
    name = row_words(sighting.difference.splits[0].row)
    if sighting.replica.mesh_dims:
        return f"likewise on {rank_list(sighting.replica.members)}: {name} {_when(sighting)}"
    return (
        f"likewise in {'DDP' if sighting.replica.model > 0 else 'unwrapped'} model {abs(sighting.replica.model)} of "
        f"{rank_list(sighting.replica.members)}: {name} {_when(sighting)}"
    )


def _everybody(sighting: Sighting) -> tuple[int, ...]:
    return tuple(rank for side in sighting.difference.splits[0].sides for rank in side)


def _places(found: Found, blame: DriftBlame) -> tuple[Place, ...]:
    sites = {values.rank: values.site for values in found.sighting.values}
    places = []
    for rank in blame.ranks:
        site = sites.get(rank)
        if site is not None and site.user:
            places.append(Place(rank=rank, file=site.file, line=site.line, function=site.function))
    return tuple(places)
