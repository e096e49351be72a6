"""Gloo as ddpdoctor measures it beside OpenMPI over TCP on loopback: python -m tests.bench.mpi

Needs Debian's `openmpi-bin libopenmpi-dev`. Both run two ranks on this machine, in turn, and the medians of the runs
stand side by side. It says how two libraries do here, and nothing of networks.
"""

import csv
import io
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tests.scenarios.running import clean_environment

SMALLEST, LARGEST, FACTOR, CALLS, RUNS = 1024, 64 * 2**20, 4, 60, 5
SOURCE = Path(__file__).with_name("allreduce_mpi.c")
OVER_TCP = ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")


def mpi_us(program: Path) -> dict[int, float]:
    """Return the median time of each size under MPI."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *OVER_TCP, str(program)]
    arguments = [str(number) for number in (SMALLEST, LARGEST, FACTOR, CALLS)]
    done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, env=clean_environment())
    return {int(size): float(us) for size, us in (line.split() for line in done.stdout.splitlines())}


def ours_us() -> dict[int, float]:
    """Return the median time of each size as ddpdoctor gives it."""
    command = [
        sys.executable, "-m", "ddpdoctor", "allreduce-bench", "--nproc-per-node", "2", "--backend", "gloo",
        "--mode", "latency", "--min-size", str(SMALLEST), "--max-size", str(LARGEST), "--factor", str(FACTOR),
        "--iters", str(CALLS), "--budget", "120s", "--format", "csv",
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment())
    return {int(row["size_bytes"]): float(row["p50_us"]) for row in csv.DictReader(io.StringIO(done.stdout))}


def compile_program(folder: str) -> Path:
    """Compile the loop; ends the benchmark where there is no MPI."""
    compiler = shutil.which("mpicc")
    if compiler is None:
        sys.exit("mpicc is missing: apt-get install openmpi-bin libopenmpi-dev")
    program = Path(folder) / "allreduce"
    subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def main() -> None:
    """Print both tables side by side, as measured."""
    seen: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(folder)
        for _ in range(RUNS):
            for column, found in enumerate((ours_us(), mpi_us(program))):
                for size, us in found.items():
                    seen[size][column].append(us)
    print(f"2 ranks on this machine, float32, p50 in us, median of {RUNS} runs in turn")
    print(f"{'bytes':>10} {'Gloo':>10} {'OpenMPI':>10} {'Gloo/OpenMPI':>13}")
    for size, (ours, theirs) in sorted(seen.items()):
        gloo, mpi = statistics.median(ours), statistics.median(theirs)
        print(f"{size:>10} {gloo:>10.0f} {mpi:>10.0f} {gloo / mpi:>13.2f}")


if __name__ == "__main__":
    main()
