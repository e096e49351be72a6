"""What ``attach`` costs: python -m tests.bench.attach [--rounds N]; two minutes.

First the time to a saved folder of 8 ranks that hang, two looks included. Then the step times of a job of two ranks
while it is looked at, as a ratio to those of the same job between the looks: median, and mean, which one slow step
changes.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.attach.session import GAP_S, Options, attach
from tests.scenarios.running import clean_environment, free_port, wait_for

RANKS = 8
JOB = """
import array, os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[2]
if sys.argv[1] == "hangs":
    dist.barrier()
    open(f"{folder}/at_{rank}", "w").close()
    if rank == 1:
        open(f"{folder}/release").read()
    dist.all_reduce(torch.ones(1))
else:
    some, end = torch.randn(256, 256), torch.zeros(1)
    with open(f"{folder}/steps_{rank}", "wb", buffering=0) as steps:
        while not end:
            some = torch.nn.functional.normalize(some @ some)
            end += os.path.exists(f"{folder}/end")
            dist.all_reduce(end)
            steps.write(array.array("q", [time.monotonic_ns()]).tobytes())
dist.destroy_process_group()
"""


@contextlib.contextmanager
def job(mode: str, ranks: int, folder: Path) -> Iterator[int]:
    """Run a job, which must end well; yield the pid of its launcher."""
    script = folder / "job.py"
    script.write_text(JOB)
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}", str(script)]
    process = subprocess.Popen([sys.executable, *command, mode, str(folder)], env=clean_environment())
    try:
        yield process.pid
        if process.wait(100):
            raise SystemExit(f"the job that {mode} ended with status {process.returncode}")
    finally:
        process.kill()


def time_of_hung(folder: Path) -> float:
    """Return the seconds to a saved folder."""
    os.mkfifo(folder / "release")
    with job("hangs", RANKS, folder) as pid:
        wait_for(lambda: len(list(folder.glob("at_*"))) == RANKS)
        began = time.monotonic()
        seen = attach(Options(pid=pid, output=folder))
        took_s = time.monotonic() - began
        reported = f"{len(seen.job.ranks)} ranks, {seen.job.movement.value}"
        print(f"{reported}: {took_s:.1f} s, of which {GAP_S:.0f} s between the looks")
        os.close(os.open(folder / "release", os.O_WRONLY))
    return took_s


def ratios_of_steps(folder: Path, rounds: int) -> tuple[float, float]:
    """Return the median and the mean of step times while attach looks, divided by those without it."""
    looked: list[tuple[int, int]] = []
    alone: list[tuple[int, int]] = []
    with job("moves", 2, folder) as pid:
        wait_for(lambda: all((folder / f"steps_{rank}").exists() for rank in range(2)))
        for _ in range(rounds):
            began = time.monotonic_ns()
            attach(Options(pid=pid, output=folder))
            between = time.monotonic_ns()
            time.sleep((between - began) / 1e9)
            looked.append((began, between))
            alone.append((between, time.monotonic_ns()))
        (folder / "end").touch()
    times = memoryview((folder / "steps_0").read_bytes()).cast("q")
    steps = [
        [b - a for a, b in itertools.pairwise(times) if any(x <= a and b <= y for x, y in of)] for of in (looked, alone)
    ]
    print(f"{len(steps[0])} steps while looked at, {len(steps[1])} without")
    return tuple(mean(steps[0]) / mean(steps[1]) for mean in (statistics.median, statistics.fmean))  # type: ignore[return-value]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as hung, tempfile.TemporaryDirectory() as moving:
        time_of_hung(Path(hung))
        median, mean = ratios_of_steps(Path(moving), rounds)
        print(
            f"step time while looked at / without: median {median:.3f}, mean {mean:.3f}; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    main()
