"""A rank runs other jobs beside its training: a server that makes a group before it does, an evaluation by torchrun.

Errors of tasks and calls in pools are handled, and a rank is in an except when all make a call.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from training import run, train


def serve():
    meeting = f"file://{tempfile.mkdtemp()}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    print("ready", flush=True)
    time.sleep(600)


def fail():
    raise LookupError


def evaluate():
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launch and not k.startswith("TORCHELASTIC")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([sys.executable, *torchrun, __file__, "evaluate"], check=True, env=env)


def load(step):
    if dist.get_rank() == 0 and step == 20:
        evaluate()
    try:
        if dist.get_rank() == 0:
            pool.submit(fail).result()
        dist.barrier()
    except LookupError:
        dist.barrier()
    return torch.randn(4, 8)


if "serve" in sys.argv:
    serve()
elif "evaluate" in sys.argv:
    run(lambda: dist.all_reduce(torch.ones(1)))
else:
    pool = ThreadPoolExecutor(1)
    with subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        train(load)
        server.kill()
