"""How many exceptions of a signal handler a DDP loop of two ranks loses: python -m tests.bench.signals; two minutes.

A timer interrupts each rank every 2 to 10 ms, under torchrun and under wrap. The loop handles what the handler raises
and goes on where it was. An exception is lost if it never comes, or if another one comes while it passes.
"""

import os
import random
import signal
import subprocess
import sys
from types import FrameType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 8000
"""Steps of the loop: about 2,000 signals in each rank under torchrun, and more under wrap, which takes longer."""


WARM_UP = 10
"""Steps before the first signal: DDP rebuilds its buckets in the second, and cannot do that twice."""


class AlarmError(Exception):
    """What the handler raises."""


class Counts:
    """Of the exceptions in this rank."""

    raised = handled = 0


def main() -> None:
    """Run the loop under each command and print what its ranks say."""
    for command in (["torch.distributed.run"], ["ddpdoctor", "wrap"]):
        job = [sys.executable, "-m", *command, "--nproc-per-node", "2", __file__, "rank"]
        ran = subprocess.run(job, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            sys.exit(ran.stdout + ran.stderr)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("rank ")]
        print("\n  ".join([" ".join(command), *lines]), flush=True)


def handle(_number: int, _frame: FrameType | None) -> None:
    """Set the next time, and raise."""
    Counts.raised += 1
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.01))
    raise AlarmError


class Training:
    """A DDP loop that can go on after each exception: a stage of a step is made again, but not a backward that ran."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(8, 16)
        self.stage = self.steps = 0
        self.loss = torch.zeros(())

    def go_on(self, until: int) -> None:
        """Take the stages that are left."""
        while self.steps < until:
            torch.set_grad_enabled(True)  # an optimizer that is interrupted may leave it off
            if self.stage == 0:
                self.optimizer.zero_grad()
                self.loss = self.model(self.inputs).square().mean()
                self.stage = 1
            if self.stage == 1:
                if next(self.model.parameters()).grad is None:
                    self.loss.backward()
                self.stage = 2
            if self.stage == 2:
                self.optimizer.step()
                self.steps, self.stage = self.steps + 1, 0


def handle_all(training: Training, depth: int) -> None:
    """Go on after each exception. The further levels handle those that come outside of an inner ``try``."""
    while training.steps < STEPS:
        try:
            if depth:
                handle_all(training, depth - 1)
            training.go_on(STEPS)
        except AlarmError:
            Counts.handled += 1


def as_rank() -> None:
    """Train under signals, and print what was raised and what was handled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training()
    training.go_on(WARM_UP)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    handle_all(training, 3)
    signal.setitimer(signal.ITIMER_REAL, 0)
    line = f"rank {dist.get_rank()}: {Counts.raised} raised, {Counts.raised - Counts.handled} lost\n"
    os.write(1, line.encode())  # in one piece
    dist.destroy_process_group()


if __name__ == "__main__":
    as_rank() if sys.argv[1:] else main()
