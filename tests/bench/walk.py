"""How far a reader walks through the code for one answer: python -m tests.bench.walk; half a minute.

Three walks: from a saved run to its text (``ddpdoctor report RUN``, of a job of two ranks, without a report.json), from
a machine's fact to its finding (``ddpdoctor check-env shm``), and from the command line of ``ddpdoctor wrap`` to the
start of the launcher on one node. Counted are the files of ddpdoctor that are entered, the functions that are called,
and the jumps: how often the next call is of a function in another file. A loop makes the same jump many times, so the
different ones are counted too: each pair of functions once. What runs while a module is imported does not count.

Another commit is measured by its own files: ``PYTHONPATH=OTHER python tests/bench/walk.py``.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ddpdoctor

PACKAGE = str(Path(ddpdoctor.__file__).parent) + os.sep
JOB = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if dist.get_rank() == 1:
    raise ValueError("seeded")
dist.barrier()
"""
NO_FUNCTIONS = frozenset({"<module>", "<lambda>", "<listcomp>", "<genexpr>", "<setcomp>", "<dictcomp>"})


class Walk:
    """Follows calls of the package's functions in all threads."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take in one event of the interpreter's profiler."""
        code = frame.f_code
        if event != "call" or not _is_function(code) or any(map(_is_import, _callers(frame))):
            return
        self.calls.append(code)

    def figures(self) -> dict[str, int]:
        """Return how far it was."""
        pairs = itertools.pairwise(self.calls)
        jumps = [(one, other) for one, other in pairs if one.co_filename != other.co_filename]
        files = {code.co_filename for code in self.calls}
        return {
            "files": len(files), "functions": len(set(self.calls)), "jumps": len(jumps), "different": len(set(jumps))
        }  # fmt: skip


def _callers(frame: FrameType) -> Iterator[CodeType]:
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame.f_code


def _is_import(code: CodeType) -> bool:
    return code.co_name == "<module>" and code.co_filename.startswith(PACKAGE)


def _is_function(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and code.co_name not in NO_FUNCTIONS


class _EndOfWalk(subprocess.Popen[bytes]):
    """Stands for the start of the launcher."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        sys.setprofile(None)  # what follows tidies up
        raise SystemExit


def walk(*arguments: str) -> dict[str, int]:
    """Run a command of ddpdoctor in this process and follow it; what it says is thrown away."""
    from ddpdoctor.cli.app import main

    sys.argv = ["ddpdoctor", *arguments]
    taken = Walk()
    if arguments[0] == "wrap":
        subprocess.Popen = _EndOfWalk  # type: ignore[misc]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        threading.setprofile(taken)
        sys.setprofile(taken)
        with contextlib.suppress(SystemExit):
            main()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return taken.figures()


def walk_alone(*arguments: str) -> dict[str, int]:
    """Take a walk in a process of its own, where no other walk has filled a cache."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def record(folder: Path) -> Path:
    """Record a job of two ranks, of which one raises."""
    script, run = folder / "train.py", folder / "run"
    script.write_text(JOB)
    options = ("--quiet", "--report-dir", str(run), "--nproc-per-node=2")
    command = [sys.executable, "-m", "ddpdoctor", "wrap", *options, str(script)]
    subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=120)
    (run / "report.json").unlink()
    return run


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(walk(*sys.argv[1:])))
    else:
        with tempfile.TemporaryDirectory() as home:
            print("from a saved run to its text      ", walk_alone("report", str(record(Path(home)))))
            print("from a machine's fact to a finding", walk_alone("check-env", "shm"))
            script, run = Path(home) / "train.py", Path(home) / "started"
            script.write_text("")
            wrap = ("wrap", "--report-dir", str(run), "--nproc-per-node=1", str(script))
            print("from argv to the start of the ranks", walk_alone(*wrap))
