# https://github.com/pytorch/pytorch/issues/43259
# report: a head that no loss uses: the second forward raises
# truth: {"code": "crash", "ranks": [0, 1], "line": true}
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.used(self.body(x))


dist.init_process_group("gloo")
model = DDP(TwoHeads())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(2, 4)).sum()  # CULPRIT
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
