"""What comparing replicas costs: python -m tests.bench.consistency [PAIRS [STEPS]] [FLAGS OF wrap]; an hour and a half.

A model of 10 M parameters in 160 tensors, Adam, two ranks on Gloo, 500 steps: the mean step of rank 0 under `wrap` over
that under `wrap --no-consistency`, in turn, A B B A; once as it is, and once without the look at local gradients, which
has no switch: the script takes it out of the recorder. Beside it what a rank takes more in memory (its peak), and the
bytes that it writes. As root, run it under ``chrt -r 10``: see ``step``.
"""

import compileall
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import ddpdoctor
from tests.bench.pairs import measure, spread
from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import json, os, resource, sys, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
net = torch.nn.Sequential(*(torch.nn.Linear(353, 353) for _ in range(80)))
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
x = torch.randn(64, 353)
steps = int(sys.argv[1])
if sys.argv[2] == "without-look":
    for name, module in list(sys.modules.items()):
        if name.endswith("recorder.gradients"):
            module._begin = lambda *unused: None
def step():
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
for _ in range(3):
    step()
dist.barrier()
began = time.perf_counter()
for _ in range(steps):
    step()
mean_s = (time.perf_counter() - began) / steps
dist.barrier()
if dist.get_rank() == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"mean_s": mean_s, "peak_bytes": peak}))
dist.destroy_process_group()
"""
PAIRS = 15
STEPS = 500


class Job(NamedTuple):
    """What one job took."""

    mean_s: float
    peak_bytes: int
    written_bytes: int
    compared: int


def run(steps: int, look: str, *flags: str) -> Job:
    """Run the job under ``wrap`` with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        job = ["--nproc-per-node=2", f"--master-port={free_port()}", str(script), str(steps), look]
        command = [sys.executable, "-m", "ddpdoctor", "wrap", "--report-dir", f"{folder}/run", *flags, *job]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
        line = next((one for one in done.stdout.splitlines() if one.startswith('{"mean_s"')), None)
        if line is None:
            sys.exit(f"the job has failed:\n{done.stdout}\n{done.stderr}")
        written, compared = _seen(Path(folder) / "run" / "consistency.json")
        return Job(**json.loads(line), written_bytes=written, compared=compared)


def _seen(path: Path) -> tuple[int, int]:
    """Return the bytes that a rank wrote, and how many points were compared."""
    if not path.exists():
        return 0, 0
    saved = json.loads(path.read_text())
    found = saved.get("consistency", saved)
    return found.get("bytes_written", 0), sum(stream["compared"] for stream in found.get("streams", ()))


def compare(name: str, pairs: int, steps: int, look: str, flags: tuple[str, ...]) -> None:
    """Print the ratio of the mean steps, and what else differs."""
    jobs: dict[str, list[Job]] = {"on": [], "off": []}

    def timed(side: str, *more: str) -> float:
        jobs[side].append(run(steps, look, *more, *flags))
        return jobs[side][-1].mean_s

    found = spread([a / b for a, b in measure(lambda: timed("on"), lambda: timed("off", "--no-consistency"), pairs)])
    took = [on.peak_bytes - off.peak_bytes for on, off in zip(jobs["on"], jobs["off"], strict=True)]
    step_ms = statistics.median(job.mean_s for job in jobs["off"]) * 1e3
    last = jobs["on"][-1]
    print(
        f"{name}: {found.median:.4f} ({found.low:.4f} to {found.high:.4f}, {pairs} pairs), a step of"
        f" {step_ms:.0f} ms, {statistics.median(took) / 2**20:+.1f} MiB a rank, {last.written_bytes} bytes written,"
        f" {last.compared} points compared",
        flush=True,
    )


def main() -> None:
    """Print the ratios."""
    compileall.compile_dir(str(Path(ddpdoctor.__file__).parent), quiet=1)
    numbers = [int(one) for one in sys.argv[1:] if one.isdigit()]
    flags = tuple(one for one in sys.argv[1:] if not one.isdigit())
    pairs, steps = (*numbers, *(PAIRS, STEPS)[len(numbers) :])
    compare("consistency on over off", pairs, steps, "with-look", flags)
    compare("the same without the look at local gradients", pairs, steps, "without-look", flags)


if __name__ == "__main__":
    main()
