"""Gives the job's store an address of its own. Under torchrun nobody serves it there, unless rank 0 is to."""

import os
import sys

import torch.distributed as dist


def by_variable(port):
    os.environ["MASTER_PORT"] = port  # FAULT
    dist.init_process_group("gloo")


def by_url(port):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)  # FAULT


def main():
    how, port = sys.argv[1:]
    if how == "served":
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    (by_url if how == "url" else by_variable)(port)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
