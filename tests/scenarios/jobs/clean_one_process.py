"""One process without a group: loader workers, a pause longer than the hang timeout."""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def main():
    model = torch.nn.Linear(8, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2):
        opt.zero_grad()
        model(x).mean().backward()
        opt.step()
    time.sleep(6)


if __name__ == "__main__":
    main()
