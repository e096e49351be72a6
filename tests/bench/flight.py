"""Flight recorder dumps against ``torchfrtrace``: python -m tests.bench.flight [RANKS...]; five minutes.

Writes dumps of a job whose rank 1 is behind, 2,000 entries a rank as torch writes them, and reads them with both.
Prints CPU time, wall time and the peak memory of the largest process. Without RANKS: 16, 64 and 256 with both, then
1,024 and 4,096 with ddpdoctor alone, which are to show whether it grows linearly.
"""

import argparse
import io
import pickle
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.pairs import run
from tests.flight_dumps import Recorder

ENTRIES = 2000
BOTH = (16, 64, 256)
ALONE = (1024, 4096)
MOST_LISTED = 5000
"""Characters in the list of ranks; more than 1,024 have more."""
LATE = 1
TP = 8


class TorchPickler(pickle._Pickler):  # type: ignore[misc]
    """Shares what torch's pickler shares: equal texts, and the frames that several stacks have. Nothing else."""

    def memoize(self, obj: object) -> None:
        """Give texts and frames a number, by which they are named from then on."""
        if isinstance(obj, str) or (isinstance(obj, dict) and "filename" in obj):
            super().memoize(obj)


def write_dumps(folder: Path, ranks: int) -> None:
    """Write the dumps of all ranks: steps of two calls among 8 ranks, one across them, and one of all."""
    for rank in range(ranks):
        place, row = rank % TP, rank // TP
        one = Recorder(rank, ranks)
        one.groups |= {
            str(1 + row): ("tp", list(range(row * TP, row * TP + TP))),
            str(1 + ranks // TP + place): ("dp", list(range(place, ranks, TP))),
        }
        _, tp, dp = one.groups
        for number in range(ENTRIES // 4):
            size = 4096 + number % 13
            one.call("_all_gather_base", (size,), group=tp, line=40 + number % 7, out=(TP * size,))
            one.call("_reduce_scatter_base", (TP * size,), group=tp, line=50 + number % 7, out=(size,))
            one.call(size=(262_144,), group=dp, line=60)
            if number < ENTRIES // 4 - 1:
                one.call(size=(8,), line=77)
        if rank != LATE:
            one.call(size=(8,), line=77, state="started")
        (folder / f"nccl_trace_rank_{rank}").write_bytes(dump_of(one.body()))


def dump_of(body: dict[str, Any]) -> bytes:
    """Return the pickle of a dump as torch writes it."""
    frames: dict[str, Any] = {}
    for entry in body["entries"]:
        entry["frames"] = [frames.setdefault(str(frame), frame) for frame in entry["frames"]]
    if len(body["pg_config"][next(iter(body["pg_config"]))]["ranks"]) > MOST_LISTED:
        return pickle.dumps(shared(body, {}), 2)  # much quicker to write, and slower to read
    stream = io.BytesIO()
    TorchPickler(stream, protocol=2).dump(shared(body, {}))
    return stream.getvalue()


def shared(value: Any, texts: dict[str, str]) -> Any:
    """Return a value in which equal texts are one object; frames are kept as they are."""
    if isinstance(value, str):
        return texts.setdefault(value, value)
    if isinstance(value, dict):
        items = {shared(key, texts): shared(one, texts) for key, one in value.items()}
        if "filename" not in value:
            return items
        value.update(items)
        return value
    return type(value)(shared(one, texts) for one in value) if isinstance(value, list | tuple) else value


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, nargs="*")
    sizes = parser.parse_args().ranks or [*BOTH, *ALONE]
    bin_folder = Path(sys.executable).parent
    print(f"{'ranks':>6} {'reader':<14} {'CPU s':>8} {'wall s':>8} {'MiB':>7}  ratio to ddpdoctor: CPU, memory")
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_dumps(folder, ranks)
            ours = run(sys.executable, "-m", "ddpdoctor", "analyze", name)
            print(f"{ranks:>6} {'ddpdoctor':<14} {ours.cpu_s:>8.1f} {ours.wall_s:>8.1f} {ours.mib:>7.0f}")
            if f"rank {LATE}" not in ours.said:
                raise SystemExit(ours.said)
            if ranks in BOTH and shutil.which("torchfrtrace", path=bin_folder):
                theirs = run(str(bin_folder / "torchfrtrace"), "--prefix", "nccl_trace_rank_", name)
                row = f"{ranks:>6} {'torchfrtrace':<14} {theirs.cpu_s:>8.1f} {theirs.wall_s:>8.1f} {theirs.mib:>7.0f}"
                print(f"{row}  {theirs.cpu_s / ours.cpu_s:.1f}, {theirs.mib / ours.mib:.1f}")


if __name__ == "__main__":
    main()
