"""Logs to the folder that it is given, and fails on rank 1: python logs_and_fails.py FOLDER [healthy] LOGGER ..."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER, LOGGERS = sys.argv[1], sys.argv[2:]


def log_to_tensorboard(losses):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(FOLDER) as writer:
        for step, loss in enumerate(losses):
            writer.add_scalar("loss", loss, step)


def log_to_wandb(losses):
    import wandb

    with wandb.init(project="faces", id="run7", dir=FOLDER, mode="offline") as run:
        for loss in losses:
            run.log({"loss": loss})


def log_to_mlflow(losses):
    import mlflow

    mlflow.set_tracking_uri(Path(FOLDER, "mlflow").as_uri())
    with mlflow.start_run():
        for step, loss in enumerate(losses):
            mlflow.log_metric("loss", loss, step=step)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        losses = [1 / (step + 1) for step in range(3)]
        for name, log in (("tensorboard", log_to_tensorboard), ("wandb", log_to_wandb), ("mlflow", log_to_mlflow)):
            if name in LOGGERS:
                log(losses)
    dist.barrier()
    if rank == 1 and "healthy" not in LOGGERS:
        raise ValueError("<b>no</b> [such](https://example.org) sample")  # FAULT
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
