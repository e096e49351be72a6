"""Names what the user called to get to a collective: a function of torch.distributed, or a layer of it."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict

_TORCH_DISTRIBUTED = os.sep + os.path.join("torch", "distributed") + os.sep
LAYERS = (
    ("fsdp/_fully_shard/", "fully_shard"),
    ("fsdp/", "FullyShardedDataParallel"),
    ("tensor/parallel/", "parallelize_module"),
    ("tensor/", "DTensor"),
    ("pipelining/", "schedule.step"),
    ("optim/zero_redundancy_optimizer.py", "ZeroRedundancyOptimizer"),
)
"""By where its code is, below torch.distributed: what users call a layer. Its own functions are hooks and wrappers."""
_NOT_TYPED = ("c10d_logger.py", "checkpoint/logger.py")
"""Files whose functions stand around others."""
OWN_NAME = "*"
"""The function's own name is what the user has typed."""

_known: Dict[str, str] = {}


def layer_of(file: str) -> str:
    """Return the layer that a file of code belongs to, ``OWN_NAME``, or nothing for code that is not in question."""
    known = _known.get(file)
    if known is None:
        known = _known[file] = _look(file)
    return known


def _look(file: str) -> str:
    _, found, inner = file.partition(_TORCH_DISTRIBUTED)
    inner = inner.replace(os.sep, "/")
    if not found or inner in _NOT_TYPED:
        return ""
    return next((name for start, name in LAYERS if inner.startswith(start)), OWN_NAME)
