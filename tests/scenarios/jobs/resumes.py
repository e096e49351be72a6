"""Trains six epochs, fails in some, and resumes at the epoch of its checkpoint, FOLDER/epoch.

Usage: resumes.py FOLDER EPOCH:RANK:HOW ... A fault strikes once. It joins no group: Gloo's own connect fails in about
half of all restarts on one host, under torchrun too.
"""

import os
import pathlib
import signal
import sys
import time

import torch

torch.set_num_threads(1)
FOLDER, RANK = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
BATCHES, EPOCHS = 4, 6


def strike(epoch):
    for fault in sys.argv[2:]:
        at, rank, how = fault.split(":")
        mark = FOLDER / f"struck_{at}_{rank}"
        if (int(at), int(rank)) == (epoch, RANK) and not mark.exists():
            mark.touch()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"the data of epoch {epoch} are bad")  # FAULT


def meet(place):
    """Wait for the other rank of this start, as a reduction would."""
    name = f"at_{os.environ['DDPDOCTOR_WATCHER']}_{os.environ['TORCHELASTIC_RESTART_COUNT']}_{place}"
    (FOLDER / f"{name}_{RANK}").touch()
    while not (FOLDER / f"{name}_{1 - RANK}").exists():
        time.sleep(0.01)


def main():
    rows = torch.utils.data.TensorDataset(torch.randn(BATCHES * 8, 8))
    sampler = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=RANK)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved = FOLDER / "epoch"
    for epoch in range(int(saved.read_text()) if saved.exists() else 0, EPOCHS):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        meet(f"{epoch}_before")
        strike(epoch)
        meet(f"{epoch}_after")
        if epoch % 2 and RANK == 0:
            saved.write_text(str(epoch + 1))
            if "SAVES" in os.environ:
                torch.save(model.state_dict(), FOLDER / "model.pt")


main()
