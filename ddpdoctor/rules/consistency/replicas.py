"""The replicas of a job by model, and the first difference of each kind between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import MESH, StreamClock, What
from ddpdoctor.model.words import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.model.consistency import Difference, Stream, Values
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
        """The dimensions of the device mesh in which ranks hold the same, such as "dp"; empty for a DDP model."""
        return self.group.removeprefix(MESH) if self.group.startswith(MESH) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The first difference of one kind between the replicas of one model."""

    replica: ReplicaStreams
    stream: Stream
    difference: Difference
    step: int
    """The training step, from 1, during or after which it was seen."""
    last_good: int | None
    """The last step before it at which all tensors of this kind were equal."""
    values: tuple[Values, ...]
    """What ranks wrote at this comparison."""
    before: tuple[Values, ...]
    """What they wrote at the last comparison of the same clock at which all were equal, or nothing."""


def replicas_of(job: Job) -> tuple[ReplicaStreams, ...]:
    """Return the DDP models whose replicas were compared, in the order of their streams.

    Groups of different ranks may share a name.
    """
    return _models(stream for stream in _streams(job) if stream.model > 0)


def unwrapped_of(job: Job) -> tuple[ReplicaStreams, ...]:
    """Return the models that optimizers train outside DDP."""
    return _models(stream for stream in _streams(job) if stream.model < 0)


def _streams(job: Job) -> tuple[Stream, ...]:
    return job.consistency.streams if job.consistency is not None else ()


def _models(streams: Iterable[Stream]) -> tuple[ReplicaStreams, ...]:
    found = grouped(((one.group, one.model, tuple(sorted({*one.ranks, *one.unpaired}))), one) for one in streams)
    return tuple(
        ReplicaStreams(group=group, model=model, members=members, streams=tuple(streams))
        for (group, model, members), streams in found.items()
    )


def sightings(replica: ReplicaStreams, what: What) -> list[Sighting]:
    """Return the differences of one kind, at most one per stream, the earliest first."""
    found = [
        _sighting(replica, stream, difference)
        for stream in replica.streams
        for difference in stream.differences
        if difference.what is what
    ]
    return sorted(found, key=lambda sighting: sighting.step)


def values_at(stream: Stream, number: int | None) -> tuple[Values, ...]:
    """Return what ranks wrote at a comparison, or nothing if that was not kept."""
    return next((values for at, values in stream.values if at == number), ())


def all_values(streams: Iterable[Stream]) -> list[Values]:
    """Return what ranks wrote at all comparisons that were kept."""
    return [values for stream in streams for _, those in stream.values for values in those]


def step_of(stream: Stream, number: int) -> int:
    """Return the training step, from 1, of a comparison.

    If no optimizer counts steps, a step is a backward whose gradients were reduced.
    """
    if stream.clock is StreamClock.STEP:
        return number
    if stream.clock is StreamClock.SYNC:
        return number + 1
    stepped = [values.steps for values in values_at(stream, number)] if stream.clock is StreamClock.END else []
    return max(stepped) if any(stepped) else max(number, 1)


def is_aligned(values: Iterable[Values]) -> bool:
    """Return whether ranks had progressed equally: the same number of reduced backwards.

    A rank that has made one step more or less writes its step N at another point of training than the others.
    """
    return len({each.reductions for each in values}) <= 1


def _sighting(replica: ReplicaStreams, stream: Stream, difference: Difference) -> Sighting:
    step = step_of(stream, difference.number)
    return Sighting(
        replica=replica,
        stream=stream,
        difference=difference,
        step=step,
        last_good=_last_good(replica, difference.what, step),
        values=values_at(stream, difference.number),
        before=values_at(stream, difference.last_equal),
    )


def _last_good(replica: ReplicaStreams, what: What, step: int) -> int | None:
    steps = [
        step_of(stream, number)
        for stream in replica.streams
        if what in stream.kinds and (number := _last_equal(stream, what)) is not None
    ]
    return max((good for good in steps if good < step), default=None)


def _last_equal(stream: Stream, what: What) -> int | None:
    """Return the last comparison at which all tensors of a kind were equal, up to the first difference."""
    for difference in stream.differences:
        if difference.what is what:
            return difference.last_equal
    return stream.last_number
