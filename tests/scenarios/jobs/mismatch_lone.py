"""A callback gathers a metric on the first rank alone, when training is over: the others have left."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Metrics:
    def on_train_end(self, trainer):
        if trainer.is_global_zero:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, {"loss": 1.0})  # FAULT


class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks
        self.is_global_zero = dist.get_rank() == 0

    def fit(self, model, steps):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
        for callback in self.callbacks:
            callback.on_train_end(self)


def main():
    dist.init_process_group("gloo")
    Trainer([Metrics()]).fit(DDP(torch.nn.Linear(8, 2)), 20)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
