"""Digests of data, by leaf. They show whether two ranks hold the same samples, which indices alone cannot.

The forms are those of ``model.data.EpochSeen``: "leaf:digest" for a batch, "index:leaf:digest" for a sample.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from ddpdoctor.probes.user_code import leaves
from ddpdoctor.recorder.replicas.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 8
"""Our choice: samples loaded on every rank, spread over the dataset. Labels of few classes may be equal by chance."""
MOST_LEAVES = 16
SEED = 20240229
"""Any number that is the same on all ranks, so that random augmentation is the same too."""
_DIGEST_BYTES = 8


def digest_samples(dataset: Any, samples: int) -> tuple[str, ...]:
    """Return digests of a few samples, with the same random state on all ranks. The dataset's errors propagate."""
    chosen = sorted({place * samples // SAMPLES for place in range(SAMPLES)})
    found = []
    with _same_random_state():
        for index in chosen:
            _seed(index)
            found += [f"{index}:{leaf}" for leaf in digest_leaves(dataset[index])]
    return tuple(found)


def digest_leaves(data: Any) -> tuple[str, ...]:
    """Return "leaf:digest" for a batch or a sample. Leaves with only one value say nothing and are left out."""
    found = ((number, _digest(leaf)) for number, (_, leaf) in enumerate(islice(leaves(data), MOST_LEAVES)))
    return tuple(f"{number}:{digest}" for number, digest in found if digest)


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has: the first dimension of its first tensor, else 1."""
    import torch

    sizes = (len(leaf) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next(sizes, len(batch) if isinstance(batch, list) else 1)


def _digest(leaf: Any) -> str:
    import torch

    if isinstance(leaf, torch.Tensor):
        return "" if _is_constant(leaf) else _hash(fingerprints([leaf]), f"{leaf.dtype} {tuple(leaf.shape)}")
    if isinstance(leaf, bytes | str | int | float | bool):
        return _hash(leaf if isinstance(leaf, bytes) else repr(leaf).encode(), type(leaf).__name__)
    as_bytes = getattr(leaf, "tobytes", None)  # NumPy arrays and images have it
    return _hash(as_bytes(), type(leaf).__name__) if callable(as_bytes) else ""


def _is_constant(tensor: Any) -> bool:
    return bool(tensor.numel() > 1 and (tensor == tensor.flatten()[0]).all())


def _hash(content: bytes, kind: str) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES, key=kind.encode()[:64]).hexdigest()


@contextmanager
def _same_random_state() -> Iterator[None]:
    """Restore the random states afterwards."""
    import torch

    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


def _seed(index: int) -> None:
    import torch

    torch.random.default_generator.manual_seed(SEED + index)
    random.seed(SEED + index)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED + index)
