"""A rank asks for more memory than its limit of addresses lets it have."""

import resource

import torch
import torch.distributed as dist

torch.set_num_threads(1)
GIB = 2**30


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
        torch.empty(16 * GIB, dtype=torch.uint8)  # FAULT
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
