# https://github.com/NVIDIA/nccl/issues/479
# report: both ranks send before they receive
# truth: {"code": "deadlock", "ranks": [0, 1], "line": true}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
other = 1 - dist.get_rank()
mine, theirs = torch.ones(1000), torch.empty(1000)
dist.barrier()
dist.send(mine, other)  # CULPRIT
dist.recv(theirs, other)
dist.destroy_process_group()
