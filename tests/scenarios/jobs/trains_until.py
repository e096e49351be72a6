"""Trains until FOLDER/end exists, and then ends well. While FOLDER/hold exists, rank 1 is held up, and says so."""

import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
FOLDER = pathlib.Path(sys.argv[1])


def wait_for_the_test():
    (FOLDER / "held").touch()
    while (FOLDER / "hold").exists():
        time.sleep(0.02)  # FAULT
    (FOLDER / "held").unlink()


def batches():
    rows = torch.utils.data.TensorDataset(torch.randn(64, 8))
    sampler = torch.utils.data.DistributedSampler(rows)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DDP(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (batch,) in batches():
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
        (FOLDER / f"at_{rank}").touch()
        time.sleep(0.01)
        if rank == 1 and (FOLDER / "hold").exists():
            wait_for_the_test()
        end = torch.tensor(float((FOLDER / "end").exists()))
        dist.all_reduce(end)  # WAITS
        if end:
            break
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
