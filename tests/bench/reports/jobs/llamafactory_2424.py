# https://github.com/hiyouga/LlamaFactory/issues/2424
# report: rank 0 tokenizes for longer than the others' time limit in the barrier
# truth: {"code": "stuck", "ranks": [0], "nproc": 2, "line": true}
import hashlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def tokenize(seconds):
    end, text = time.monotonic() + seconds, b"some text"
    while time.monotonic() < end:
        text = hashlib.sha256(text * 10000).digest()  # CULPRIT


dist.init_process_group("gloo", timeout=timedelta(seconds=6))
dist.barrier()
if dist.get_rank() == 0:
    tokenize(20)  # CULPRIT
dist.barrier()
dist.destroy_process_group()
