"""Two ranks use the group of all and one of their own in opposite order; a third only waits with one of them."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    ones = torch.ones(4)
    for _ in range(10):
        dist.all_reduce(ones)
    if rank == 1:
        dist.all_reduce(ones, group=pair)  # FAULT
    dist.barrier()  # FAULT
    if rank == 0:
        dist.all_reduce(ones, group=pair)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
