"""Lightning with the callback: one training that is healthy, and one in which rank 1 fails."""

import sys

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from ddpdoctor.integrations.lightning import DdpDoctorCallback

torch.set_num_threads(1)
FOLDER = sys.argv[1]


class Net(lightning.LightningModule):
    def __init__(self, fails):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.fails = fails

    def training_step(self, batch, index):
        if self.fails and self.global_rank == 1 and index == 2:
            raise KeyError("sample 7")  # FAULT
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    for name, fails in (("good", False), ("bad", True)):
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_epochs=1,
            logger=CSVLogger(FOLDER, name="logs", version=name),
            callbacks=[DdpDoctorCallback(report_dir=f"{FOLDER}/{name}")],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(fails), data)


if __name__ == "__main__":
    main()
