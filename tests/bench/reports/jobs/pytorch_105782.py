# https://github.com/pytorch/pytorch/issues/105782
# report: one rank has another address of the store than the rest
# truth: {"code": "missing", "ranks": [1], "also": ["stuck", "crash"], "line": true}
import os

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = "9"
dist.init_process_group("gloo")  # CULPRIT
dist.barrier()
dist.destroy_process_group()
