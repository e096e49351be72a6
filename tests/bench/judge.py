"""How long it takes to judge run folders of many ranks, and in what memory: python -m tests.bench.judge [PAIRS]

Prints seconds and peak memory of ``judge_folder`` on 1,024 ranks of 2,000 records each, in a process of its own, for
each situation; then, in turn, 256 ranks over ``torchfrtrace`` on dumps of the same events, 2,000 collectives a rank.
Those are all in one group: for a job of several groups torch's analyzer takes ten times as long.
Takes about 2 GB of disk in the temporary folder (TMPDIR), and with five pairs about five minutes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.flight_dumps import write_dumps
from tests.bench.pairs import compare
from tests.synthetic import SITUATIONS, Job, steps_for, write_folder

RANKS, RECORDS = 1024, 2000
COMPARED_RANKS = 256
COLLECTIVES_A_STEP = 5.1
ROOT = Path(__file__).parents[2]
JUDGE = """
import sys
from pathlib import Path
from ddpdoctor.diagnose.job import judge_folder
for finding in judge_folder(Path(sys.argv[1])).findings:
    print(finding.kind, *finding.ranks[:4])
"""
REPORT = ("-m", "ddpdoctor", "report")


def run(*command: str) -> tuple[float, float, str]:
    """Run Python with these arguments; return seconds, MiB at the peak, and the first line of what it said."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, _, used = os.wait4(process.pid, 0)
    return time.perf_counter() - began, used.ru_maxrss / 1024, said.partition("\n")[0]


def print_large(folder: Path) -> None:
    """Print what each situation of many ranks takes: to judge it, and for the whole report."""
    for situation in SITUATIONS:
        job = Job(world=RANKS, steps=steps_for(RANKS, RECORDS), situation=situation)
        write_folder(folder / situation, job)
        for name, command in (("judge", ("-c", JUDGE)), ("report", REPORT)):
            seconds, mib, said = run(*command, str(folder / situation))
            print(f"{name} {RANKS} ranks, {situation}: {seconds:.2f} s, {mib:.0f} MiB ({said[:60]})", flush=True)
        shutil.rmtree(folder / situation)


def compare_with_torch(folder: Path, pairs: int) -> None:
    """Print our time over that of torch's analyzer."""
    steps = round(RECORDS / COLLECTIVES_A_STEP) - 2
    job = Job(world=COMPARED_RANKS, steps=steps, situation="stuck", tp=0)
    write_folder(folder / "run", job)
    write_dumps(folder / "dumps", job)
    ours = ("-c", JUDGE, str(folder / "run"))
    theirs = ("-m", "torch.distributed.flight_recorder.fr_trace", str(folder / "dumps"))
    for name, command in (("judge", ours), ("torchfrtrace", theirs)):
        seconds, mib, _ = run(*command)
        print(f"{name} {COMPARED_RANKS} ranks: {seconds:.2f} s, {mib:.0f} MiB", flush=True)
    compare("judge over torchfrtrace", lambda: run(*ours)[0], lambda: run(*theirs)[0], pairs)


def main() -> None:
    """Print the figures."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        print_large(Path(folder))
        compare_with_torch(Path(folder), pairs)


if __name__ == "__main__":
    main()
