"""Calls ddpdoctor.check_consistency between steps, where replicas are equal and where they are not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpdoctor

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(8, 4) + rank).sum().backward()
    optimizer.step()

healthy = ddpdoctor.check_consistency(model, optimizer)
assert healthy.equal and healthy, healthy.text
assert healthy.ranks == (0, 1, 2)
assert any("buffers" in phrase for phrase in healthy.left_out), healthy.left_out

# BatchNorm's statistics are each rank's own between two forwards.
own = ddpdoctor.check_consistency(model, buffers=True, raise_on_difference=False)
assert {one.what for one in own.differences} == {"buffer"}, own.text
assert ddpdoctor.check_consistency(model, buffers=True, allow=["*.running_*"]).equal

with torch.no_grad():
    if rank == 2:
        model.module[0].bias[1] += 1e-6
        optimizer.param_groups[0]["lr"] = 0.2
reported = ddpdoctor.check_consistency(model, optimizer, raise_on_difference=False)
last, first = reported.differences[:2]
assert (first.what, first.name, first.sides, first.ranks) == ("parameter", "0.bias", ((0, 1), (2,)), (2,)), (
    reported.text
)
assert (last.what, last.name, last.values) == ("optimizer setting", "lr", ("0.1", "0.2")), reported.text
if rank < 2:
    assert ddpdoctor.check_consistency(model, optimizer, group=pair).equal
try:
    ddpdoctor.check_consistency(model, optimizer)
except ddpdoctor.ConsistencyError as error:
    message, result = str(error), error.result
assert result == reported

with torch.no_grad():
    model.module[0].bias.zero_()
optimizer.param_groups[0]["lr"] = 0.1
with model.no_sync():
    model(torch.randn(8, 4) + rank).sum().backward()
    inside = ddpdoctor.check_consistency(model, optimizer)
assert inside.equal and any("no_sync" in phrase for phrase in inside.left_out)
outside = ddpdoctor.check_consistency(model, raise_on_difference=False)
assert {one.what for one in outside.differences} == {"gradient"}
assert ddpdoctor.check_consistency(model, gradients=False).equal

other = nn.Linear(4, 4 + (rank == 1))
nn.init.zeros_(other.weight), nn.init.zeros_(other.bias)
shapes = ddpdoctor.check_consistency(other, raise_on_difference=False)
assert shapes.differences[0].values == ("float32[4, 4]", "float32[5, 4]"), shapes.text
if rank == 0:
    print(message)
dist.barrier()
del model  # see training.leave
dist.destroy_process_group()
