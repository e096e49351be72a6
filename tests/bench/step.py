"""What a wrapped training step costs over one under plain torchrun: python -m tests.bench.step [DETAIL|OFF]"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.pairs import compare
from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import os, statistics, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
    dist.Logger.set_construction_data_and_log = lambda *unused: None
net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(100)))
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 64)
times = []
for _ in range(150):
    began = time.perf_counter()
    opt.zero_grad(); model(x).mean().backward(); opt.step()
    times.append(time.perf_counter() - began)
dist.barrier()
if dist.get_rank() == 0:
    print(statistics.median(times[30:]))
dist.destroy_process_group()
"""


def step_s(*front: str, **env: str) -> float:
    """Return rank 0's median step in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "step.py"
        script.write_text(SCRIPT)
        rest = ["--nproc-per-node=2", f"--master-port={free_port()}", str(script)]
        run = ["--report-dir", f"{folder}/run"] if "ddpdoctor" in front else []
        command = [sys.executable, "-m", *front, *run, *rest]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment(**env))
        return float(done.stdout.split()[0])


def main() -> None:
    """Print the ratio for one debug level."""
    level = sys.argv[1] if len(sys.argv) > 1 else "OFF"
    env = {"TORCH_DISTRIBUTED_DEBUG": level}
    compare(
        f"a step under wrap --debug-level {level} over torchrun's",
        lambda: step_s("ddpdoctor", "wrap", "--debug-level", level),
        lambda: step_s("torch.distributed.run", **env),
    )


if __name__ == "__main__":
    main()
