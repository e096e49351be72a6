"""The replicas of a job by model, their first differences, and the findings about these: causes and ranks to blame."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from ddpdoctor.model.consistency import MESH, StreamClock, What
from ddpdoctor.model.findings import Confidence
from ddpdoctor.model.words import first_names, group_alike, grouped, majority_of, outvoted, rank_list
from ddpdoctor.rules.answers import Answer, Problem, judged, skipped
from ddpdoctor.rules.progress.states import to_place

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    from ddpdoctor.model.consistency import Difference, Stream, TensorRow, TensorSplit, Values
    from ddpdoctor.model.facts import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStreams:
    """One model that the ranks of a group keep equal, with the streams of all clocks that recorded it."""

    group: str
    model: int
    members: tuple[int, ...]
    streams: tuple[Stream, ...]

    @property
    def mesh_dims(self) -> str:
        """The dimensions of the device mesh in which ranks hold equal values, such as "dp"; empty for a DDP model."""
        return self.group.removeprefix(MESH) if self.group.startswith(MESH) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The first difference of one kind between the replicas of one model."""

    replica: ReplicaStreams
    stream: Stream
    difference: Difference
    step: int  # the training step, from 1, during or after which it was seen
    last_good: int | None  # the last step before it at which all tensors of this kind were equal
    values: tuple[Values, ...]  # what ranks wrote at this comparison
    # What they wrote at the last comparison of the same clock at which all were equal, or nothing.
    before: tuple[Values, ...]


def replicas_of(job: Job, *, wrapped: bool = True) -> tuple[ReplicaStreams, ...]:
    """Return the DDP models that were compared, or those trained outside DDP, in the order of their streams."""
    # Groups of different ranks may share a name.
    streams = job.consistency.streams if job.consistency is not None else ()
    found = grouped(
        ((stream.group, stream.model, tuple(sorted({*stream.ranks, *stream.unpaired}))), stream)
        for stream in streams
        if stream.model and (stream.model > 0) is wrapped
    )
    return tuple(
        ReplicaStreams(group=group, model=model, members=members, streams=tuple(those))
        for (group, model, members), those in found.items()
    )


def sightings(replica: ReplicaStreams, what: What) -> list[Sighting]:
    """Return the differences of one kind, at most one per stream, the earliest first."""
    found = []
    equal: list[int] = []  # the steps of the last comparisons at which all tensors of the kind were equal
    for stream in replica.streams:
        different = [difference for difference in stream.differences if difference.what is what]
        number = different[0].last_equal if different else stream.last_number
        equal += [step_of(stream, number)] if what in stream.kinds and number is not None else []
        found += [(step_of(stream, difference.number), stream, difference) for difference in different]
    return [
        Sighting(
            replica=replica,
            stream=stream,
            difference=difference,
            step=step,
            last_good=max((good for good in equal if good < step), default=None),
            values=values_at(stream, difference.number),
            before=values_at(stream, difference.last_equal),
        )
        for step, stream, difference in sorted(found, key=itemgetter(0))
    ]


def values_at(stream: Stream, number: int | None) -> tuple[Values, ...]:
    return next((values for at, values in stream.values if at == number), ())


def all_values(streams: Iterable[Stream]) -> list[Values]:
    return [values for stream in streams for _, those in stream.values for values in those]


def step_of(stream: Stream, number: int) -> int:
    """Return the training step, from 1, of a comparison."""
    # If no optimizer counts steps, a step is a backward whose gradients were reduced.
    if stream.clock is StreamClock.STEP:
        return number
    if stream.clock is StreamClock.SYNC:
        return number + 1
    stepped = [values.steps for values in values_at(stream, number)] if stream.clock is StreamClock.END else []
    return max(stepped) if any(stepped) else max(number, 1)


def is_aligned(values: Iterable[Values]) -> bool:
    """Return whether ranks had progressed equally: the same number of reduced backwards."""
    # A rank that has made one step more or less writes its step N at another point of training than the others.
    return len({each.reductions for each in values}) <= 1


# Part of the names of torch's hook and optimizer, ``post_localSGD_hook`` and ``PostLocalSGDOptimizer``.
_LOCAL_SGD = "ocalSGD"
_SHARDED = "ZeroRedundancyOptimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The differences of one kind of tensor in a job."""

    found: tuple[FoundDifference, ...]  # the first difference of each model, the earliest first
    compared: bool  # whether tensors of this kind were compared at least once, in at least one model
    excuses: tuple[str, ...]  # why some differences do not count, or models were not compared


def survey(job: Job, what: What, why: Callable[[Sighting], DriftCause]) -> Survey:
    found: list[FoundDifference] = []
    excuses: list[str] = []
    compared = False
    for replica in replicas_of(job):
        excuse = excuse_of_model(replica, what)
        if excuse:
            excuses.append(excuse)
            continue
        excused = False
        for sighting in sightings(replica, what):
            cause = why(sighting)
            excuse = _excuse_of_sighting(job, sighting, cause)
            if not excuse:
                found.append(FoundDifference(sighting=sighting, cause=cause))
                break
            excuses.append(excuse)
            excused = True
        for stream in replica.streams:
            # Tensors count as compared if they were equal at all times, or at least before the first difference.
            difference = next((difference for difference in stream.differences if difference.what is what), None)
            was_equal = difference is None or difference.last_equal is not None
            compared = compared or (what in stream.kinds and (was_equal or not excused))
    found.sort(key=lambda difference: difference.sighting.step)
    return Survey(found=tuple(found), compared=compared, excuses=tuple(dict.fromkeys(excuses)))


