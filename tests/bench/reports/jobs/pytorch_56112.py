# https://github.com/pytorch/pytorch/issues/56112
# report: all_gather of token lists, whose lengths differ between ranks
# truth: {"code": "mismatch", "ranks": [2], "nproc": 3, "line": true}
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
length = 3 if dist.get_rank() == 2 else 5
tokens = torch.zeros(4, length)
gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, tokens)  # CULPRIT
dist.barrier()
dist.destroy_process_group()
