"""Which settings a trial tries, and in which order. All ranks make the same plan without a message between them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Tuple

BASE = "base"
"""The settings of the script."""
AGAIN = "again"
"""The settings of the script once more: what differs between the two is noise."""
SEED = 0
LEFT_OUT = 3
"""Steps after a switch that are not measured: the first has one bucket, and the second builds them anew."""
MEASURED = 5
"""Measured steps of a block."""
MEASURED_IN_LAUNCH = 20
"""Our choice: measured steps of a launch that has one setting. They are few beside the time that a start takes."""
ACCUMULATED = 4
"""Our choice: over how many steps a trial accumulates gradients."""
ACCUMULATE = "accumulate=%d" % ACCUMULATED
"""Reduce gradients in one step of so many. Only for scripts with one forward a step."""
MIB = 2**20
BUCKETS = (16, 8, 4, 1)
"""Our choice: the numbers of buckets for which caps are tried."""
LEAST_CAP_BYTES = MIB // 4


def choose_caps(gradient_bytes: int, present_bytes: int) -> List[int]:
    """Return the bucket caps to try, in bytes: powers of two that give about 16, 8, 4 and 1 buckets."""
    wanted = {_power_above(max(gradient_bytes // count, LEAST_CAP_BYTES)) for count in BUCKETS}
    return sorted(wanted - {present_bytes})


def _power_above(size_bytes: int) -> int:
    return 1 << max(size_bytes - 1, 0).bit_length()


def steps_to_measure(setting: str) -> int:
    """Return how many steps of a block are measured. With accumulation they are whole cycles."""
    return 2 * ACCUMULATED if setting == ACCUMULATE else MEASURED


def choose(settings: List[str], only: str) -> List[str]:
    """Return the settings whose names, without their values, are in a list with commas. Empty: all of them."""
    names = set(only.split(",")) if only else set()
    return [one for one in settings if not names or one in (BASE, AGAIN) or one.partition("=")[0] in names]


def left_out(only: str, settings: List[str]) -> List[str]:
    """Return the names in a list with commas that none of the settings has."""
    names = {setting.partition("=")[0] for setting in settings}
    return [name for name in only.split(",") if name and name not in names]


def order_blocks(settings: List[str], rounds: int, first: int = 0) -> List[Tuple[int, str]]:
    """Return (round, setting) for each block. Each round has all settings, in an order of its own.

    ``first`` is the number of the first round.
    """
    import random

    dice, blocks = random.Random(SEED), []  # noqa: S311 - an order, no secret
    for number in range(first, first + rounds):
        shuffled = list(settings)
        dice.shuffle(shuffled)
        blocks += [(number, setting) for setting in shuffled]
    return blocks
