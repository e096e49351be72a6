"""A Hugging Face Trainer that reads slow rows without workers, or searches for unused parameters, or does well."""

import gc
import os
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from accelerator import Layers, leave
from transformers import Trainer, TrainingArguments

torch.set_num_threads(1)


class Rows(torch.utils.data.Dataset):
    def __init__(self, read_s):
        self.read_s = read_s

    def __len__(self):
        return 320

    def __getitem__(self, index):
        time.sleep(self.read_s)  # FAULT slow_rows
        return {"rows": torch.full((64,), float(index))}


class Net(torch.nn.Module):
    def __init__(self, ms):
        super().__init__()
        self.net = Layers(ms)

    def forward(self, rows):
        return {"loss": self.net(rows).mean()}


def train(ms, read_s=0.0, **options):
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, max_steps=40, per_device_train_batch_size=4, save_strategy="no",
            logging_steps=20, report_to="none", remove_unused_columns=False, disable_tqdm=True, **options,
        )  # fmt: skip
        Trainer(model=Net(ms), args=arguments, train_dataset=Rows(read_s)).train()


def slow_rows():
    train(20, read_s=0.01)


def default():
    """Without checkpointing, the Trainer has DDP search for unused parameters."""
    train(60)


def quick_rows():
    train(60, ddp_find_unused_parameters=False)


if __name__ == "__main__":
    {way.__name__: way for way in (slow_rows, default, quick_rows)}[sys.argv[1]]()
    gc.collect()  # the Trainer holds its model in a cycle
    leave()
