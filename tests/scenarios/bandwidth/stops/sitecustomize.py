"""Holds one rank up in its first all-reduce of 2 KiB: this folder stands on PYTHONPATH, as a faulty plugin would.

HELD_RANK says which rank, and HELD_FILE where it leaves its pid once it stands there. HELD_HOW says what it does then:
"sleep" without end, "raise", or "wait" until the file is taken away.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

SIZE_BYTES = 2048


def hold_up(how):
    file = Path(os.environ["HELD_FILE"])
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file)
    if how == "raise":
        raise ValueError("the plugin does not know this tensor")  # RAISED
    while how == "sleep":
        time.sleep(60)  # HELD
    while file.exists():
        time.sleep(0.01)


def put_in(dist, how):
    all_reduce = dist.all_reduce

    def held(tensor, *args, **kwargs):
        if tensor.nbytes == SIZE_BYTES:
            hold_up(how)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = held


class AfterImport(importlib.abc.MetaPathFinder):
    """Puts the fault in once torch.distributed has been imported."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002 - the protocol's
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            put_in(module, os.environ["HELD_HOW"])

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANK") == os.environ.get("HELD_RANK", "none"):
    sys.meta_path.insert(0, AfterImport())
