"""Random numbers that are the same wherever they are drawn: by seed, step and rank."""

from __future__ import annotations

import random
import sys

BUILD, BATCH, STEP = range(3)
"""What is drawn for."""
_NUMPY_SEEDS = 2**32


def set_seed(seed: int, purpose: int, *, step: int = 0, rank: int = 0) -> None:
    """Seed Python's, numpy's (where it is loaded) and torch's generators, on all devices."""
    import torch

    # A few primes, so that steps, ranks and purposes do not meet.
    mixed = (seed * 1_000_003 + step * 10_007 + rank * 101 + purpose) % _NUMPY_SEEDS
    random.seed(mixed)
    torch.manual_seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed)
