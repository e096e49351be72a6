"""Seeds random numbers by seed, step, rank and purpose, so that they are the same in any process."""

from __future__ import annotations

import random
import sys

BUILD, BATCH, STEP = range(3)
"""Purposes that get different random numbers."""
_NUMPY_SEEDS = 2**32


def set_seed(seed: int, purpose: int, *, step: int = 0, rank: int = 0) -> None:
    """Seed the generators of Python, torch on all devices, and numpy if it is loaded."""
    import torch

    # Prime factors, so that different steps, ranks and purposes do not collide.
    mixed = (seed * 1_000_003 + step * 10_007 + rank * 101 + purpose) % _NUMPY_SEEDS
    random.seed(mixed)
    torch.manual_seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(mixed)
