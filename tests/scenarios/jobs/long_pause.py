"""One rank pauses until that has been reported as a hang, and then goes on until the report is withdrawn."""

import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from training import run

REPORTED = Path(os.environ["DDPDOCTOR_RUN"]) / "end.json"


def wait_for_report():
    while not REPORTED.exists():
        time.sleep(0.1)


def main():
    for _ in range(10):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        pause = threading.Thread(target=wait_for_report)
        pause.start()
        pause.join()  # FAULT
    reported = torch.ones(1)
    while reported:
        time.sleep(0.1)
        reported.fill_(REPORTED.exists())
        dist.broadcast(reported, 0)


run(main)
