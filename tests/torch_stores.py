"""Stores of torch's, each served by a process of its own, as torchrun's agent does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.forking import Forked

SERVE = """
import os, sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
store.set("the launcher's", "own")
print(store.port, flush=True)
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(1)
"""


@contextmanager
def serve_torch_store(backend: str = "libuv") -> Iterator[tuple[Forked, int]]:
    """Serve a store by one of torch's two servers, "libuv" or "threads"; yields the process and its port."""
    process = Forked("-c", SERVE, backend)
    try:
        yield process, int(process.read_line())
    finally:
        process.kill()
        process.wait()
