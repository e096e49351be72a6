"""What counts, sums and digests prove about the samples that ranks drew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpdoctor.model.findings import Confidence, Severity
from ddpdoctor.rules.answers import Answer, Problem, judged, passed, skipped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpdoctor.model.data import EpochSeen, LoaderSeen

    _Digests = Mapping[str, Mapping[str, str]]
    """Digests by leaf, then by batch or sample."""
    from ddpdoctor.model.data import Pass
    from ddpdoctor.rules.data.shared import Replicas

ORDER_LENGTH = 4096
"""How many first indices of a pass are checked one by one for repeats: the recorder's ``MAX_ORDER``."""
MIN_EXPECTED_REPEATS = 8
"""If draws with replacement would repeat this many of the first indices and none repeats, the draws were without
replacement. Our choice: the chance of an error is 1 in 3,000 passes (a Poisson distribution with this mean)."""
MIN_BATCHES = 2
"""A leaf counts only with at least this many different digests. Our choice: a value that is the same in every batch
proves nothing."""
MIN_SAMPLES = 4
"""If other leaves differ, a leaf counts only with at least this many equal samples. Our choice: labels of few classes
are often equal by chance on one or two samples."""


def sum_of_all(samples: int) -> int:
    """Return 0 + 1 + ... + (samples - 1)."""
    return samples * (samples - 1) // 2


def xor_of_all(samples: int) -> int:
    """Return 0 ^ 1 ^ ... ^ (samples - 1), which has a period of four."""
    last = samples - 1
    return (last, 1, last + 1, 0)[last % 4] if samples > 0 else 0


def drew_all(epoch: EpochSeen, loader: LoaderSeen) -> bool:
    """Return whether a pass drew each index of a dataset once, except for a dropped incomplete last batch."""
    samples = loader.samples
    if not samples or not epoch.complete:
        return False
    if epoch.drawn == samples:
        return (epoch.total, epoch.xor) == (sum_of_all(samples), xor_of_all(samples))
    dropped = (loader.batch_size or 1) - 1 if loader.drop_last else 0
    return samples - dropped <= epoch.drawn < samples and draws_once(epoch, samples)


def draws_once(epoch: EpochSeen, samples: int) -> bool:
    """Return whether a pass drew without replacement: otherwise some of the first indices would have repeated."""
    looked_at = min(epoch.drawn, ORDER_LENGTH)
    return epoch.repeats == 0 and looked_at * looked_at >= 2 * MIN_EXPECTED_REPEATS * samples


def are_distinct(epochs: Iterable[EpochSeen]) -> bool:
    """Return whether it is certain that no rank drew an index twice in its pass."""
    return all(epoch.repeats == 0 and epoch.drawn <= ORDER_LENGTH for epoch in epochs)


