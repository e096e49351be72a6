"""Rank 0 evaluates alone and fails, while the others wait at the barrier after it."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import loop


def evaluate(model):
    with torch.no_grad():
        guess = model(torch.randn(4, 8))
    assert guess.shape == (4, 3), "wrong head"  # FAULT


dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(8, 2))
loop(model, steps=20)
if dist.get_rank() == 0:
    evaluate(model.module)
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
