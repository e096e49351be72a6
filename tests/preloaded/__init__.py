"""Starts Pythons that have torch loaded already: a fork of a server that has, in place of seconds of imports.

What a test starts is a child of the test's process as any other, and so is what it starts: pid, parent, group, streams,
environment, status, start-up hooks and the order of imports are those of a new Python. What is not started in a simple
way, or with settings that torch reads while it is loaded, is started as ever.
"""

import atexit
import contextlib
import marshal
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from tests.preloaded.asking import Server

HERE = Path(__file__).parent
PADDING = "x" * 96 * 1024
"""Room for the environment of what the server becomes, which the kernel shows where the server's own was."""
COLD_VARIABLE = "DDPDOCTOR_TESTS_COLD"
"""Set, everything is started as ever: to compare."""

_servers: dict[int, Server] = {}


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Have subprocess start Pythons through the server of this process, which is started when it is first wanted."""
    if sys.platform != "linux" or COLD_VARIABLE in os.environ:
        yield
        return
    if os.getpid() not in _servers:
        _servers[os.getpid()] = _start_server()
    with _servers[os.getpid()].lent():
        yield


def can_fork(words: list[str], environment: dict[str, str]) -> bool:
    """Return whether a server is lent now, and can fork into this command."""
    server = _servers.get(os.getpid())
    return server is not None and server.is_lent and server.can_become(words, environment)


def _start_server() -> Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    drop = ("PYTHONPATH", "PYTEST_", "DDPDOCTOR_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "server.pyc"
        _compile(program)
        process = subprocess.Popen(
            [sys.executable, str(program), str(theirs.fileno()), PADDING[:8192]],
            env={**environment, "PADDING": PADDING}, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        ready = ours.recv(16)
    assert ready == b"ready", "the server of Pythons with torch has not started"
    atexit.register(process.kill)
    return Server(ours, environment)


def _compile(program: Path) -> None:
    """Write the server with a file name for its frames that nobody takes for the user's, as those of `python -m`."""
    code = compile((HERE / "server.py").read_text(), "<frozen runpy>", "exec")
    program.write_bytes(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
