"""The optimizer changes the parameters between a forward and its backward, as in many a GAN."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    model = DDP(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 4)).mean().backward()
    loss = model(torch.randn(2, 4)).mean()
    optimizer.step()
    loss.backward()  # FAULT
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
