"""Both ranks read samples one by one from a slow disk, and the training step waits for them."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS = 2


class Images(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        time.sleep(0.003)  # the fault: a slow disk, and no loader worker reads ahead
        return torch.randn(256), index % 10


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = Images()
    loader = DataLoader(images, batch_size=8, sampler=DistributedSampler(images))
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    del model  # a model that outlives its group can deadlock with a thread of the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
