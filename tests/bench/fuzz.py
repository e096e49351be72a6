"""Feeds damaged run folders, reports, bench files and checkpoints to ddpdoctor, and says what fell.

    python -m tests.bench.fuzz [COUNT] [SEED] [FIRST]

Nothing may raise, hang, take more than 300 MiB above what is there, or show a control or bidi character in any
format. Each input is made by SEED and its number, so that ``fuzz 1 SEED NUMBER`` repeats it. Inputs run in forked
children, 200 in each: one that dies costs no more than its batch, and is reported.
"""

import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ddpdoctor.report.bandwidth import figure  # noqa: F401 - matplotlib is not to be loaded once a batch
from tests.fuzz_samples import make_benches, make_checkpoints, make_real, make_runs
from tests.fuzzing import Fall, Sample, fuzz, peak_mib

BATCH = 200
MOST_ADDRESSES = 8 * 2**30


def main(count: int, seed: str, first: int) -> int:
    """Run ``count`` inputs and print what fell; return how many kinds did."""
    began = time.monotonic()
    fallen: Counter[str] = Counter()
    examples: dict[str, Fall] = {}
    most_mib = done = 0
    with tempfile.TemporaryDirectory(prefix="fuzz-samples-") as folder:
        at = Path(folder)
        samples = [*make_runs(at), *make_benches(at), *make_checkpoints(at), *make_real(at)]
        for start in range(first, first + count, BATCH):
            numbers = range(start, min(start + BATCH, first + count))
            falls, used_mib = run_batch(samples, seed, numbers)
            most_mib, done = max(most_mib, used_mib), done + len(numbers)
            for fall in falls:
                fallen[fall.what] += 1
                if fall.what not in examples:
                    examples[fall.what] = fall
                    print(f"{fall.seed} {fall.sample}: {fall.what}", flush=True)
    seconds = time.monotonic() - began
    print(f"{done} inputs in {seconds:.0f} s, {len(fallen)} kinds fell, at most {most_mib} MiB above the start")
    for what, times in fallen.most_common():
        print(f"{times:6} {examples[what].sample}: {what}")
    return len(fallen)


def run_batch(samples: Sequence[Sample], seed: str, numbers: range) -> tuple[list[Fall], int]:
    """Run inputs in a child; return what fell, and the memory that it took at most."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_work, args=(theirs, samples, seed, numbers))
    child.start()
    theirs.close()
    falls: list[Fall] = []
    used_mib, last = 0, numbers.start
    try:
        while True:
            kind, value = ours.recv()
            if kind == "fall":
                falls.append(value)
            elif kind == "done":
                last = value
            else:
                used_mib = value
    except EOFError:
        pass
    child.join()
    if child.exitcode:
        falls.append(Fall(seed=f"{seed}:{last}", sample="?", what=f"the process ended with {child.exitcode}"))
    return falls, used_mib


def _work(pipe: Any, samples: Sequence[Sample], seed: str, numbers: range) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    before_mib = peak_mib()
    # An input that takes all memory is to fall, and not the machine.
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    for number in numbers:
        pipe.send(("done", number))
        for fall in fuzz(samples, seed, range(number, number + 1)):
            pipe.send(("fall", fall))
    pipe.send(("memory", peak_mib() - before_mib))


if __name__ == "__main__":
    given = [*sys.argv[1:], *("1000", "0", "0")[len(sys.argv) - 1 :]]
    sys.exit(1 if main(int(given[0]), given[1], int(given[2])) else 0)
