"""What recording costs in memory and on disk: python -m tests.bench.memory; three minutes.

Memory: the resident set of a rank that trains, under ``wrap`` less under torchrun, with two ranks. Each rank reads
its own VmRSS after its last step: pages of the ring are counted, and pages of libraries as they are under torchrun.
Disk: the run folder of a short job and of one with a hundred times the calls, by allocated blocks, for each rank.
"""

import compileall
import subprocess
import sys
import tempfile
from pathlib import Path

import ddpdoctor
from tests.bench.pairs import compare_added
from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import sys
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x, t = torch.randn(16, 64), torch.zeros(4)
for _ in range(50):
    opt.zero_grad(); model(x).mean().backward(); opt.step()
for _ in range(int(sys.argv[1])):
    dist.all_reduce(t)
status = open("/proc/self/status").read()
if dist.get_rank() == 0:
    print(status.split("VmRSS:")[1].split()[0])
dist.barrier()
dist.destroy_process_group()
"""
RANKS = 2
CALLS = (1_000, 100_000)
WRAP = ("ddpdoctor", "wrap", "--debug-level", "OFF")


def run(folder: Path, calls: int, *front: str) -> float:
    """Run the job; return the resident set of rank 0 in MiB."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    ours = ["--report-dir", str(folder / "run")] if "ddpdoctor" in front else []
    rest = [f"--nproc-per-node={RANKS}", f"--master-port={free_port()}", str(script), str(calls)]
    command = [sys.executable, "-m", *front, *ours, *rest]
    # Gloo may abort a rank at its exit, when all has been printed.
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    return int(done.stdout.split()[0]) / 1024


def rss_mib(*front: str) -> float:
    """Return the resident set of a rank that has trained, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), CALLS[0], *front)


def folder_mib(calls: int) -> float:
    """Return what the run folder of a job takes on disk, in MiB for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), calls, *WRAP)
        files = [path for path in (Path(folder) / "run").rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files) / 2**20 / RANKS


def main() -> None:
    """Print the increment and the sizes."""
    compileall.compile_dir(str(Path(ddpdoctor.__file__).parent), quiet=1)
    compare_added(
        "memory of a rank under wrap, over torchrun's:", lambda: rss_mib(*WRAP),
        lambda: rss_mib("torch.distributed.run"), unit="MiB", scale=1,
    )  # fmt: skip
    for calls in CALLS:
        print(f"run folder after {calls} calls: {folder_mib(calls):.2f} MiB a rank", flush=True)


if __name__ == "__main__":
    main()
