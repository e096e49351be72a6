"""Lightning: its Trainer with the ddp strategy, validation, a metric that is reduced over ranks."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("loss", torch.nn.functional.cross_entropy(self.layer(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))


if __name__ == "__main__":
    main()
