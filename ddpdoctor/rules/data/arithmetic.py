"""What count, sum and exclusive or of indices prove about which of them were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.model.data import EpochSeen, LoaderSeen

ORDER_LENGTH = 4096
"""So many first indices of a pass are compared one by one for repetitions: the recorder's ``MAX_ORDER``."""

MIN_EXPECTED_REPEATS = 8
"""Where draws with replacement would have repeated so many of the first indices, and none was, they were without. Ours:
by chance it is once in 3,000 passes (of a Poisson distribution with this mean)."""


def sum_of_all(samples: int) -> int:
    """Return 0 + 1 + ... + (samples - 1)."""
    return samples * (samples - 1) // 2


def xor_of_all(samples: int) -> int:
    """Return 0 ^ 1 ^ ... ^ (samples - 1), which has a period of four."""
    last = samples - 1
    return (last, 1, last + 1, 0)[last % 4] if samples > 0 else 0


def drew_all(epoch: EpochSeen, loader: LoaderSeen) -> bool:
    """Return whether a pass drew each index of a dataset once, or all but a last batch that was not full."""
    samples = loader.samples
    if not samples or not epoch.complete:
        return False
    if epoch.drawn == samples:
        return (epoch.total, epoch.xor) == (sum_of_all(samples), xor_of_all(samples))
    dropped = (loader.batch_size or 1) - 1 if loader.drop_last else 0
    return samples - dropped <= epoch.drawn < samples and draws_once(epoch, samples)


def draws_once(epoch: EpochSeen, samples: int) -> bool:
    """Return whether a pass drew without replacement: with it indices would have come again among the first ones."""
    looked_at = min(epoch.drawn, ORDER_LENGTH)
    return epoch.repeats == 0 and looked_at * looked_at >= 2 * MIN_EXPECTED_REPEATS * samples


def are_distinct(epochs: Iterable[EpochSeen]) -> bool:
    """Return whether it is certain that no rank drew an index twice in its pass."""
    return all(epoch.repeats == 0 and epoch.drawn <= ORDER_LENGTH for epoch in epochs)


def must_leave_gap(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether ranks that drew at least as many indices as there are samples cannot have drawn them all.

    With as many draws as samples, each must come once. What is drawn beyond that are repetitions: of a single one the
    sum tells which index it is, and the exclusive or has to agree; of more, their sum has to be possible.
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
    """Return whether ranks together drew each index once, by count, sum and exclusive or."""
    as_many = sum(epoch.drawn for epoch in epochs) == samples
    return as_many and _are_of(samples, epochs) and not must_leave_gap(samples, epochs)


def _are_of(samples: int, epochs: Sequence[EpochSeen]) -> bool:
    """Return whether indices are those of the samples, and not of something larger that they were taken from."""
    return all(epoch.highest is None or epoch.highest < samples for epoch in epochs)
