"""What `ddpdoctor check-consistency` needs of a training code: a model, batches and a step; and three faults to try.

    cd docs/examples
    torchrun --nproc-per-node 4 -m ddpdoctor check-consistency --model model:build_model \
        --batch model:make_batch --step model:train_step --reference

In place of train_step: no_sync_step, scaled_step. In place of build_model: build_by_rank, build_cnn.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer. All ranks are seeded alike beforehand."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def make_batch(rank: int, world_size: int, step: int) -> Batch:
    """Return what a rank trains on in a step, which depends on the arguments alone."""
    source = torch.Generator().manual_seed(step * world_size + rank)
    return torch.randn(8, 16, generator=source), torch.randint(0, 4, (8,), generator=source)


def train_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a batch."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def no_sync_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of a forward under no_sync(), so that its gradients stay each rank's own."""
    if not isinstance(model, DistributedDataParallel):
        return train_step(model, batch)
    with model.no_sync():
        return train_step(model, batch)


def scaled_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss times the world size, although DDP takes the mean."""
    return train_step(model, batch) * (dist.get_world_size() if isinstance(model, DistributedDataParallel) else 1)


def build_by_rank() -> nn.Module:
    """Return a model that rank 1 builds with another size."""
    return nn.Linear(16, 11 if dist.get_rank() == 1 else 10)


def build_cnn() -> nn.Module:
    """Return a model with BatchNorm, whose statistics are each rank's own."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
