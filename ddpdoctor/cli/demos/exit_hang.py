"""Both ranks finish training, but rank 1 does not exit: a non-daemon thread waits forever."""

import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20
more_work = threading.Event()


def upload_metrics():
    more_work.wait()  # the fault: nobody ever sets it


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inputs, targets = torch.randn(16, 8), torch.randn(16, 1)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 1:
        threading.Thread(target=upload_metrics, name="upload").start()
    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
