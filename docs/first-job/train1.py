"""Step 1: one process."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 8


def make_data(samples: int = 455) -> TensorDataset:
    """Return points of two classes, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(2, (samples,), generator=generator)
    return TensorDataset(torch.randn(samples, 30, generator=generator) + 0.6 * labels[:, None], labels)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(make_data(), batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    for epoch in range(options.epochs):
        losses = []
        for features, labels in loader:
            loss = nn.functional.cross_entropy(model(features), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: {len(losses)} steps, loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
