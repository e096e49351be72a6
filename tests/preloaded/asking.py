"""Asks a server for a new Python, in place of fork and exec."""

import array
import contextlib
import inspect
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ_WHILE_LOADED = (
    "PYTHON", "TORCH", "PYTORCH", "LD_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LC_", "LANG",
)  # fmt: skip
"""Variables that Python, torch or a library reads once."""
_READ_LATER = frozenset({
    "PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_AGENT_LOG", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_DIST_INIT_BARRIER", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    "TORCH_EXTENSIONS_DIR", "TORCH_CPP_LOG_LEVEL", "PYTHON",
})  # fmt: skip
HOST = "DDPDOCTOR_TESTS_HOST"
"""The process id of one on the host where the new Python is to run, see ``tests/scenarios/hosts.py``."""
_execute_child: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_parameters = inspect.signature(_execute_child)


class Server:
    """A process that forks into what it is asked for."""

    def __init__(self, requests: socket.socket, environment: dict[str, str]) -> None:
        self._requests, self._environment = requests, environment
        self.is_lent = False

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Have subprocess in this process start Pythons through this server, where it can."""

        def execute(process: Any, *arguments: Any) -> None:
            if not self.start(process, arguments):
                _execute_child(process, *arguments)

        subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]
        self.is_lent = True
        try:
            yield
        finally:
            self.is_lent = False
            subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]

    def start(self, process: Any, arguments: tuple[Any, ...]) -> bool:
        """Start what Popen was asked to; False where that takes an exec."""
        asked = _parameters.bind(process, *arguments).arguments
        environment = dict(os.environ if asked["env"] is None else asked["env"])
        host = environment.pop(HOST, "")
        words = [os.fspath(word) for word in asked["args"]] if isinstance(asked["args"], (list, tuple)) else []
        special = any(asked[name] for name in ("shell", "executable", "pass_fds", "uid", "gid"))
        special = special or asked.get("process_group", -1) != -1
        if special or not self.can_become(words, environment):
            assert not host, "only what is forked can be started on a host by HOST"
            return False
        streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        streams = [own if stream == -1 else stream for own, stream in enumerate(streams)]
        reader, writer = os.pipe()
        request = {
            "words": words, "environment": environment, "folder": str(Path(asked["cwd"] or os.curdir).absolute()),
            "session": asked["start_new_session"], "host": host,
        }  # fmt: skip
        try:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [*streams, reader]))
            self._requests.sendmsg([pickle.dumps(request)], [rights])
            pid = int(self._requests.recv(32))
        except (OSError, ValueError):
            os.close(writer)
            return False
        finally:
            os.close(reader)
        process.pid, process._child_created = pid, True
        if asked["preexec_fn"]:
            _as(pid, asked["preexec_fn"])
        os.write(writer, b"go")
        os.close(writer)
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(asked[end] for end in ends))
        return True

    def can_become(self, words: list[str], environment: dict[str, str]) -> bool:
        """Return whether a new Python would be the same as a fork of the server."""
        if words[:1] != [sys.executable]:
            return False
        program = words[2:] if words[1:2] == ["-u"] else words[1:]
        is_script = program[:1] != [] and program[0].endswith(".py") and Path(program[0]).is_file()
        if not is_script and (program[:1] != ["-m"] or len(program) < 2 or program[1].startswith("multiprocessing")):
            return False
        changed = {name for name, value in environment.items() if self._environment.get(name) != value}
        changed |= self._environment.keys() - environment.keys()
        places = [Path(place) for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place]
        if any((place / "torch").exists() or (place / "torch.py").exists() for place in places):
            return False
        return not any(name.startswith(_READ_WHILE_LOADED) for name in changed - _READ_LATER)


def _as(pid: int, function: Any) -> None:
    """Run what is meant for a new process before its program, for one that holds still meanwhile."""
    own = os.getpid
    os.getpid = lambda: pid
    try:
        function()
    finally:
        os.getpid = own
