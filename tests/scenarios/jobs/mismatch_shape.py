"""One rank reduces a tensor of another shape."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def sync(rank):
    sums = torch.ones(5 if rank == 2 else 4)
    dist.all_reduce(sums)  # FAULT


def main():
    dist.init_process_group("gloo")
    for step in range(40):
        dist.all_reduce(torch.ones(16))
        if step == 20:
            sync(dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
