"""Trains the models of ``tests/scenarios/jobs/replicas.py`` on the device: with SEEDED=1 each has its silent fault.

FAULTS names them. They are made on the CPU, moved when DDP gets them, and their inputs when they come.
"""

import importlib.util
import os
import sys
from pathlib import Path

import torch.distributed as dist
from place import DEVICE, SEEDED, join
from torch.nn.parallel import DistributedDataParallel

SOURCE = Path(__file__).parents[2] / "scenarios" / "jobs" / "replicas.py"


def load():
    sys.path.append(str(SOURCE.parent))  # for what it imports
    spec = importlib.util.spec_from_file_location("models", SOURCE)
    models = importlib.util.module_from_spec(spec)
    sys.argv[1] = "wrong" if SEEDED else "right"
    spec.loader.exec_module(models)
    return models


def moved(module, **options):
    module.register_forward_pre_hook(lambda _module, inputs: tuple(one.to(DEVICE) for one in inputs))
    return DistributedDataParallel(module.to(DEVICE), **options)


def main():
    join()
    models = load()
    models.DDP = moved
    for name in os.environ["FAULTS"].split():
        getattr(models, name)(name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
