"""One rank broadcasts where the others reduce."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def sync(rank):
    value = torch.ones(4)
    if rank == 1:
        dist.broadcast(value, src=1)  # FAULT
    else:
        dist.all_reduce(value)


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
