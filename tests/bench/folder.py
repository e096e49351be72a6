"""What it takes to judge the run folder of thousands of ranks: python -m tests.bench.folder [RANKS [SITUATION]]

Makes the folder that the first of many hosts has gathered, each of 8 ranks and 5 s ahead of the one before it, with
2,000 records a rank; prints CPU seconds and peak memory of ``judge_folder`` for a quarter of the ranks and for all,
each in a process of its own, and their ratios: a job of four times as many ranks should take four times as much.
Takes 1.2 MB of disk a rank in the temporary folder (TMPDIR), and with 16,384 ranks about five minutes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.judge import JUDGE, RECORDS, ROOT
from tests.synthetic import SITUATIONS, Job, S, prologue, write_gathered

RANKS_A_HOST = 8
TP = 16
STEP_RECORDS = 7.1
MOST_CPU_S, MOST_MIB = 40, 2048
AT = 16_384


def make(folder: Path, ranks: int, situation: str) -> None:
    """Write the run folder of a job of so many ranks."""
    before = sum(1 for _ in prologue(Job(world=ranks, steps=0, situation=situation, tp=TP)))
    job = Job(world=ranks, steps=round((RECORDS - before) / STEP_RECORDS), situation=situation, tp=TP)
    write_gathered(folder, job, ranks // RANKS_A_HOST, skew_ns=5 * S)


def judge(folder: Path) -> tuple[float, float, str]:
    """Return CPU seconds and MiB at the peak, and the first finding."""
    process = subprocess.Popen([sys.executable, "-c", JUDGE, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, said.partition("\n")[0]


def main() -> None:
    """Print the figures."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else AT
    situation = sys.argv[2] if len(sys.argv) > 2 else SITUATIONS[0]
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (most // 4, most):
            make(Path(folder, str(ranks)), ranks, situation)
            cpu_s, mib, said = judge(Path(folder, str(ranks)))
            figures.append((cpu_s, mib))
            print(f"{ranks} ranks, {situation}: {cpu_s:.1f} s of CPU, {mib:.0f} MiB ({said})", flush=True)
    (small_s, small_mib), (cpu_s, mib) = figures
    print(f"4 times the ranks: {cpu_s / small_s:.2f} times the CPU, {mib / small_mib:.2f} times the memory")
    if most == AT:
        print(f"{cpu_s:.1f} s of CPU (to be under {MOST_CPU_S}), {mib:.0f} MiB (to be under {MOST_MIB})")


if __name__ == "__main__":
    main()
