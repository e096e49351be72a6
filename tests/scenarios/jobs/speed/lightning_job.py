"""Lightning with a needless search for unused parameters, with slow rows and no workers, or well."""

import sys
import time

import lightning
import torch
from accelerator import Layers
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Rows(Dataset):
    def __init__(self, read_s):
        self.read_s = read_s

    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(self.read_s)  # FAULT slow_rows
        return torch.full((64,), float(index))


class Net(lightning.LightningModule):
    def __init__(self, ms):
        super().__init__()
        self.net = Layers(ms)

    def training_step(self, rows, index):
        return self.net(rows).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(ms, read_s=0.0, strategy="ddp"):
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=strategy, devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(ms), DataLoader(Rows(read_s), batch_size=4))


def well():
    fit(60)


def unused():
    fit(20, strategy="ddp_find_unused_parameters_true")


def slow_rows():
    fit(20, read_s=0.01)


if __name__ == "__main__":
    {way.__name__: way for way in (well, unused, slow_rows)}[sys.argv[1]]()