def must_leave_gap(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether ranks must have missed a sample although they drew at least as many indices as there are samples.

    With exactly as many draws as samples, each must come once. Draws beyond that are repeats. For one repeat, the sum
    shows which index it is, and the exclusive or must agree. For more, their sum must be possible.
    """
    if not _are_of(samples, epochs):
        return False
    drawn = sum(epoch.drawn for epoch in epochs)
    beyond, excess = drawn - samples, sum(epoch.total for epoch in epochs) - sum_of_all(samples)
    if beyond < 0:
        return False
    if not 0 <= excess <= beyond * (samples - 1):
        return True
    xor = xor_of_all(samples)
    for epoch in epochs:
        xor ^= epoch.xor
    return beyond < 2 and xor != excess


def shows_all(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether all ranks together drew each index once, judged by count, sum and exclusive or."""
    as_many = sum(epoch.drawn for epoch in epochs) == samples
    return as_many and _are_of(samples, epochs) and not must_leave_gap(samples, epochs)


def _are_of(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether the indices are within the dataset, and not of a larger one that it is part of."""
    return all(epoch.highest is None or epoch.highest < samples for epoch in epochs)


def same_contents(loaders: tuple[LoaderSeen, LoaderSeen], passes: tuple[EpochSeen, EpochSeen]) -> bool | None:
    """Return whether two ranks hold the same dataset, or None if that is unknown.

    The same index must give the same values in at least one leaf: random augmentation changes some leaves, but not the
    labels. If no digest helps, equal descriptions of the dataset decide.
    """
    one, other = passes
    described_alike = bool(loaders[0].dataset_digest) and loaders[0].dataset_digest == loaders[1].dataset_digest
    alike = _compare(_by_leaf(one.sample_digests), _by_leaf(other.sample_digests), MIN_SAMPLES)
    if alike is None and one.first and one.first == other.first:
        alike = _compare(_numbered(one.batch_digests), _numbered(other.batch_digests), MIN_BATCHES)
    if alike is False:
        return None if described_alike else False
    if alike is None and not (_has_digests(one) and _has_digests(other)):
        return described_alike or None
    return alike


def same_batches(one: EpochSeen, other: EpochSeen) -> bool:
    """Return whether all leaves of the first batches are equal, for data without indices."""
    mine, others = _numbered(one.batch_digests), _numbered(other.batch_digests)
    return mine == others and any(len(set(digests.values())) >= MIN_BATCHES for digests in mine.values())


def were_compared(loaders: Iterable[EpochSeen]) -> bool:
    """Return whether digests of delivered data were available, not only descriptions of datasets."""
    return all(map(_has_digests, loaders))


def _has_digests(seen: EpochSeen) -> bool:
    return bool(seen.batch_digests or seen.sample_digests)


def _compare(one: _Digests, other: _Digests, least: int) -> bool | None:
    """Return whether any leaf is equal wherever both have it, False if every leaf differs somewhere, else None."""
    leaves = [leaf for leaf in one if leaf in other]
    common = {leaf: [key for key in one[leaf] if key in other[leaf]] for leaf in leaves}
    differ = [any(one[leaf][key] != other[leaf][key] for key in common[leaf]) for leaf in leaves]
    for leaf, differs in zip(leaves, differ, strict=True):
        enough = len(common[leaf]) >= least or not any(differ)
        if not differs and enough and len({one[leaf][key] for key in common[leaf]}) >= MIN_BATCHES:
            return True
    return False if leaves and all(differ) else None


def _by_leaf(digests: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return sample digests, given as "index:leaf:digest", by leaf and index."""
    found: dict[str, dict[str, str]] = {}
    for entry in digests:
        index, _, rest = entry.partition(":")
        leaf, _, digest = rest.partition(":")
        found.setdefault(leaf, {})[index] = digest
    return found


def _numbered(digests: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return batch digests, given as "leaf:digest", by leaf and by the number of the batch within the leaf."""
    found: dict[str, dict[str, str]] = {}
    for entry in digests:
        leaf, _, digest = entry.partition(":")
        known = found.setdefault(leaf, {})
        known[str(len(known))] = digest
    return found


def with_counts(replicas: Replicas, answer: Answer) -> Answer:
    """Add exact counts to the findings from sums."""
    words = [_count_words(one) for one in _counted(replicas) if one.unique is not None][:1]
    return replace(answer, problems=tuple(replace(one, evidence=(*words, *one.evidence)) for one in answer.problems))


def find_overlap(replicas: Replicas) -> Answer | None:
    """Judge shares by samples that overlap or are left out, which sums do not show. None without counts."""
    counted = [one for one in _counted(replicas) if one.unique is not None and one.missed is not None]
    if not counted or replicas.drawn is None or replicas.size == 1:
        return None
    for one in counted:
        if any(row.repeated for row in one.ranks):
            return skipped("the ranks draw with replacement or repeat samples, so their shares cannot be checked")
        # Drawn again while others are not drawn at all, which padding never causes.
        beyond = min(one.drawn - (one.unique or 0), one.missed or 0) if replicas.drawn.samples else 0
        if beyond and not one.alike:
            problem = _overlap(one, beyond)
            return judged([problem], problem.summary)
    return passed("the shares of the ranks cover each sample once")


def _counted(replicas: Replicas) -> tuple[Pass, ...]:
    """Return the passes with exact counts, or nothing if equal indices do not mean equal samples."""
    loaders = [loader for those in replicas.loaders.values() for loader in those]
    if replicas.drawn is None or not loaders:
        return ()
    first = loaders[0]
    alike = all(same_contents((first, other), (first.epochs[0], other.epochs[0])) is not False for other in loaders[1:])
    return replicas.drawn.passes if alike else ()


def _count_words(one: Pass) -> str:
    return (
        f"counted in pass {one.number}: {one.drawn} drawn, {one.unique} of them different, {one.shared} drawn by two "
        f"or more ranks, {one.missed} not drawn"
    )


def _overlap(one: Pass, beyond: int) -> Problem:
    return Problem(
        severity=Severity.WARNING,
        confidence=Confidence.MEDIUM,
        ranks=tuple(row.rank for row in one.ranks),
        summary=f"in pass {one.number}, the ranks draw {beyond} samples too often and miss as many others",
        evidence=(_count_words(one),),
        fix="use one order on all ranks: the same seed, and each rank its own part of it; or use DistributedSampler",
    )
