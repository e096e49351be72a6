"""Trainings by other libraries: each function is a job, and its name is the argument."""

import gc
import os
import sys
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from training import leave


def clean_accelerate():
    """Accelerate: prepared loader with forked workers, accumulation, gathered metrics, a checkpoint."""
    from accelerate import Accelerator

    def evaluate(accelerator, model, loader):
        model.eval()
        right = 0
        for x, y in loader:
            with torch.no_grad():
                guess = model(x).argmax(1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right += (guess == y).sum().item()
        model.train()
        return right

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(50, 8), torch.randint(0, 2, (50,)))
    model = torch.nn.Linear(8, 2)
    opt = torch.optim.AdamW(model.parameters())
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
    held_out = DataLoader(data, batch_size=4)
    model, opt, loader, held_out = accelerator.prepare(model, opt, loader, held_out)
    for epoch in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
        accelerator.print("epoch", epoch, evaluate(accelerator, model, held_out))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_model(model, folder)
    model, opt = accelerator.free_memory(model, opt)  # see training.leave
    accelerator.end_training()


def clean_lightning():
    """Lightning: its Trainer with the ddp strategy, validation, a metric that is reduced over ranks."""
    import lightning

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


def clean_transformers():
    """A Hugging Face Trainer on a tiny random model made from a configuration, with evaluation and a checkpoint."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, i):
            tokens = torch.arange(i, i + 8) % 16
            return {"input_ids": tokens, "labels": tokens}

    def main():
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                max_steps=6,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                eval_strategy="steps",
                eval_steps=3,
                save_steps=3,
                logging_steps=3,
                report_to="none",
            )
            model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
            trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows())
            trainer.train()

    main()
    gc.collect()  # the Trainer holds its model in a cycle
    leave()


def watched_accelerate(folder, pace):
    """Accelerate with the tracker, under which rank 1 may be slow."""
    from accelerate import Accelerator
    from ddpdoctor.integrations.accelerate import DdpDoctorTracker

    accelerator = Accelerator(cpu=True, log_with=[DdpDoctorTracker(report_dir=folder)])
    accelerator.init_trackers("project", config={"lr": 0.1})
    model = torch.nn.Linear(8, 2)
    model, opt = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(25):
        opt.zero_grad()
        if pace == "slow" and accelerator.process_index == 1:
            time.sleep(0.1)  # FAULT
        accelerator.backward(model(torch.randn(4, 8)).mean())
        opt.step()
        accelerator.log({"step": step})
    model, opt = accelerator.free_memory(model, opt)  # see training.leave
    accelerator.end_training()


def watched_lightning(folder):
    """Lightning with the callback: one training that is healthy, and one in which rank 1 fails."""
    import lightning
    from ddpdoctor.integrations.lightning import DdpDoctorCallback
    from lightning.pytorch.loggers import CSVLogger

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

    data = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)
    for name, fails in (("good", False), ("bad", True)):
        trainer = lightning.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=2,
            max_epochs=1,
            logger=CSVLogger(folder, name="logs", version=name),
            callbacks=[DdpDoctorCallback(report_dir=f"{folder}/{name}")],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Net(fails), data)


def watched_transformers(folder):
    """A Hugging Face Trainer with the callback: one training that is healthy, and one in which rank 1 is slow."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from ddpdoctor.integrations.transformers import DdpDoctorTrainerCallback
    from transformers import Trainer, TrainingArguments

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
                output_dir=folder,
                use_cpu=True,
                max_steps=steps,
                per_device_train_batch_size=2,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            callback = DdpDoctorTrainerCallback(report_dir=f"{folder}/{name}")
            trainer = Trainer(Net(name == "bad"), arguments, train_dataset=data, callbacks=[callback])
            trainer.train()
            found = [row["ddpdoctor"] for row in trainer.state.log_history if "ddpdoctor" in row]
            is_found = "DD610 straggler, rank 1" in "".join(found)
            # In one piece, whatever another rank prints.
            os.write(1, f"\n{arguments.process_index} {name} {is_found}\n".encode())

    main()
    gc.collect()  # the Trainer holds its model in a cycle
    leave()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
