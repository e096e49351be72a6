"""An operation whose slope is infinite at a value that one rank meets: loss and input are finite."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BAD_STEP = 6


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, bad):
        hidden = self.second(torch.relu(self.first(x)))
        if bad:
            hidden = torch.where(hidden == hidden, hidden, (hidden - hidden.detach()).sqrt())
        return self.head(hidden)


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(1, 10):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8), step == BAD_STEP and dist.get_rank() == 2).square().mean()
        loss.backward()  # FAULT
        optimizer.step()
    dist.barrier()
    del model  # see training.leave
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
