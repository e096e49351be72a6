"""What it takes to judge run folders of many ranks: python -m tests.bench.judge [RANKS [SITUATION]]

Without arguments: seconds and peak memory of ``judge_folder`` and of ``report`` on 1,024 ranks of 2,000 records each,
in processes of their own, for each situation.

With RANKS: the folder that the first of many hosts has gathered, each of 8 ranks and 5 s ahead of the one before it.
Prints CPU seconds and peak memory for a quarter of the ranks and for all, and their ratios: a job of four times as many
ranks should take four times as much. 16,384 ranks are to take under 40 s of CPU and 2 GiB. Takes 1.2 MB of disk a rank
in the temporary folder (TMPDIR), and with 16,384 ranks about five minutes.
"""

import sys
import tempfile
from pathlib import Path

from tests.bench.pairs import Took, run
from tests.synthetic import SITUATIONS, Job, S, prologue, steps_for, write_folder, write_gathered

RANKS, RECORDS = 1024, 2000
RANKS_A_HOST = 8
TP = 16
STEP_RECORDS = 7.1
JUDGE = """
import sys
from pathlib import Path
from ddpdoctor.diagnose.job import judge_folder
for finding in judge_folder(Path(sys.argv[1])).findings:
    print(finding.kind, *finding.ranks[:4])
"""
COMMANDS = {"judge": ("-c", JUDGE), "report": ("-m", "ddpdoctor", "report")}


def show_each() -> None:
    """Print what each situation of many ranks takes: to judge it, and for the whole report."""
    for situation in SITUATIONS:
        job = Job(world=RANKS, steps=steps_for(RANKS, RECORDS), situation=situation)
        with tempfile.TemporaryDirectory() as folder:
            write_folder(Path(folder, "run"), job)
            for name, command in COMMANDS.items():
                took = run(sys.executable, *command, f"{folder}/run")
                print(
                    f"{name} {RANKS} ranks, {situation}: {took.wall_s:.2f} s, {took.mib:.0f} MiB ({took.first})",
                    flush=True,
                )


def show_growth(most: int, situation: str) -> None:
    """Print what a gathered folder takes, and by how much more four times the ranks."""
    small, large = (judge_gathered(ranks, situation) for ranks in (most // 4, most))
    ratios = f"{large.cpu_s / small.cpu_s:.2f} times the CPU, {large.mib / small.mib:.2f} times the memory"
    print(f"4 times the ranks: {ratios}")


def judge_gathered(ranks: int, situation: str) -> Took:
    """Write the run folder of a job of so many ranks, and judge it."""
    before = sum(1 for _ in prologue(Job(world=ranks, steps=0, situation=situation, tp=TP)))
    job = Job(world=ranks, steps=round((RECORDS - before) / STEP_RECORDS), situation=situation, tp=TP)
    with tempfile.TemporaryDirectory() as folder:
        write_gathered(Path(folder, "run"), job, ranks // RANKS_A_HOST, skew_ns=5 * S)
        took = run(sys.executable, *COMMANDS["judge"], f"{folder}/run")
    print(f"{ranks} ranks, {situation}: {took.cpu_s:.1f} s of CPU, {took.mib:.0f} MiB ({took.first})", flush=True)
    return took


if __name__ == "__main__":
    if len(sys.argv) > 1:
        show_growth(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else SITUATIONS[0])
    else:
        show_each()
