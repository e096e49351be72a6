"""What the count, sum and exclusive or of indices prove about which indices were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.data import EpochSeen, LoaderSeen

ORDER_LENGTH = 4096
"""How many first indices of a pass are checked one by one for repeats: the recorder's ``MAX_ORDER``."""

MIN_EXPECTED_REPEATS = 8
"""If draws with replacement would repeat this many of the first indices and none repeats, the draws were without
replacement. Our choice: the chance of an error is 1 in 3,000 passes (a Poisson distribution with this mean)."""


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
