"""Train a small classifier on two classes of points with DistributedDataParallel.

A complete script with everything that a real one needs, small enough to read in one go:

    torchrun --nproc-per-node 2 docs/examples/train.py --epochs 3
    ddpdoctor wrap docs/examples/train.py --epochs 3
    python docs/examples/train.py --epochs 3            one process, no launcher

It needs torch only, and runs on CPU in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 7
FEATURES = 30
SAMPLES = 569
TEST_SAMPLES = 114
"""A fifth of the samples; 455 remain for training."""


@dataclass(frozen=True)
class Place:
    """Where this process stands in the job."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Rank 0 prints and writes; all others only compute."""
        return self.rank == 0


def main() -> None:
    """Set up, train, clean up."""
    options = parse_options()
    place = set_up()
    try:
        train(options, place)
        # Nobody leaves before everybody is done: a rank that destroys its group while another still
        # talks to it looks like a failure to that other rank. At an exception there is no barrier,
        # because the others may never reach it.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small classifier with DistributedDataParallel.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per rank and step")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--checkpoint-dir", type=Path, help="write a checkpoint here after each epoch")
    parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "keep"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.resume and options.checkpoint_dir is None:
        parser.error("--resume needs --checkpoint-dir")
    return options


def set_up() -> Place:
    """Join the process group, and take a device of its own for each local rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    # torchrun sets RANK and the address to meet at. `python train.py` is a job of one rank, which needs no
    # address and so no free port either.
    alone = "RANK" not in os.environ
    init: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        # Before the first use of CUDA: else every rank opens a context on GPU 0.
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **init)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", **init)
    return Place(rank=dist.get_rank(), local_rank=local_rank, world_size=dist.get_world_size(), device=device)


def train(options: argparse.Namespace, place: Place) -> None:
    """Train for the given number of epochs, with a checkpoint and an evaluation after each."""
    seed_everything(SEED)
    train_data, test_data = load_data()
    # The sampler gives each rank another part of the data, of equal length: with parts of unequal
    # length one rank would make more all-reduces than the others, and hang.
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, shuffle=True, seed=SEED)
    on_gpu = place.device.type == "cuda"
    loader = DataLoader(train_data, batch_size=options.batch_size, sampler=sampler, pin_memory=on_gpu)

    model = DistributedDataParallel(
        build_model(FEATURES).to(place.device), device_ids=[place.local_rank] if on_gpu else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    # float16 has a narrow range, so its gradients are scaled; bfloat16 and float32 need no scaling.
    scaler = torch.amp.GradScaler(place.device.type, enabled=autocast_dtype(place.device) == torch.float16)
    first_epoch = load_checkpoint(options, place, model, optimizer, scaler) if options.resume else 0

    # Only now, and different on each rank: the model's weights were drawn from one seed, while dropout
    # and augmentation should differ between ranks.
    if first_epoch == 0:
        seed_everything(SEED + place.rank)
    for epoch in range(first_epoch, options.epochs):
        # Without this every epoch has the same order.
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scaler, options.accumulate, place)
        accuracy = evaluate(model, test_data, place)
        if place.is_main:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
        if options.checkpoint_dir is not None:
            save_checkpoint(options, place, model, optimizer, scaler, epoch)


def train_epoch(
    model: DistributedDataParallel,
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    accumulate: int,
    place: Place,
) -> float:
    """Run one epoch and return its mean loss over all ranks."""
    model.train()
    total = torch.zeros(2, device=place.device)
    batches = len(loader)
    for index, (features, labels) in enumerate(loader):
        features = features.to(place.device, non_blocking=True)  # noqa: PLW2901 - the usual idiom
        labels = labels.to(place.device, non_blocking=True)  # noqa: PLW2901 - the usual idiom
        # The epoch's last batch ends an accumulation too, however few batches came together.
        is_step = (index + 1) % accumulate == 0 or index + 1 == batches
        window = min(accumulate, batches - index // accumulate * accumulate)
        # DDP reduces gradients in every backward pass. In between two steps that is wasted work, and
        # no_sync leaves it out. The forward pass must be inside too: DDP decides there.
        with contextlib.nullcontext() if is_step else model.no_sync():
            with autocast(place.device):
                loss = nn.functional.cross_entropy(model(features), labels)
            scaler.scale(loss / window).backward()
        if is_step:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        # Kept on the device: .item() in each step would make the CPU wait for the GPU.
        total[0] += loss.detach() * len(labels)
        total[1] += len(labels)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


@torch.no_grad()
def evaluate(model: DistributedDataParallel, data: TensorDataset, place: Place) -> float:
    """Return the accuracy over the test set, each rank judging its own part."""
    model.eval()
    # A DistributedSampler would repeat samples to make the parts equal and so bend the result. This
    # slice does not; its parts may differ in length, which is safe because the only collective of the
    # evaluation is the one after the loop. For the same reason the bare module is called and not DDP:
    # DDP's forward pass may broadcast buffers.
    indices = range(place.rank, len(data), place.world_size)
    features, labels = data[list(indices)]
    with autocast(place.device):
        predicted = model.module(features.to(place.device)).argmax(dim=1)
    correct = (predicted == labels.to(place.device)).sum()
    counts = torch.stack([correct, torch.tensor(len(labels), device=place.device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def build_model(features: int) -> nn.Module:
    """Return a small network with two classes."""
    return nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 455 training and 114 test samples, scaled by what the training samples show."""
    # The same seed on every rank, and a generator that nothing else draws from: each must get the same samples.
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.randint(2, (SAMPLES,), generator=generator)
    features = torch.randn(SAMPLES, FEATURES, generator=generator) + 0.6 * labels[:, None]
    train, test = slice(TEST_SAMPLES, None), slice(TEST_SAMPLES)
    deviation, mean = torch.std_mean(features[train], dim=0)
    features = (features - mean) / deviation
    return TensorDataset(features[train], labels[train]), TensorDataset(features[test], labels[test])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the type to compute in: bfloat16 or float16 on a GPU; on a CPU this model gains nothing by it."""
    if device.type != "cuda":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward passes."""
    dtype = autocast_dtype(device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def seed_everything(seed: int) -> None:
    """Seed every generator that training draws from. If yours draws from NumPy's, seed and save that one too."""
    random.seed(seed)
    torch.manual_seed(seed)


def save_checkpoint(
    options: argparse.Namespace,
    place: Place,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    epoch: int,
) -> None:
    """Let rank 0 write a checkpoint, complete or not at all, and remove the oldest ones."""
    # Each rank has its own random state. All are gathered, so all ranks must come here: gathering
    # inside `if place.is_main` would hang the job.
    rng_states: list[Any] | None = [None] * place.world_size if place.is_main else None
    dist.gather_object(rng_state(place.device), rng_states)
    if not place.is_main:
        return
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    path = options.checkpoint_dir / f"epoch-{epoch + 1:04d}.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(
            {
                # Of the module inside DDP: the names then have no "module." and load anywhere.
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
                "epochs_done": epoch + 1,
                "rng_states": rng_states,
            },
            file,
        )
        file.flush()
        # Without it a power cut may leave the new name with no content behind it.
        os.fsync(file.fileno())
    # Atomic: whoever looks sees the old state or the new one, and never half a file.
    temporary.replace(path)
    for old in list_checkpoints(options.checkpoint_dir)[: -options.keep]:
        old.unlink()


