"""How fast ``ddpdoctor analyze`` reads logs, and in what memory: python -m tests.bench.logs [MIB]

Prints MB per second of CPU time and peak memory of reading one log of each kind, in a process of its own, and how many
times as long that takes as ``grep -c rank`` on the same file. Progress is to be read with 100 MB/s in less than
300 MiB. Logs of 1,024 MiB (those of NCCL: a sixteenth) are made in the temporary folder (TMPDIR), one after the other.
"""

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.pairs import run

LEAST_MB_S, MOST_MIB = 100, 300
SAMPLE_LINES = 100_000
READ = """
import sys
from ddpdoctor.logs.reading import read_logs
evidence = read_logs(sys.argv[1:])
print(evidence.counts["lines"], "lines,", sum(len(run.facts) for run in evidence.runs), "facts")
"""
NOTHING = """
import sys
from ddpdoctor.logs import reading
reading.line_readers(), reading.document_formats()
"""


def progress(dice: random.Random, number: int) -> str:
    """Return a line of a trainer's log."""
    head = f"2026-03-09 14:{number // 60 % 60:02d}:{number % 60:02d},{dice.randrange(1000):03d} INFO"
    if number % 50 == 7:
        return f"{head} data: shard {dice.randrange(9999):05d}.tar opened, took {dice.random():.3f} s"
    if number % 500 == 23:
        return f"{head} ckpt: saved /data/run7/step_{number}.pt in {60 * dice.random():.1f} s by rank 0"
    return (
        f"{head} train: step {number} loss {4 * dice.random():.4f} lr {dice.random() / 1000:.2e} "
        f"grad_norm {3 * dice.random():.3f} tokens/s {dice.randrange(99999)} mem {dice.randrange(80000)} MiB"
    )


def ranked(dice: random.Random, number: int) -> str:
    """Return a line that tells its rank."""
    return f"[rank{dice.randrange(8)}]: {progress(dice, number)}"


def head_of(dice: random.Random) -> str:
    """Return what stands before NCCL's own lines."""
    local_rank = dice.randrange(8)
    return f"node{dice.randrange(4):02d}:{7000 + local_rank}:{7100 + local_rank} [{local_rank}] NCCL INFO"


def nccl(dice: random.Random, _number: int) -> str:
    """Return a line of NCCL_DEBUG=INFO, as NCCL writes them when it sets up a communicator."""
    one = dice.randrange(8)
    texts = (
        f"Channel {dice.randrange(32):02d}/0 : {one}[{one}] -> {one - 1}[{one - 1}] via P2P/CUMEM/read",
        f"Trees [0] {one + 1}/-1/-1->{one}->{one - 1} [1] {one + 1}/-1/-1->{one}->{one - 1}",
        "Connected all rings",
        f"Setting affinity for GPU {one} to ff,ffffffff",
    )
    return f"{head_of(dice)} {dice.choices(texts, (5, 2, 2, 1))[0]}"


def calls(dice: random.Random, number: int) -> str:
    """Return a line of NCCL_DEBUG_SUBSYS=COLL."""
    return (
        f"{head_of(dice)} AllReduce: opCount {number // 8:x} sendbuff 0x7f{number:010x} recvbuff 0x7f{number:010x} "
        "count 25557032 datatype 7 op 0 root 0 comm 0x55d012345678 [nranks=8] stream 0x55d087654321"
    )


def make(path: Path, line: Callable[[random.Random, int], str], mib: int) -> None:
    """Write a log: a sample of lines, again and again."""
    dice = random.Random(1)
    sample = "".join(f"{line(dice, number)}\n" for number in range(SAMPLE_LINES)).encode()
    with path.open("wb") as file:
        while file.tell() < mib * 2**20:
            file.write(sample)


def main() -> None:
    """Print the figures."""
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    started_s = run(sys.executable, "-c", NOTHING).cpu_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        for name, line, size in (
            ("progress", progress, mib), ("progress of ranks", ranked, mib),
            ("NCCL_DEBUG=INFO", nccl, mib // 16), ("calls of NCCL", calls, mib // 16),
        ):  # fmt: skip
            make(path, line, size)
            _, cpu_s, peak_mib, said = run(sys.executable, "-c", READ, str(path))
            grep_s = run("grep", "-c", "rank", str(path)).cpu_s
            mb_s = path.stat().st_size / 1e6 / (cpu_s - started_s)
            goal = f" (to be {LEAST_MB_S}, {MOST_MIB} MiB)" if line is progress else ""
            print(f"{name}: {mb_s:.0f} MB/s, {peak_mib:.0f} MiB{goal}, {cpu_s / grep_s:.1f} times grep ({said})")


if __name__ == "__main__":
    main()