def ruling(job: Job, survey_: Survey, findings: Iterable[Problem], noun: str) -> Answer:
    found = tuple(findings)
    if found or survey_.compared:
        return judged(found)
    return skipped("; ".join(survey_.excuses) or why_nothing(job, noun))


def why_nothing(job: Job, noun: str) -> str:
    if job.consistency is None:
        return "replicas were not compared"
    if not job.consistency.check_every:
        return "comparing replicas was disabled"
    streams = job.consistency.streams
    if not streams:
        unread = job.consistency.unread
        return unread[0] if unread else "no DDP model was trained on two or more visible ranks"
    if not any(stream.compared for stream in streams):
        alone = sorted({rank for stream in streams for rank in stream.unpaired})
        whose = f": {rank_list(alone)} wrote fingerprints for steps that no other rank has" if alone else ""
        return f"nothing was compared because no two ranks wrote fingerprints of the same step{whose}"
    return f"no {noun} were compared"


def excuse_of_model(replica: ReplicaStreams, what: What) -> str:
    values = all_values(replica.streams)
    if any(_LOCAL_SGD in name for each in values for name in (each.hook, each.optimizer)):
        return "local SGD: ranks differ by design until their parameters are averaged"
    if what is What.STATE and any(_SHARDED in each.optimizer for each in values):
        return f"{_SHARDED}: each rank has the state of its own shard"
    if what is not What.PARAMETER and _joins(replica):
        return "ranks may take different numbers of steps inside DDP's join: only the end is compared"
    return ""


def _excuse_of_sighting(job: Job, sighting: Sighting, cause: DriftCause) -> str:
    """Return why one difference does not count, or "" if it counts."""
    replica, values, at_the_end = sighting.replica, sighting.values, sighting.stream.clock is StreamClock.END
    if not at_the_end and _joins(replica):
        return "ranks may take different numbers of steps inside DDP's join: only the end is compared"
    if not is_aligned(values):
        least = min(each.reductions for each in values)
        behind = rank_list(each.rank for each in values if each.reductions == least)
        points = f"the ranks were at different points at optimizer step {sighting.step}"
        return f"{points}: {behind} had reduced fewer backwards"
    if at_the_end and any(
        stream.clock is StreamClock.STEP
        and sighting.step == stream.last_number
        and What.PARAMETER in stream.kinds
        and not any(difference.what is What.PARAMETER for difference in stream.differences)
        for stream in replica.streams
    ):
        return f"parameters were equal after the last step, {sighting.step}, and changed only later"
    raised = any(error.reducer is not None for rank in job.ranks for error in rank.raised if error.uncaught)
    if raised and any(each.unfinished for each in values):
        return "DDP had not finished its reduction and raised an error at the next forward"
    ends = [stream for stream in replica.streams if stream.clock is StreamClock.END and stream.compared]
    if (
        cause.unsynchronized
        and ends
        and not any(difference.what is What.PARAMETER for stream in ends for difference in stream.differences)
    ):
        return "local SGD: gradients were not reduced, and the parameters were equal at the end"
    return ""


def _joins(replica: ReplicaStreams) -> bool:
    return any(each.join for each in all_values(replica.streams))


Value = TypeVar("Value", bound="Hashable")
MAX_SIDES = 4  # How many sides a sentence lists. Our choice.
_ALIKE = "should have equal values along the {} dimension of the mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBlame:
    """Ranks to blame."""

    ranks: tuple[int, ...]
    # They were seen to do something wrong, or more than half of the ranks agree with each other but not with these.
    is_known: bool = True

    @property
    def confidence(self) -> Confidence:
        return Confidence.HIGH if self.is_known else Confidence.LOW

    @property
    def doubt(self) -> list[str]:
        return [] if self.is_known else ["it is unknown which of them is correct"]


def seen(values: Iterable[Values]) -> DriftBlame | None:
    ranks = tuple(sorted(each.rank for each in values))
    return DriftBlame(ranks=ranks) if ranks else None


def blame_of(splits: Iterable[TensorSplit]) -> DriftBlame:
    """Blame the ranks that are outvoted on any of the tensors that differ."""
    each = [split.sides for split in splits]
    ranks = tuple(sorted({rank for sides in each for rank in outvoted(sides)}))
    return DriftBlame(ranks=ranks, is_known=all(map(majority_of, each)))


