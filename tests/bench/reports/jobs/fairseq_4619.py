# https://github.com/facebookresearch/fairseq/issues/4619
# report: training is done, and the logger's thread keeps rank 0 from ending
# truth: {"code": "exit-hang", "ranks": [0]}
import threading

import torch
import torch.distributed as dist


def upload(finished):
    finished.wait()


dist.init_process_group("gloo")
if dist.get_rank() == 0:
    threading.Thread(target=upload, args=(threading.Event(),)).start()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
