"""One rank waits for a message that the other sends only after the barrier at which it waits for that rank."""

import torch
import torch.distributed as dist

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    ones = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(ones)
    if dist.get_rank() == 0:
        dist.barrier()  # FAULT
        dist.send(ones, dst=1)
    else:
        dist.recv(ones, src=0)  # FAULT
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
