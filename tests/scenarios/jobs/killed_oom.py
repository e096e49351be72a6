"""A rank keeps every batch, until its cgroup has no memory left."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    kept = []
    while True:
        if dist.get_rank() == 1:
            kept.append(torch.ones(2**23, dtype=torch.float32))  # FAULT
        dist.all_reduce(torch.ones(4))  # a line that may be the last one seen  # FAULT


if __name__ == "__main__":
    main()
