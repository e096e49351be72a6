"""Evidence is written without a byte that would count as the script's own I/O."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ddpdoctor.collect.proc import read_io
from ddpdoctor.recorder.stacks.sampler import Sampler, write_quietly
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_writing import Ring


def test_what_is_written_quietly_is_there_and_counts_as_no_progress(tmp_path: Path) -> None:
    data = b"evidence " * 100_000
    before = read_io(os.getpid())
    write_quietly(str(tmp_path / "file"), data)
    after = read_io(os.getpid())
    assert before is not None
    assert after is not None
    assert after.read + after.written - before.read - before.written < 10_000
    assert (tmp_path / "file").read_bytes() == data


READS_STACKS = """
import gc, os, random, sys, threading, time
from ddpdoctor.recorder import frames

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        if random.random() < 0.02:
            time.sleep(0)  # lets go of the GIL in the middle of a collection

def deep(n):
    if n:
        return deep(n - 1)
    Cycle()

def read(main):
    looks, until = 0, time.monotonic() + 15
    while looks < 150_000 and time.monotonic() < until:
        looks += 1
        for code, line in frames.of_thread(main):
            assert code.co_name and line >= 0
    os._exit(0 if looks > 100 else 1)

sys.setswitchinterval(1e-5)
threading.Thread(target=read, args=(threading.get_ident(),), daemon=True).start()
while True:
    deep(random.randrange(2, 40))
"""


def test_stacks_of_a_thread_that_runs_are_read_without_harm() -> None:
    """With ``f_back``, frame by frame, this died of SIGSEGV within seconds on CPython 3.11."""
    ran = subprocess.run([sys.executable, "-c", READS_STACKS], check=False, capture_output=True, text=True, timeout=200)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_an_import_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Ring(str(tmp_path), ring_layout.ROLE_RANK, ring_layout.RANK_SHAPE, os.getpid(), 1)
    sampler = Sampler(1.0)
    sampler.sample_imports(ring)
    before = ring.get("new_functions")
    sampler.sample_imports(ring)
    assert ring.get("new_functions") == before
    monkeypatch.setitem(sys.modules, "a_module_of_the_test", types.ModuleType("a_module_of_the_test"))
    sampler.sample_imports(ring)
    assert ring.get("new_functions") == before + 1


ASKED = """
import os
os.mkdir(os.environ["DDPDOCTOR_RUN"] + "/evidence")
from ddpdoctor.recorder import state
from ddpdoctor.recorder.stacks import sampler
from ddpdoctor.recorder.storage import ring_layout
state.here.is_rank = True
one = sampler.Sampler(0.1)
state.queries["groups"] = lambda: os._exit(7)  # as a query that never comes back
one.answer(1)
"""


def test_both_looks_are_on_disk_before_torch_is_asked(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], env={"DDPDOCTOR_RUN": str(tmp_path)}, check=False)
    (answer,) = (json.loads(path.read_text()) for path in (tmp_path / "evidence").glob("*.json"))
    assert done.returncode == 7
    assert len(answer["looks"]) == 2
    assert "complete" not in answer


def test_torch_is_not_asked_in_a_child_of_a_rank(tmp_path: Path) -> None:
    program = ASKED.replace("is_rank", "is_child")
    subprocess.run([sys.executable, "-c", program], env={"DDPDOCTOR_RUN": str(tmp_path)}, check=True)
    (answer,) = (json.loads(path.read_text()) for path in (tmp_path / "evidence").glob("*.json"))
    assert answer["complete"] == 1
