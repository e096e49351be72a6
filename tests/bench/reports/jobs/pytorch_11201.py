# https://github.com/pytorch/pytorch/issues/11201
# report: batches of workers are kept, each with a descriptor: too many open files
# truth: {"code": "crash", "ranks": [1], "line": true}
import resource

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=2, num_workers=1)
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
kept = []
for (batch,) in loader:  # CULPRIT
    if dist.get_rank() == 1:
        kept.append(batch)
dist.barrier()
dist.destroy_process_group()
