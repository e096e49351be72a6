"""One rank has fewer batches, and is at the barrier behind its loop while the others reduce gradients."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

torch.set_num_threads(1)


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = torch.randn(40 if dist.get_rank() == 2 else 48, 8)
    for batch in DataLoader(samples, batch_size=4):  # FAULT
        optimizer.zero_grad()
        model(batch).mean().backward()
        optimizer.step()
    dist.barrier()  # FAULT
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
