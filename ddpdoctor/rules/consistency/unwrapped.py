"""Models outside DDP that should be equal on all ranks, and differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.consistency import What

from .blame import DriftCause, seen
from .parameter_causes import why_parameters_differ
from .replicas import sightings, unwrapped_of
from .survey import Found

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.model.consistency import Stream
    from ddpdoctor.model.facts import Job

    from .replicas import Replica, Sighting

MIN_EXCHANGED = 2
"""Steps with equal gradients on all ranks, before we assume that the script exchanges them. Our choice: one may be
chance, for example if all gradients are zero."""
BROADCAST = (
    "wrap the model in DistributedDataParallel, or send rank 0's parameters once before training: `for p in "
    "model.parameters(): dist.broadcast(p.data, src=0)`"
)


def unwrapped_drift(job: Job) -> Iterator[Found]:
    """Yield the models that differ although their use shows that they should be equal."""
    for replica in unwrapped_of(job.consistency) if job.consistency is not None else ():
        sighting = next(iter(sightings(replica, What.PARAMETER)), None)
        cause = _cause(replica, sighting) if sighting is not None else None
        if sighting is not None and cause is not None:
            yield Found(sighting=sighting, cause=cause, since=None if sighting.step else 1)


def _cause(replica: Replica, sighting: Sighting) -> DriftCause | None:
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


def _never_sent(replica: Replica, sighting: Sighting) -> DriftCause:
    return DriftCause(
        name="never sent",
        words="the gradients are the same on all ranks and the parameters never were: nobody has sent one rank's "
        "initial weights to the others, and each rank made its own (another seed)",
        fix=BROADCAST,
        blame=seen(sighting.values),
        evidence=(
            f"no DDP holds this model of {len(replica.members)} ranks; all ranks made their steps with equal gradients",
        ),
    )


def _alone(sighting: Sighting) -> DriftCause:
    since = "from the start" if sighting.last_good is None else "since their first gradients, which nobody averaged"
    return DriftCause(
        name="unwrapped",
        words=f"no DDP holds this model and its gradients are not exchanged, so that ranks differ {since}; DDP's model "
        "is trained through it, and gets the mean of gradients that different models made",
        fix="wrap it in DistributedDataParallel as well, one object for each model; where ranks are meant to have "
        "their own, --allow-different with its name",
        evidence=("it is trained by a loss of its own, and backwards that reach DDP's model pass through it",),
    )
