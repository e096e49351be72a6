"""What ``wrap --speed`` costs: python -m tests.bench.speed [--sleeping] [--pairs N] | --memory; see below.

A step of two ranks under ``wrap --speed`` over one under torchrun: DDP of 200 tensors, which computes for about ten
milliseconds a step, or sleeps for ten with ``--sleeping``, as a host does that waits for its GPU. Jobs run in turn,
A B B A, and each gives rank 0's median step; four minutes. As root, run it under ``chrt -r 10``, like
``tests.bench.step``.

With ``--memory``: the resident set of a rank after 10⁵ and after 10⁶ steps that are as small as a step can be, less
what it was after the warm-up. Ten minutes.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.pairs import PAIRS, compare
from tests.scenarios.running import clean_environment, free_port

STEPS = 200
WARM_UP = 1_000
MARKS = (100_000, 1_000_000)
STEP_JOB = """
import statistics, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
sleep_s = float(sys.argv[2])
width = 8 if sleep_s else 80
net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(100)))
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(32, width)
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    opt.zero_grad(); loss = model(x).mean(); time.sleep(sleep_s); loss.backward(); opt.step()
    times.append(time.perf_counter() - began)
dist.barrier()
if dist.get_rank() == 0:
    print(statistics.median(times[len(times) // 4:]))
del model
dist.destroy_process_group()
"""
MEMORY_JOB = """
import sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.ones(1, 1)
marks = [int(word) for word in sys.argv[1:]]
for number in range(1, marks[-1] + 1):
    opt.zero_grad(); model(x).mean().backward(); opt.step()
    if number in marks and dist.get_rank() == 0:
        print(open("/proc/self/status").read().split("VmRSS:")[1].split()[0], flush=True)
dist.barrier()
del model
dist.destroy_process_group()
"""


def run(job: str, arguments: tuple[object, ...], *, wrapped: bool) -> list[float]:
    """Run a job of two ranks; return the numbers that rank 0 printed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(job)
        front = ["ddpdoctor", "wrap", "--speed", "--report-dir", f"{folder}/run"]
        command = [
            sys.executable, "-m", *(front if wrapped else ["torch.distributed.run"]), "--nproc-per-node=2",
            f"--master-port={free_port()}", str(script), *map(str, arguments),
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    found = [float(line) for line in done.stdout.splitlines() if line[:1].isdigit()]
    if not found:
        raise SystemExit(done.stderr)
    return found


def compare_steps(pairs: int, *, sleeping: bool) -> None:
    """Print the ratio of the steps."""
    arguments = (STEPS, 0.01 if sleeping else 0.0)
    what = "sleeps" if sleeping else "computes"
    compare(
        f"a step that {what}, under wrap --speed over torchrun's",
        lambda: run(STEP_JOB, arguments, wrapped=True)[0],
        lambda: run(STEP_JOB, arguments, wrapped=False)[0],
        pairs,
    )


def show_memory() -> None:
    """Print what a rank's resident set has grown by after many steps, wrapped and not."""
    for wrapped in (True, False):
        start, *later = (kib / 1024 for kib in run(MEMORY_JOB, (WARM_UP, *MARKS), wrapped=wrapped))
        grown = ", ".join(f"{mib - start:+.1f} MiB after {steps:,}" for steps, mib in zip(MARKS, later, strict=True))
        print(
            f"{'wrap --speed' if wrapped else 'torchrun'}: {start:.0f} MiB after {WARM_UP:,} steps, {grown}", flush=True
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--sleeping", action="store_true")
    parser.add_argument("--memory", action="store_true")
    chosen = parser.parse_args()
    if chosen.memory:
        show_memory()
    else:
        compare_steps(chosen.pairs, sleeping=chosen.sleeping)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
