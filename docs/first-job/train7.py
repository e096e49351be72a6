"""Step 7: a model with several buckets, and samples that take time to load."""

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 8
ACCUMULATE = 4
CHECKPOINT = Path("checkpoint.pt")


class Points(TensorDataset):
    """Points of two classes, the same in every process. Each takes 2 ms to load, as a small image would."""

    def __init__(self, samples: int = 455) -> None:
        generator = torch.Generator().manual_seed(7)
        labels = torch.randint(2, (samples,), generator=generator)
        super().__init__(torch.randn(samples, 30, generator=generator) + 0.6 * labels[:, None], labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(0.002)
        return super().__getitem__(index)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))


def save(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, epochs: int
) -> None:
    """Write the model inside DDP, whole or not at all."""
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "epochs": epochs,
    }
    torch.save(state, CHECKPOINT.with_suffix(".tmp"))
    CHECKPOINT.with_suffix(".tmp").replace(CHECKPOINT)


def load(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> int:
    """Read the checkpoint on every rank, and return how many epochs it has."""
    state = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    return state["epochs"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="go on from checkpoint.pt")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(build_model(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Points()
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, drop_last=True)
    scaler = torch.amp.GradScaler("cpu")
    first = load(model, optimizer, scaler) if options.resume else 0
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for batch, (features, labels) in enumerate(loader, 1):
            is_step = batch % ACCUMULATE == 0
            with nullcontext() if is_step else model.no_sync():
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(features), labels)
                scaler.scale(loss / ACCUMULATE).backward()
            if is_step:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {len(losses)} batches, loss {sum(losses) / len(losses):.4f}", flush=True)
            save(model, optimizer, scaler, epoch + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
