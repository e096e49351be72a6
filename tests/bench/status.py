"""What a job pays for a `status --watch` beside it: python -m tests.bench.status [--pairs N]; three minutes.

Two ranks under ``wrap``, DDP of 200 tensors, steps of about ten milliseconds. Jobs run in turn, A B B A, with the watch
and without. The mean step counts, since few refreshes would not show in the median of a hundred steps. That one is
printed too. The watch starts before the ranks do, so what its imports cost is not in the steps. ``tests.bench.step``
says how to run it on a machine that others use.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.pairs import PAIRS, measure, spread
from tests.bench.step import SCRIPT
from tests.scenarios.running import clean_environment, free_port, wait_for

STEPS = 1000
PRINTED = "    print(statistics.median(times[len(times) // 4:]))"
BOTH = "    print(statistics.median(times[len(times) // 4:]), statistics.fmean(times[len(times) // 4:]))"


def mean_step_s(medians: list[float], *, watched: bool) -> float:
    """Return rank 0's mean step in seconds; the median is added to ``medians``."""
    with tempfile.TemporaryDirectory() as folder:
        script, run = Path(folder, "step.py"), Path(folder, "run")
        assert PRINTED in SCRIPT
        script.write_text(SCRIPT.replace(PRINTED, BOTH))
        options = ("--debug-level", "OFF", "--report-dir", str(run), "--nproc-per-node=2")
        words = ("wrap", *options, f"--master-port={free_port()}", str(script), str(STEPS))
        command = [sys.executable, "-m", "ddpdoctor", *words]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment())
        with watch(run) if watched else contextlib.nullcontext():
            shown, _ = job.communicate(timeout=600)
        median, mean = map(float, shown.split()[:2])
    medians.append(median)
    return mean


@contextlib.contextmanager
def watch(run: Path) -> Iterator[None]:
    """Run `status --watch` beside a job, and check that it has shown the steps."""
    assert wait_for((run / "run.json").exists)
    command = [sys.executable, "-m", "ddpdoctor", "status", str(run), "--watch"]
    beside = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=clean_environment())
    try:
        yield
        assert beside.stdout is not None
        blocks = beside.stdout.read().count(b"  trains\n")
        _, status, used = os.wait4(beside.pid, 0)
        beside.returncode = os.waitstatus_to_exitcode(status)
        cost_ms = (used.ru_utime + used.ru_stime) * 1e3 / max(blocks, 1)
        print(f"{blocks} refreshes while it trained, {cost_ms:.0f} ms of a core each, imports included", flush=True)
    finally:
        beside.kill()


def main() -> None:
    """Print the ratios of the mean and of the median step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    pairs = parser.parse_args().pairs
    ours: list[float] = []
    theirs: list[float] = []
    means = list(
        measure(partial(mean_step_s, ours, watched=True), partial(mean_step_s, theirs, watched=False), pairs)
    )  # fmt: skip
    ratios = {"mean": [a / b for a, b in means], "median": [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]}
    for name, values in ratios.items():
        found = spread(values)
        print(f"{name} step with status --watch / without: {found.median:.3f} ({found.low:.3f} to {found.high:.3f}, "
              f"{pairs} pairs; load {os.getloadavg()[0]:.1f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
