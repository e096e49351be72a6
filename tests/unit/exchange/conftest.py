"""A store of torch's in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

AGENT = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
store.set("the launcher's", "own")
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def backend():
    """Which of torch's two servers of a store."""
    return "libuv"


@pytest.fixture
def agent(backend):
    """A process that serves a store, as torchrun's agent does; yields it with its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, int(process.stdout.readline())
    process.kill()
    process.communicate()
