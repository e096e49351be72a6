"""Lets one rank come 20 ms late to every barrier: this folder stands on PYTHONPATH, as a faulty plugin would.

LATE_RANK says which rank.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

DELAY_S = 0.02


def put_in(dist):
    barrier = dist.barrier

    def late(*args, **kwargs):
        time.sleep(DELAY_S)
        return barrier(*args, **kwargs)

    dist.barrier = late


class AfterImport(importlib.abc.MetaPathFinder):
    """Puts the fault in once torch.distributed has been imported."""

    def find_spec(self, name, path, target=None):  # noqa: ARG002 - the signature that Python calls
        if name != "torch.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            put_in(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RANK") == os.environ.get("LATE_RANK", "none"):
    sys.meta_path.insert(0, AfterImport())
