# https://github.com/vllm-project/speculators/pull/926
# report: only rank 0 loads the checkpoint, after DDP has sent its weights around
# truth: {"code": "param-drift", "ranks": [0], "nproc": 3}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
if dist.get_rank() == 0:
    saved = {name: value + 1 for name, value in model.module.state_dict().items()}
    model.module.load_state_dict(saved)
for _ in range(8):
    opt.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    opt.step()
dist.barrier()
dist.destroy_process_group()
