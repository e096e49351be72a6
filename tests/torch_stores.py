"""Stores of torch's, each served by a process of its own, as torchrun's agent does."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import forking


@contextmanager
def serve_torch_store(backend: str = "libuv") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve a store by one of torch's two servers, "libuv" or "threads"; yields the process and its port."""
    process = forking.start("-m", __name__, backend, cwd=Path(__file__).parents[1])
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def serve(backend: str) -> None:
    """Serve until stdin ends."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=backend == "libuv")
    store.set("the launcher's", "own")
    print(store.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
