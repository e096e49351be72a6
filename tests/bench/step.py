"""What a wrapped training step costs over one under torchrun: python -m tests.bench.step [OFF|DETAIL] [FLAGS OF wrap]

``python -m tests.bench.step watch [PAIRS]`` does the same for a job that calls ``ddpdoctor.watch`` instead.

Two ranks, DDP of 200 tensors, steps of about ten milliseconds; four minutes. Jobs run in turn, A B B A, and each gives
the median of its last steps. As root, run it under ``chrt -r 10``: with two ranks on two cores whatever else runs comes
between the ranks, and a step is as slow as the slower of both. Under DETAIL the script makes torch safe in the way that
the recorder does, on both sides.
"""

import compileall
import subprocess
import sys
import tempfile
from pathlib import Path

import ddpdoctor
from tests.bench.pairs import PAIRS, compare
from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import os, statistics, sys, time
import torch, torch.distributed as dist
if "WATCH_DIR" in os.environ:
    import ddpdoctor
    ddpdoctor.watch(report_dir=os.environ["WATCH_DIR"]).start()
torch.set_num_threads(1)
dist.init_process_group("gloo")
if os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL":
    dist.Logger.set_construction_data_and_log = lambda *unused: None
net = torch.nn.Sequential(*(torch.nn.Linear(80, 80) for _ in range(100)))
model = torch.nn.parallel.DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(32, 80)
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    opt.zero_grad(); model(x).mean().backward(); opt.step()
    times.append(time.perf_counter() - began)
dist.barrier()
if dist.get_rank() == 0:
    print(statistics.median(times[len(times) // 4:]))
dist.destroy_process_group()
"""
STEPS = 200


def step_s(*front: str, watched: bool = False, **env: str) -> float:
    """Return rank 0's median step in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "step.py"
        script.write_text(SCRIPT)
        rest = ["--nproc-per-node=2", f"--master-port={free_port()}", str(script), str(STEPS)]
        run = ["--report-dir", f"{folder}/run"] if "ddpdoctor" in front else []
        if watched:
            env["WATCH_DIR"] = f"{folder}/run"
        command = [sys.executable, "-m", *front, *run, *rest]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment(**env))
        return float(done.stdout.split()[0])


def main() -> None:
    """Print the ratio for one debug level, or for a job that watches itself."""
    compileall.compile_dir(str(Path(ddpdoctor.__file__).parent), quiet=1)
    level, *flags = sys.argv[1:] or ["OFF"]
    if level == "watch":
        compare(
            "a step under ddpdoctor.watch over one without",
            lambda: step_s("torch.distributed.run", watched=True),
            lambda: step_s("torch.distributed.run"),
            int(flags[0]) if flags else PAIRS,
        )
        return
    compare(
        " ".join(["a step under wrap --debug-level", level, *flags, "over torchrun's"]),
        lambda: step_s("ddpdoctor", "wrap", "--debug-level", level, *flags),
        lambda: step_s("torch.distributed.run", TORCH_DISTRIBUTED_DEBUG=level),
    )


if __name__ == "__main__":
    main()
