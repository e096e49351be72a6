"""Each operation that other jobs rest on, on the device and on the CPU: layers, losses, optimizers, and what compares replicas."""

import copy

import torch
from place import DEVICE, leave
from torch.nn import functional as F

torch.manual_seed(0)
SMALL, LARGE = torch.randn(5, 7), torch.randn(3, 70_001)
WHOLE = torch.randint(-(2**62), 2**62, (257,))
LISTS = [torch.randn(size) for size in (3, 4096, 70_000, 1)]
OPERATIONS = {
    "add": lambda x: x + 2 * x.square() - 3,
    "scale": lambda x: x * 2.5 / 3 - x * x,
    "strided": lambda x: (x.t() * 3).t() + x.t().contiguous().t(),
    "sums": lambda x: torch.cat([x.sum().view(1), x.mean().view(1), x.sum(0), x.sum(1)]),
    "relu": lambda x: F.relu(x),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "cat": lambda x: torch.cat([x, x * 2, x[:2]]),
    "cat_flat": lambda x: torch.cat([x.flatten()[:3], x.flatten(), x.flatten()[:1]]),
    "casts": lambda x: (x * 100).to(torch.int64).to(torch.float64),
    "finite": lambda x: (x.abs() == float("inf")).to(torch.float32),
    "mse": lambda x: F.mse_loss(x, x * 0.5),
    "flips": lambda x: x.flip(0) - x.flip(1),
    "layer_norm": lambda x: torch.nn.LayerNorm(8, device=x.device)(x[:, :8] if len(x) == 3 else F.pad(x, (0, 1))),
    "linear": lambda x: F.linear(x, x * 2, torch.arange(float(len(x))).to(x.device)),
}
INTEGERS = {
    "mixed": lambda x: ((x >> 31) ^ x) * 1_000_003 + 7 * x,
    "scan": lambda x: x.cumsum(0),
    "sum": lambda x: x.sum(),
    "greatest": lambda x: torch.stack([x.max(), max(x[:3])]),
    "remainders": lambda x: x % 1000 + torch.arange(2, 2 + len(x), device=x.device),
    "masks": lambda x: (5 & x) + (3 - x),
    "choice": lambda x: torch.where(x >= 7, x, x * 2),
    "all": lambda x: torch.stack([(x >= -(2**62)).all(), (x < 0).all()]).to(torch.float32),
    "select": lambda x: x.index_select(0, torch.tensor([3, 1, 200], device=x.device)),
    "gather": lambda x: x.gather(0, torch.tensor([3, 1, 200], device=x.device)),
    "copy": lambda x: x.clone().index_copy_(0, torch.tensor([3, 1], device=x.device), x[100:102]),
}
FOREACH = {
    "norms": lambda xs: torch.stack(torch._foreach_norm(xs, float("inf"))),
    "add": lambda xs: torch._foreach_add(xs, [x * 2 for x in xs], alpha=-0.1)[1],
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def train(name, device):
    """Return the losses and parameters of a small network.

    It has no bias before batch norm: its gradient is the error of rounding, which Adam would blow up.
    """
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8, bias=False),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.LayerNorm(8),
        torch.nn.Linear(8, 4),
    ).to(device)
    given, labels = torch.randn(16, 6).to(device), torch.randint(4, (16,)).to(device)
    optimizer = OPTIMIZERS[name](net.parameters())
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(given), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.cat([torch.stack(losses), *(p.detach().flatten() for p in (*net.parameters(), *net.buffers()))])


def main():
    made = {}
    for given, operations in ((SMALL, OPERATIONS), (LARGE, OPERATIONS), (WHOLE, INTEGERS), (LISTS, FOREACH)):
        for name, operation in operations.items():
            there = [x.to(DEVICE) for x in given] if isinstance(given, list) else given.to(DEVICE)
            if not (name == "linear" and given is LARGE):
                made[f"{name} {'list' if isinstance(given, list) else list(given.shape)}"] = (
                    lambda o=operation, g=given: o(copy.deepcopy(g)),
                    lambda o=operation, g=there: o(g),
                )
    made |= {name: (lambda n=name: train(n, "cpu"), lambda n=name: train(n, DEVICE)) for name in OPTIMIZERS}
    differ = {}
    for name, (here, there) in made.items():
        try:
            expected, found = here(), there().cpu()
            if not torch.allclose(expected.double(), found.double(), rtol=1e-3, atol=1e-4):
                differ[name] = f"{(expected.double() - found.double()).abs().max().item():.3g}"
        except Exception as error:
            differ[name] = str(error).splitlines()[0]
    spread = torch.randn(10_000, device=DEVICE)
    within = [abs(spread.mean().item()) < 0.1, 0.9 < spread.square().mean().item() < 1.1]
    leave({"differ": differ, "tried": len(made), "normal": all(within)})


if __name__ == "__main__":
    main()
