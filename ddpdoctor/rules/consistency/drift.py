"""DD501: parameters differ between ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import StreamClock, What
from ddpdoctor.model.findings import Severity
from ddpdoctor.rules.consistency.parameter_causes import UNEVEN_STEPS, why_parameters_differ
from ddpdoctor.rules.consistency.problems import DriftCause, FoundDifference, problems_of, seen
from ddpdoctor.rules.consistency.replicas import is_aligned, sightings, unwrapped_of
from ddpdoctor.rules.consistency.survey import ruling, survey
from ddpdoctor.rules.registry import rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.answers import Answer
    from ddpdoctor.rules.consistency.replicas import ReplicaStreams, Sighting

MIN_EXCHANGED = 2
"""Steps with equal gradients on all ranks, before we assume that the script exchanges them. Our choice: one may be
chance, for example if all gradients are zero."""
BROADCAST = (
    "wrap the model in DistributedDataParallel, or broadcast rank 0's parameters once before training: `for p in "
    "model.parameters(): dist.broadcast(p.data, src=0)`"
)


@rule("DD501", "param-drift", Severity.ERROR, "Parameters differ between ranks", after=("grad-drift",))
def check_parameters(job: Job) -> Answer:
    """Report parameters that differ between ranks that should hold the same values."""
    seen = survey(job, What.PARAMETER, why_parameters_differ)
    found = [*(_since(one) for one in seen.found), *unwrapped_drift(job)]
    return ruling(job, seen, problems_of(job, found, "parameters"), "parameters")


def _since(found: FoundDifference) -> FoundDifference:
    """Return a difference with the step at which ranks first had different step counts.

    Such ranks are compared at the end only, after equally many backwards.
    """
    sighting = found.sighting
    if found.cause.name != UNEVEN_STEPS or sighting.stream.clock is not StreamClock.END:
        return found
    if any(values.steps == 0 for values in sighting.values):
        return replace(found, since=1)
    first = next((one.step for one in sightings(sighting.replica, What.PARAMETER) if not is_aligned(one.values)), None)
    return replace(found, since=first)


def unwrapped_drift(job: Job) -> Iterator[FoundDifference]:
    """Yield the models that differ although their use shows that they should be equal."""
    for replica in unwrapped_of(job):
        sighting = next(iter(sightings(replica, What.PARAMETER)), None)
        cause = _cause(replica, sighting) if sighting is not None else None
        if sighting is not None and cause is not None:
            yield FoundDifference(sighting=sighting, cause=cause, since=None if sighting.step else 1)


def _cause(replica: ReplicaStreams, sighting: Sighting) -> DriftCause | None:
    """Return why a model that should be equal differs, or None if each rank may have its own by design."""
    if _is_exchanged(sighting.stream):
        return _never_sent(replica, sighting) if sighting.last_good is None else why_parameters_differ(sighting)
    if _is_trained_through(sighting.stream):
        return _alone(sighting)
    return None


def _is_exchanged(stream: Stream) -> bool:
    """Return whether all ranks stepped with the same gradients, which separate models never have by themselves."""
    differs = any(one.what is What.GRADIENT for one in stream.differences)
    stood_still = stream.unchanged >= stream.compared - 1
    return What.GRADIENT in stream.kinds and not differs and not stood_still and stream.compared > MIN_EXCHANGED


def _is_trained_through(stream: Stream) -> bool:
    """Return whether a model has its own loss and also passes gradients on to DDP: a discriminator, a critic."""
    last = [values for number, values in stream.values if number == stream.last_number]
    return bool(last) and all(each.own_steps > 0 and each.through > 0 for each in last[0])


def _never_sent(replica: ReplicaStreams, sighting: Sighting) -> DriftCause:
    return DriftCause(
        name="never sent",
        words="the gradients are equal on all ranks, but the parameters never were: each rank created its own "
        "initial weights (another seed), and no rank broadcast them",
        fix=BROADCAST,
        blame=seen(sighting.values),
        evidence=(
            f"the model is not wrapped in DDP on its {len(replica.members)} ranks; all ranks used equal gradients",
        ),
    )


def _alone(sighting: Sighting) -> DriftCause:
    since = "from the start" if sighting.last_good is None else "since their first gradients, which were not averaged"
    return DriftCause(
        name="unwrapped",
        words=f"this model is not wrapped in DDP, and its gradients are not reduced, so the ranks differ {since}; the "
        "DDP model trains through it and gets the mean of gradients from different models",
        fix="wrap it in DistributedDataParallel too, one object per model; if each rank should have its own, pass "
        "--allow-different with its name",
        evidence=("it has its own loss, and backwards that reach the DDP model pass through it",),
    )
