"""A Hugging Face Trainer on a tiny random model made from a configuration, with evaluation and a checkpoint."""

import gc
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from training import leave
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)


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


if __name__ == "__main__":
    main()
    gc.collect()  # the Trainer holds its model in a cycle
    leave()
