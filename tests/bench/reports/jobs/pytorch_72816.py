# https://github.com/pytorch/pytorch/issues/72816
# report: the port that the script listens on is taken
# truth: {"code": "crash", "ranks": [0], "line": true}
import socket

import torch.distributed as dist

dist.init_process_group("gloo")
other_job = socket.create_server(("", 0))
port = other_job.getsockname()[1]
if dist.get_rank() == 0:
    metrics = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # CULPRIT
dist.barrier()
dist.destroy_process_group()
