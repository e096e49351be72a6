"""The batches of a rank's loader worker do not fit into /dev/shm."""

import torch
import torch.distributed as dist
from training import run


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.ones(2**22)


def main():
    if dist.get_rank() == 1:
        for _ in torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1):  # FAULT
            pass


if __name__ == "__main__":
    run(main)
