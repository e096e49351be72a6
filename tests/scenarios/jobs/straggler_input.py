"""Loader workers take long for each batch: on rank 1 alone, or on all ranks, of which rank 0 is a little behind."""

import sys
import time

import torch
import torch.distributed as dist

HOW, METHOD = sys.argv[1:]


class Images(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.seconds = 0.02 if HOW == "all" or rank == 1 else 0.002

    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(self.seconds)  # FAULT
        return torch.full((8,), float(index))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Images(rank)
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, multiprocessing_context=METHOD,
        sampler=torch.utils.data.DistributedSampler(data, shuffle=False),
    )  # fmt: skip
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    dist.barrier()
    if HOW == "all" and rank == 0:
        time.sleep(0.04)
    for batch in loader:
        model(batch).mean().backward()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
