"""What a report says of loaders: what each rank of a job took from those that it trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.model.codec import encode
from ddpdoctor.model.data import LoaderTaken, PassTaken, RankTaken
from ddpdoctor.model.reading import Unread
from ddpdoctor.rules.data.shared import replicas_of, shared_loaders

if TYPE_CHECKING:
    from ddpdoctor.model.data import EpochSeen
    from ddpdoctor.model.facts import Job
    from ddpdoctor.rules.data.shared import Shared

MOST_LOADERS = 16
"""Our choice: a script with more makes them anew, and the first ones tell as much."""


def loader_data(job: Job) -> list[Any]:
    """Encode the loaders that two or more ranks of a group trained with, paired as the data rules pair them."""
    try:
        return [encode(_taken(shared)) for shared in _shared(job)[:MOST_LOADERS]]
    except Exception:  # noqa: BLE001 - damaged records of one rank must not cost the report
        return []


def _shared(job: Job) -> list[Shared]:
    found = replicas_of(job)
    return (
        []
        if isinstance(found, Unread)
        else [one for replicas in found if replicas.by_model for one in shared_loaders(replicas)]
    )


def _taken(shared: Shared) -> LoaderTaken:
    site, passes = shared.first().site, shared.passes()
    return LoaderTaken(
        file="" if site is None else site.file,
        line=0 if site is None else site.line,
        passes=tuple(
            PassTaken(number=number, ranks=tuple(_rank(shared, rank, epoch) for rank, epoch in passes[number].items()))
            for number in dict.fromkeys([*list(passes)[:1], *list(passes)[-1:]])
        ),
    )


def _rank(shared: Shared, rank: int, epoch: EpochSeen) -> RankTaken:
    visible = shared.seen[rank].indices_seen
    return RankTaken(
        rank=rank,
        batches=epoch.batches,
        drawn=epoch.drawn if visible else None,
        order=epoch.order if visible and epoch.drawn else "",
        complete=epoch.complete,
    )
