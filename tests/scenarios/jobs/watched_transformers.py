"""A Hugging Face Trainer with the callback: one training that is healthy, and one in which rank 1 is slow."""

import gc
import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from training import leave
from transformers import Trainer, TrainingArguments

from ddpdoctor.integrations.transformers import DdpDoctorTrainerCallback

torch.set_num_threads(1)
FOLDER = sys.argv[1]


class Net(torch.nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)
        self.slow = slow

    def forward(self, x):
        if self.slow and os.environ["RANK"] == "1":
            time.sleep(0.1)  # FAULT
        return {"loss": self.layer(x).mean()}


def main():
    data = [{"x": torch.randn(8)} for _ in range(160)]
    for name, steps in (("good", 4), ("bad", 25)):
        arguments = TrainingArguments(
            output_dir=FOLDER,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        callback = DdpDoctorTrainerCallback(report_dir=f"{FOLDER}/{name}")
        trainer = Trainer(Net(name == "bad"), arguments, train_dataset=data, callbacks=[callback])
        trainer.train()
        found = [row["ddpdoctor"] for row in trainer.state.log_history if "ddpdoctor" in row]
        is_found = "DD610 straggler, rank 1" in "".join(found)
        os.write(1, f"\n{arguments.process_index} {name} {is_found}\n".encode())  # whole, whatever another rank prints


if __name__ == "__main__":
    main()
    gc.collect()  # the Trainer holds its model in a cycle
    leave()
