# https://github.com/pytorch/pytorch/issues/102438
# report: one rank builds a model with other parameters than the rest
# truth: {"code": "model-differs", "ranks": [2], "nproc": 3, "also": ["mismatch", "crash"], "line": true}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
layers = [torch.nn.Linear(4, 4)]
if dist.get_rank() == 2:
    layers.append(torch.nn.Linear(4, 4))
model = DDP(torch.nn.Sequential(*layers))  # CULPRIT
model(torch.randn(2, 4)).sum().backward()
dist.destroy_process_group()
