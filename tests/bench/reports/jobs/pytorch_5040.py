# https://github.com/pytorch/pytorch/issues/5040
# report: no room in /dev/shm: a worker dies by a bus error
# truth: {"code": "crash", "ranks": [1], "line": true}
import os
import signal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

rank = int(os.environ["RANK"])


class Frames(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if rank == 1 and index == 6:
            os.kill(os.getpid(), signal.SIGBUS)
        return torch.zeros(4)


dist.init_process_group("gloo")
for batch in DataLoader(Frames(), batch_size=2, num_workers=1):  # CULPRIT
    dist.all_reduce(batch)
dist.destroy_process_group()
