"""Binds one rank to one core with a greedy process there, once groups of ranks are made: pairs and nodes come then.

CROWDED_RANK says which rank. The other process has precedence (nice -10) where this one may give it, and goes when the
rank goes. Not from the start, since to import torch on a tenth of a core takes a minute.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.scenarios.bandwidth.after_import import put_in_rank

GREEDY = """
import os, sys
if os.geteuid() == 0:
    os.nice(-10)
while os.getppid() == int(sys.argv[1]):
    pass
"""


def crowd():
    core = {max(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), core)
    subprocess.Popen([sys.executable, "-S", "-c", GREEDY, str(os.getpid())])


def put_in(dist):
    new_group = dist.new_group

    def crowded(*args, **kwargs):
        dist.new_group = new_group
        crowd()
        return new_group(*args, **kwargs)

    dist.new_group = crowded


put_in_rank("CROWDED_RANK", put_in)
