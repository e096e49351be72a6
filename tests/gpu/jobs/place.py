"""Where the jobs run: on cuda:0 over NCCL, with OWN_GPUS=1 on a GPU for each rank; in a dry run on the CPU over Gloo."""

import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist

DRY = os.environ.get("GPU_TESTS_DRY_RUN") == "1"
OWN = os.environ.get("OWN_GPUS") == "1"
NUMBER = int(os.environ["LOCAL_RANK"]) if OWN else 0
DEVICE = "cpu" if DRY else f"cuda:{NUMBER}"
BACKEND = "gloo" if DRY else "nccl"
SEEDED = os.environ.get("SEEDED") == "1"
STANDIN = getattr(ctypes.CDLL(None), "fakecuda_count", None)
"""On a stand-in for CUDA: tells how often a function of CUDA's was called so far."""

# NCCL refuses two ranks on one GPU of one host. Set up as two hosts, it uses sockets between them.
if not OWN:
    os.environ["NCCL_HOSTID"] = "rank" + os.environ.get("RANK", "0")
os.environ["NCCL_SOCKET_IFNAME"] = "lo"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may resolve to nothing on a machine that is lent
torch.set_num_threads(1)


def join(backend=BACKEND, at_once=False, **options):
    """Make the process group and return the rank. ``at_once`` has NCCL connect now, and not in the first collective."""
    if not DRY:
        torch.cuda.set_device(NUMBER)
        if at_once:
            options["device_id"] = torch.device(DEVICE)
    dist.init_process_group(backend, **options)
    return dist.get_rank()


def settle():
    """Wait until the device has done all that it was given."""
    if not DRY:
        torch.cuda.synchronize()


def leave(result):
    """Save what this script saw, where its first argument says."""
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
