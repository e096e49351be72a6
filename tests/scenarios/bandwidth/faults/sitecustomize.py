"""Puts a fault into torch.distributed of a rank, as a faulty plugin would: this folder stands on PYTHONPATH.

Which fault, and in which rank, say LATE_RANK, CROWDED_RANK, HELD_RANK and WRONG_RANK.
"""

import importlib.abc
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DELAY_S = 0.02
SIZE_BYTES = 2048
INDEX = 137
GREEDY = """
import os, sys
if os.geteuid() == 0:
    os.nice(-10)
while os.getppid() == int(sys.argv[1]):
    pass
"""


class _AfterImport(importlib.abc.MetaPathFinder):
    def __init__(self, put_in: Callable[[Any], None]) -> None:
        self._put_in = put_in

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - the protocol's
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            self._put_in(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def come_late(dist: Any) -> None:
    """Come 20 ms late to every barrier."""
    barrier = dist.barrier

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return barrier(*args, **kwargs)

    dist.barrier = late


def share_the_core(dist: Any) -> None:
    """Stay on one core with a greedy process there, once groups of ranks are made: pairs and nodes come then.

    The other process has precedence where this one may give it, and goes when the rank goes. Not from the start, since
    to import torch on a tenth of a core takes a minute.
    """
    new_group = dist.new_group

    def crowded(*args: Any, **kwargs: Any) -> Any:
        dist.new_group = new_group
        core = {max(os.sched_getaffinity(0))}
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), core)
        subprocess.Popen([sys.executable, "-S", "-c", GREEDY, str(os.getpid())])
        return new_group(*args, **kwargs)

    dist.new_group = crowded


def be_held_up(dist: Any) -> None:
    """Leave the pid in HELD_FILE in each all-reduce of 2 KiB, and wait until it is taken away, or sleep without end."""
    all_reduce, file = dist.all_reduce, Path(os.environ["HELD_FILE"])

    def held(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes == SIZE_BYTES:
            file.with_suffix(".new").write_text(str(os.getpid()))
            file.with_suffix(".new").rename(file)
            while os.environ["HELD_HOW"] == "sleep":
                time.sleep(60)  # HELD
            while file.exists():
                time.sleep(0.01)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = held


def alter(dist: Any) -> None:
    """Add 1 to one element of each all-reduce of 2 KiB."""
    all_reduce = dist.all_reduce

    def wrong(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if tensor.nbytes == SIZE_BYTES:
            if work is not None:
                work.wait()
            tensor.view(-1)[INDEX] += 1
        return work

    dist.all_reduce = wrong


for variable, fault in (("LATE", come_late), ("CROWDED", share_the_core), ("HELD", be_held_up), ("WRONG", alter)):
    if os.environ.get("RANK") == os.environ.get(f"{variable}_RANK", "none"):
        sys.meta_path.insert(0, _AfterImport(fault))
