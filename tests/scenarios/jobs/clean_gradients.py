"""Gradients that hold inf or NaN and that no step uses, and unusual ways to compute them: nothing is wrong."""

import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 6


class Checkpointed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        inner = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        return checkpoint(self.second, inner, use_reentrant=True)


class Masked(torch.nn.Module):
    """A parameter that is inf on purpose, and an output that is no tensor."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.table = torch.nn.Embedding(4, 8, sparse=True)
        self.bound = torch.nn.Parameter(torch.tensor(float("inf")))

    def forward(self, x, *, mask):
        return {"out": [torch.minimum(self.layer(x), self.bound) + self.table(torch.arange(4)).sum()], "mask": mask}


def batch():
    return torch.randn(4, 8)


def scaled():
    """A scaler whose first scales are far too large skips steps, and comes down."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for _ in range(STEPS + 6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch()).float().square().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() < 2.0**127


def hooked(early, **options):
    """The script has a communication hook of its own."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if early:
        model.register_comm_hook(None, fp16_compress_hook)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        if step == 0 and not early:
            model.register_comm_hook(None, fp16_compress_hook)
        loss.backward()
        optimizer.step()


def accumulated(**options):
    """Gradients are added up, and those that are not finite are thrown away on all ranks or mended."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch()).square().mean().backward()
        loss = model(batch()).square().mean()
        (loss * float("nan") if step == 2 and dist.get_rank() == 1 else loss).backward()
        if step == 2:
            for parameter in model.parameters():
                torch.nan_to_num_(parameter.grad)
        optimizer.step()


def unusual():
    """Checkpoints inside a backward, sparse gradients, a backward in a thread, gradients of the input, kept graphs."""
    checkpointed = DistributedDataParallel(Checkpointed())
    masked = DistributedDataParallel(Masked(), static_graph=True)
    adversary = DistributedDataParallel(torch.nn.Linear(8, 1), gradient_as_bucket_view=True)
    models = (checkpointed, masked, adversary)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = batch().requires_grad_()
        scores = adversary(x)
        slopes = torch.autograd.grad(scores.sum(), x, create_graph=True)[0]
        (scores.mean() + slopes.square().mean()).backward(retain_graph=True)
        thread = threading.Thread(target=checkpointed(batch()).square().mean().backward)
        thread.start()
        thread.join()
        mask = torch.full((4, 8), float("-inf")).triu(1)
        out = masked(batch(), mask=mask)["out"][0]
        torch.autograd.backward([out.square().mean(), out.abs().mean()])
        for optimizer in optimizers:
            optimizer.step()


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    scaled()
    hooked(early=True)
    hooked(early=False)
    hooked(early=True, gradient_as_bucket_view=True)
    accumulated()
    accumulated(gradient_as_bucket_view=True)
    unusual()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
