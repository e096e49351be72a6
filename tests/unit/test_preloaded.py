"""A forked Python ends as a new one: with the same status, words and order of what is let go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import can_fork, preloaded

LET_GO = """
import atexit, weakref
class Held:
    def __del__(self): print("let go")
held = Held()
weakref.finalize(held, print, "finalized")
atexit.register(print, "bye")
"""
PROGRAMS = {
    "ends": "print('x')",
    "has a status": "import sys; print('x'); sys.exit(263)",
    "exits with words": "import sys; sys.exit('no')",
    "raises": "raise ValueError(3)",
    "is interrupted": "raise KeyboardInterrupt",
    "lets go": LET_GO,
    "closes its output": "import sys; print('x'); sys.stdout.close()",
    "has a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
}


def end(program: Path, stdout: int, *, forked: bool) -> tuple[int, str | None, str]:
    command = [sys.executable, str(program)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment["OMP_NUM_THREADS"] = "1"  # as in the server: torch reads it once
    assert can_fork(command, environment) is forked
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_forked_python_ends_as_a_new_one(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[what])
    cold = end(program, subprocess.PIPE, forked=False)
    with preloaded():
        assert end(program, subprocess.PIPE, forked=True) == cold


def test_its_status_says_that_output_was_lost(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('x')")
    with Path("/dev/full").open("w") as full:
        cold = end(program, full.fileno(), forked=False)
        with preloaded():
            forked = end(program, full.fileno(), forked=True)
    assert (forked[0], cold[0]) == (120, 120)


@pytest.mark.parametrize("level", ["INFO", "FATAL"])
def test_torch_logs_what_the_variable_says(level: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from torch.distributed import TCPStore; TCPStore('127.0.0.1', 0, 1, True)")
    with preloaded():
        command = [sys.executable, str(program)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": level}
        assert can_fork(command, environment)
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ("[c10d]" in done.stderr) is (level == "INFO"), done.stderr
