# https://github.com/pytorch/pytorch/issues/49846
# report: the group is to have one rank more than were started
# truth: {"code": "missing", "ranks": [2]}
import torch
import torch.distributed as dist

import os

dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)  # CULPRIT
dist.barrier()
dist.destroy_process_group()
