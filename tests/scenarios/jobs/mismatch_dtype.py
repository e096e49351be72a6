"""One rank reduces another dtype."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def sync(rank):
    value = torch.ones(4, dtype=torch.float64 if rank == 0 else torch.float32)
    dist.all_reduce(value)  # FAULT


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
