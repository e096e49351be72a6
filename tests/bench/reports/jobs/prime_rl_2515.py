# https://github.com/PrimeIntellect-ai/prime-rl/issues/2515
# report: FSDP, and ranks have different numbers of validation batches
# truth: {"code": "mismatch", "ranks": [1], "nproc": 3, "also": ["uneven-batches"], "line": true}
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh, reshard_after_forward=True)
batches = [torch.randn(2, 8)] * (2 if dist.get_rank() == 1 else 3)
total = torch.zeros(1)
with torch.no_grad():
    for batch in batches:  # CULPRIT
        total += model(batch).mean()
dist.all_reduce(total)  # CULPRIT
dist.destroy_process_group()
