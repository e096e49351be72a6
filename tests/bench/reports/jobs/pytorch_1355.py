# https://github.com/pytorch/pytorch/issues/1355
# report: a worker of a DataLoader takes a lock that was held when it was forked
# truth: {"code": "stuck", "ranks": [1], "line": true}
import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

lock = threading.Lock()


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        with lock:  # CULPRIT
            return torch.zeros(4)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    lock.acquire()
for batch in DataLoader(Images(), batch_size=2, num_workers=1):  # CULPRIT
    dist.all_reduce(batch)
dist.destroy_process_group()
