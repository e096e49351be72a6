"""Accelerate: prepared loader with forked workers, accumulation, gathered metrics, a checkpoint."""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


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


def main():
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


if __name__ == "__main__":
    main()