def load_checkpoint(
    options: argparse.Namespace,
    place: Place,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> int:
    """Restore the newest checkpoint and return the epoch to go on with; 0 where there is none."""
    # Rank 0 chooses and tells the others: on a network file system they may not see the same files.
    newest = list_checkpoints(options.checkpoint_dir)[-1:] if place.is_main else []
    choice: list[Any] = [str(newest[0]) if newest else None]
    dist.broadcast_object_list(choice, src=0)
    if choice[0] is None:
        return 0
    # weights_only: a checkpoint is data, and loading it must not run code. For that it holds nothing
    # but tensors, numbers, strings, lists and dictionaries.
    state = torch.load(choice[0], map_location="cpu", weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    # Empty where the checkpoint comes from a device that needs no scaler; a new one then finds its own scale.
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    if len(state["rng_states"]) == place.world_size:
        restore_rng_state(state["rng_states"][place.rank], place.device)
    else:
        # Another number of ranks: there is no state for each, so draw anew.
        seed_everything(SEED + place.rank + state["epochs_done"] * place.world_size)
    return int(state["epochs_done"])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first."""
    return sorted(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.partition("-")[2]))


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators in types that ``weights_only`` lets through."""
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Set all generators to what ``rng_state`` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


if __name__ == "__main__":
    main()