def disagreement(values: Mapping[int, Value], words: Callable[[Value], str] = str) -> tuple[str, DriftBlame] | None:
    """Return "0.1 on ranks 0 and 1, 0.01 on rank 2", and the ranks to blame; None if all values are equal."""
    sides = group_alike(values)
    if len(sides) < 2:
        return None
    who = [ranks for _, ranks in sides]
    return sides_words(sides, words), DriftBlame(ranks=outvoted(who), is_known=bool(majority_of(who)))


def sides_words(sides: Sequence[tuple[Value, Sequence[int]]], words: Callable[[Value], str] = str) -> str:
    shown = [f"{words(what)} on {rank_list(ranks)}" for what, ranks in sides[:MAX_SIDES]]
    more = [f"{len(sides) - MAX_SIDES} more different values"] if len(sides) > MAX_SIDES else []
    return ", ".join([*shown, *more])


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCause:
    """Why replicas differ."""

    name: str  # findings with the same code and the same cause are merged into one
    words: str  # a clause that can follow a colon
    fix: str
    # The ranks that the cause itself shows, or None if only the tensors show who differs.
    blame: DriftBlame | None = None
    # Gradients were not reduced. A script that averages parameters by itself may want that.
    unsynchronized: bool = False
    at_the_step: bool = False  # the fault is at, or right before, the line that makes the step
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDifference:
    """A difference that counts, and its likely cause."""

    sighting: Sighting
    cause: DriftCause
    since: int | None = None  # the step at which it began, if known to be before the step at which it was seen


def problems_of(job: Job, found: Iterable[FoundDifference], nouns: str) -> list[Problem]:
    by_cause = grouped((difference.cause.name, difference) for difference in found)
    return [_drift_problem(job, first, others, nouns) for first, *others in by_cause.values()]


def hosts_of(job: Job, ranks: Iterable[int]) -> tuple[str, ...]:
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
    return f"{row.part} of {row.name}" if row.part else row.name


def _drift_problem(job: Job, first: FoundDifference, others: Sequence[FoundDifference], nouns: str) -> Problem:
    sighting = first.sighting
    blame = first.cause.blame or blame_of(sighting.difference.splits)
    everybody = [rank for side in sighting.difference.splits[0].sides for rank in side]
    sites = {each.rank: each.site for each in sighting.values if each.site is not None and each.site.user}
    where = [to_place(rank, sites[rank]) for rank in blame.ranks if rank in sites]
    # With two ranks that differ there is nothing to say.
    split = sighting.difference.splits[0]
    side_words = []
    if not all(len(side) == 1 for side in split.sides) or split.absent_on:
        kinds = ["the same" if at == 0 and len(side) > 1 else "others" for at, side in enumerate(split.sides)]
        sides = [
            ("none" if side == split.absent_on else kind, side) for kind, side in zip(kinds, split.sides, strict=True)
        ]
        side_words = [f"{row_words(split.row)}: {sides_words(sides)}"]
    elif len(split.sides) > 2:
        side_words = [f"{row_words(split.row)}: no two ranks are equal"]
    difference = sighting.difference
    names = list(dict.fromkeys(row_words(split.row) for split in difference.splits))
    few = first_names(names, count=difference.differing)
    return Problem(
        confidence=blame.confidence,
        ranks=blame.ranks,
        hosts=hosts_of(job, blame.ranks),
        where=tuple(where) if first.cause.at_the_step else (),
        step=first.since or sighting.step,
        tensor=split.row.name,
        summary=f"{nouns} differ between {rank_list(everybody)} {_when(sighting)}: {first.cause.words}",
        evidence=(
            _equal_until(sighting),
            f"{difference.differing} of {difference.of} {nouns} differ: {few}",
            *side_words,
            *blame.doubt,
            *first.cause.evidence,
            *model_words(job, sighting.replica),
            *(_also_words(other) for other in others),
        ),
        fix=first.cause.fix,
    )


def _equal_until(sighting: Sighting) -> str:
    at = {
        StreamClock.STEP: "before" if sighting.difference.what is What.GRADIENT else "after",
        StreamClock.FORWARD: "after",
        StreamClock.SYNC: "as DDP had broadcast them, in",
        StreamClock.END: "at the end, after",
    }[sighting.stream.clock]
    seen = f"different {f'{at} step {sighting.step}' if sighting.step else _when(sighting)}"
    if sighting.last_good is None:
        return f"{seen}, in the first comparison"
    before = f"at step {sighting.last_good}" if sighting.last_good else "before the first step"
    return f"equal {before}, {seen}: they diverged in between"


def _when(sighting: Sighting) -> str:
    if not sighting.step:
        return "before the first step"
    if sighting.stream.clock is StreamClock.END:
        return "at the end"
    return f"{'at' if sighting.difference.what is What.GRADIENT else 'after'} step {sighting.step}"


def _also_words(found: FoundDifference) -> str:
    sighting = found.sighting
    name = row_words(sighting.difference.splits[0].row)
    model = sighting.replica.model
    place = "on" if sighting.replica.mesh_dims else f"in {'DDP' if model > 0 else 'unwrapped'} model {abs(model)} of"
    return f"the same {place} {rank_list(sighting.replica.members)}: {name} {_when(sighting)}"
