"""Which share of the time ``wrap --check-every auto`` takes: python -m tests.bench.check_every [STEPS [N [LAYERS]]]

One job of two ranks on Gloo with LAYERS layers of N x N, which writes how long each step of rank 0 took, and what
comparisons had counted by then. Printed are their own count, and by how much steps with a comparison and the next ones
took longer than the median of the eight on either side. Without arguments about five minutes.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.scenarios.running import clean_environment, free_port

SCRIPT = """
import json, sys, time
import torch, torch.distributed as dist
steps, n, layers = map(int, sys.argv[1:])
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(n, n) for _ in range(layers))))
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
x = torch.randn(64, n)
schedule = next(module for name, module in list(sys.modules.items()) if name.endswith("recorder.schedule"))
rows = []
for _ in range(steps):
    began = time.perf_counter()
    opt.zero_grad(); model(x).square().mean().backward(); opt.step()
    took = time.perf_counter() - began
    rows.append((took, schedule._Chosen.auto._taken, schedule._Chosen.auto._spent_s))
dist.barrier()
if dist.get_rank() == 0:
    print(json.dumps(rows))
dist.destroy_process_group()
"""
SIZES = (900, 353, 80)
NEAR = 8


def main() -> None:
    """Run the job and print the shares."""
    given = [int(text) for text in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        wrap = [sys.executable, "-m", "ddpdoctor", "wrap", "--report-dir", f"{folder}/run", "--nproc-per-node=2"]
        command = [*wrap, f"--master-port={free_port()}", str(script), *map(str, (*given, *SIZES[len(given) :]))]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=clean_environment())
    line = next((line for line in done.stdout.splitlines() if line.startswith("[[")), None)
    if line is None:
        sys.exit(f"the job has failed:\n{done.stdout}\n{done.stderr}")
    took, taken, spent = zip(*json.loads(line), strict=True)
    compared = [i for i in range(1, len(took)) if taken[i] > taken[i - 1]]
    slow = {*compared, *(i + 1 for i in compared)}
    added = spent[0]  # the first step warms up
    for i in slow & set(range(len(took))):
        around = [took[j] for j in range(max(1, i - NEAR), min(len(took), i + NEAR + 1)) if j not in slow]
        added += took[i] - statistics.median(around or [took[i]])
    print(
        f"{len(took)} steps of {statistics.median(took) * 1e3:.0f} ms, {taken[-1]} comparisons:"
        f" {100 * spent[-1] / sum(took):.2f} % by their own count, {100 * added / sum(took):.2f} % by their neighbors"
    )


if __name__ == "__main__":
    main()
