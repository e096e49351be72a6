# https://github.com/pytorch/pytorch/issues/85234
# report: gather of empty tensors under Gloo: ended in SIGFPE once, is fine today
# truth: {"code": "clean", "ranks": []}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(3):
    boxes = torch.ones(2 - step)
    gathered = [torch.empty_like(boxes) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, boxes)
dist.destroy_process_group()
