"""Batches come from asyncio tasks; one of rank 1 fails, no code reads its error, and the trainer awaits its batch."""

import asyncio

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from training import run


async def make(step, queue):
    text = "0.5;" if (step, dist.get_rank()) == (20, 1) else "0.5"
    await queue.put(torch.full((4, 8), float(text)))


async def epoch(model):
    queue = asyncio.Queue()
    tasks = []
    for step in range(60):
        tasks.append(asyncio.ensure_future(make(step, queue)))
        model(await queue.get()).mean().backward()  # FAULT


run(lambda: asyncio.run(epoch(DDP(torch.nn.Linear(8, 2)))))
