"""The ranks meet in a file in which an earlier job, which was killed, has left addresses; rank 0 connects to them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

FILE = Path(sys.argv[1])
KILLED = """
import os, sys, torch.distributed as dist
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
dist.barrier()
os._exit(0)
"""
if os.environ["RANK"] == "0":
    subprocess.run([sys.executable, "-E", "-c", KILLED, FILE], check=True)
else:
    time.sleep(600)
dist.init_process_group("gloo", init_method=f"file://{FILE}", rank=int(os.environ["RANK"]), world_size=2)  # FAULT
dist.barrier()
