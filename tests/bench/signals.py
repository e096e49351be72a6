"""How many exceptions of a signal handler a DDP loop of two ranks loses: python -m tests.bench.signals; two minutes.

A timer interrupts each rank every 2 to 10 ms, under torchrun and under wrap. The loop handles what the handler raises
and goes on where it was. An exception is lost if it never comes, or if another one comes while it passes: in a
``finally`` of torch, for one. For each that is lost the rank prints where it was raised, and where the other one was.
A handler is cut short if an earlier exception comes in it, and its own is never raised. Both happen without us as well,
on a busy machine above all.

Give numbers of steps for torchrun and wrap to change the 8,000 of each: a step takes longer under wrap, so that
``16000 8000`` makes about as many signals under both.
"""

import os
import random
import signal
import subprocess
import sys
import time
import traceback
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

    handled = False


RAISED: list[AlarmError] = []
CUT: list[AlarmError] = []
"""What was raised last before a handler that never came to its own raise."""


def main() -> None:
    """Run the loop under each command and print what its ranks say."""
    commands = (["torch.distributed.run"], ["ddpdoctor", "wrap"])
    for command, steps in zip(commands, sys.argv[1:] or [str(STEPS)] * 2, strict=True):
        job = [sys.executable, "-m", *command, "--nproc-per-node", "2", __file__, "rank", steps]
        ran = subprocess.run(job, capture_output=True, text=True, check=False)
        if ran.returncode != 0:
            sys.exit(ran.stdout + ran.stderr)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("rank ")]
        print("\n  ".join([" ".join(command), *lines]), flush=True)


def handle(_number: int, frame: FrameType | None) -> None:
    """Set the next time, and raise. A signal that comes in here ends this handler: only what is raised is counted."""
    error = AlarmError(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "nowhere", time.monotonic())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.002, 0.01))
    RAISED[0:0] = [error]  # Python looks for signals after a call: there is none between this and the raise
    raise error


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
            if RAISED and signal.getitimer(signal.ITIMER_REAL)[0] == 0:  # a handler was ended before it set the time
                CUT.append(RAISED[0])
                signal.setitimer(signal.ITIMER_REAL, 0.01)
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


def handle_all(training: Training, until: int, depth: int) -> None:
    """Go on after each exception. The further levels handle those that come outside of an inner ``try``."""
    while training.steps < until:
        try:
            if depth:
                handle_all(training, until, depth - 1)
            training.go_on(until)
        except AlarmError as error:
            error.handled = True


def place(error: BaseException) -> str:
    """Return where an exception was raised, and what its handler interrupted if that was elsewhere: in our recorder."""
    lines = [step for step in traceback.extract_tb(error.__traceback__) if step.name != handle.__name__]
    raised = f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "nowhere"
    return raised if raised == error.args[0] else f"{raised} (came at {error.args[0]})"


def as_rank(steps: int) -> None:
    """Train under signals, and print what was raised and what was handled."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training()
    training.go_on(WARM_UP)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    handle_all(training, steps, 3)
    signal.setitimer(signal.ITIMER_REAL, 0)
    lost = [error for error in RAISED if not error.handled]
    lines = [f"rank {dist.get_rank()}: {len(RAISED)} raised, {len(lost)} lost, {len(CUT)} handlers cut short"]
    lines += [f"rank {dist.get_rank()}:   cut short after the one at {place(error)}" for error in CUT]
    for error in lost:
        others = [other for other in RAISED if other.__context__ is error]
        by = " ".join(f"{place(one)} {1e3 * (one.args[1] - error.args[1]):.1f} ms later" for one in others)
        lines.append(f"rank {dist.get_rank()}:   lost at {place(error)}, replaced at {by or 'unknown'}")
    os.write(1, "".join(line + "\n" for line in lines).encode())  # in one piece
    dist.destroy_process_group()


if __name__ == "__main__":
    as_rank(int(sys.argv[2])) if sys.argv[1:2] == ["rank"] else main()
