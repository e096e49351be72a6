"""Words about loaders: where they are, how they share out samples, and what a rank drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.data import SamplingPlan, Sharing, share_out
from ddpdoctor.model.words import count_of, grouped, rank_list
from ddpdoctor.rules.progress.states import to_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.data import EpochSeen, LoaderSeen
    from ddpdoctor.model.findings import Place
    from ddpdoctor.rules.data.shared import Replicas, Shared


def name_of(loader: LoaderSeen) -> str:
    """Return the words for a loader: "the loader at train.py:12"."""
    if loader.site is None:
        return f"the DataLoader of {class_name(loader.dataset)}"
    return f"the DataLoader ({loader.site.file.rpartition('/')[2]}:{loader.site.line})"


def class_name(path: str) -> str:
    """Return a class name without its module."""
    return path.rpartition(".")[2]


def places_of(shared: Shared, ranks: Iterable[int]) -> tuple[Place, ...]:
    """Return the line that loops over a loader, for each of these ranks."""
    return tuple(to_place(rank, site) for rank in ranks if (site := shared.seen[rank].site) is not None)


def hosts_of(replicas: Replicas, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of ranks, each once."""
    return tuple(dict.fromkeys(replicas.hosts[rank] for rank in ranks if rank in replicas.hosts))


def drawn_words(epoch: EpochSeen) -> str:
    """Return what a rank drew in a pass, so that it can be checked by hand."""
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
    one = shares.ranks[0]
    repeated = sum(share.repeated for share in shares.ranks)
    return (
        f"a DistributedSampler for {size} ranks gives each {one.drawn} of {loader.samples} samples"
        f" ({count_of(one.batches, 'batch', 'batches')} of {loader.batch_size}): {repeated} repeated,"
        f" {shares.missed or 0} missed per epoch"
    )
