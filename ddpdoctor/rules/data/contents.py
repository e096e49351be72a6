"""Whether two ranks hold the same data, judged by digests of what their loaders delivered."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpdoctor.model.data import EpochSeen, LoaderSeen

    _Prints = Mapping[str, Mapping[str, str]]
    """Digests by leaf, then by batch or sample."""

MIN_BATCHES = 2
"""A leaf counts only with at least this many different digests. Our choice: a value that is the same in every batch
proves nothing."""
MIN_SAMPLES = 4
"""If other leaves differ, a leaf counts only with at least this many equal samples. Our choice: labels of few classes
are often equal by chance on one or two samples."""


def same_contents(loaders: tuple[LoaderSeen, LoaderSeen], passes: tuple[EpochSeen, EpochSeen]) -> bool | None:
    """Return whether two ranks hold the same dataset, or None if that is unknown.

    The same index must give the same values in at least one leaf: random augmentation changes some leaves, but not the
    labels. If no digest helps, equal descriptions of the dataset decide.
    """
    one, other = passes
    described_alike = bool(loaders[0].dataset_print) and loaders[0].dataset_print == loaders[1].dataset_print
    told = _compare(_by_leaf(one.sample_prints), _by_leaf(other.sample_prints), MIN_SAMPLES)
    if told is None and one.first and one.first == other.first:
        told = _compare(_numbered(one.batch_prints), _numbered(other.batch_prints), MIN_BATCHES)
    if told is False:
        return None if described_alike else False
    if told is None and not (_has_prints(one) and _has_prints(other)):
        return described_alike or None
    return told


def same_batches(one: EpochSeen, other: EpochSeen) -> bool:
    """Return whether all leaves of the first batches are equal, for data without indices."""
    mine, others = _numbered(one.batch_prints), _numbered(other.batch_prints)
    return mine == others and any(len(set(prints.values())) >= MIN_BATCHES for prints in mine.values())


def is_told_by_prints(loaders: Iterable[EpochSeen]) -> bool:
    """Return whether digests of delivered data were available, not only descriptions of datasets."""
    return all(map(_has_prints, loaders))


def _has_prints(seen: EpochSeen) -> bool:
    return bool(seen.batch_prints or seen.sample_prints)


def _compare(one: _Prints, other: _Prints, least: int) -> bool | None:
    """Return whether any leaf is equal wherever both have it, False if every leaf differs somewhere, else None."""
    leaves = [leaf for leaf in one if leaf in other]
    common = {leaf: [key for key in one[leaf] if key in other[leaf]] for leaf in leaves}
    differ = [any(one[leaf][key] != other[leaf][key] for key in common[leaf]) for leaf in leaves]
    for leaf, differs in zip(leaves, differ, strict=True):
        enough = len(common[leaf]) >= least or not any(differ)
        if not differs and enough and len({one[leaf][key] for key in common[leaf]}) >= MIN_BATCHES:
            return True
    return False if leaves and all(differ) else None


def _by_leaf(prints: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return sample digests, given as "index:leaf:digest", by leaf and index."""
    found: dict[str, dict[str, str]] = {}
    for entry in prints:
        index, _, rest = entry.partition(":")
        leaf, _, digest = rest.partition(":")
        found.setdefault(leaf, {})[index] = digest
    return found


def _numbered(prints: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return batch digests, given as "leaf:digest", by leaf and by the number of the batch within the leaf."""
    found: dict[str, dict[str, str]] = {}
    for entry in prints:
        leaf, _, digest = entry.partition(":")
        known = found.setdefault(leaf, {})
        known[str(len(known))] = digest
    return found
