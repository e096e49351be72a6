"""Healthy ranks whose children and loader workers compute; beside many busy programs they get little of a core."""

import subprocess
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

PREPARE = "total = 0\nfor number in range(6_000_000): total += number"


class Samples(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((32,), float(sum(range(300_000)) % 7))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 1:
        subprocess.run([sys.executable, "-S", "-c", PREPARE], check=True)
    for batch in DataLoader(Samples(), batch_size=4, num_workers=1):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
