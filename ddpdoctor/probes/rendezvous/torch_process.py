"""The caller's side of the process with torch (``start``). Calls have time limits, and a hung call is abandoned."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.bounded import safe_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

PROGRAM = "ddpdoctor.probes.rendezvous.start"
IMPORT_LIMIT_S = 120.0
"""Our choice: on a busy cluster, a cold import from a network file system takes a minute."""
CALL_LIMIT_S = 10.0
"""Our choice: a store answers within milliseconds."""
_NOT_FOR_IT = ("DDPDOCTOR_RUN", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that load the recorder of `wrap`, or change how torch creates a store."""


class TorchError(Exception):
    """torch's error, or that it did not answer in time. The message is a phrase."""


class NoTorch(TorchError):  # noqa: N818 - says what it is
    """torch cannot be imported."""


class TorchProcess:
    """A context manager. The process starts when it is created, and is killed on exit."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start the process in this environment. Raises ``OSError``."""
        kept = {name: value for name, value in env.items() if name not in _NOT_FOR_IT}
        self._process = subprocess.Popen(
            [sys.executable, *safe_flags(), "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Peers that leave are not errors here.
            env=kept | {"TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._import_error: str | None = None
        self._imported = threading.Event()
        threading.Thread(target=self._listen, name="ddpdoctor-torch", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def is_ready(self) -> bool:
        """Whether torch has been imported by now."""
        return self._imported.is_set() and self._import_error is None

    def missing(self) -> str:
        """Wait for the import of torch, and return why it failed, or "" if it succeeded."""
        if not self._imported.wait(IMPORT_LIMIT_S):
            return f"torch was not imported within {IMPORT_LIMIT_S:g} s"
        return self._import_error or ""

    def serve(self, port: int) -> None:
        """Serve a torch store on all addresses. Raises ``TorchError``."""
        self._ask("serve", CALL_LIMIT_S + 2, port=port)

    def join(self, host: str, port: int, limit_s: float) -> None:
        """Join a torch store. Raises ``TorchError``, also if something else answers."""
        self._ask("join", limit_s + 2, host=host, port=port, limit_s=limit_s)

    def start(self, limit_s: float, **settings: Any) -> dict[str, Any]:
        """Make a real start (``Trial.run``). This works once. Raises ``TorchError``."""
        found: dict[str, Any] = self._ask("start", limit_s + 5, limit_s=limit_s, **settings)
        return found

    def _ask(self, what: str, within_s: float, **arguments: Any) -> Any:
        """Return the answer to one request. Raises ``TorchError``, also if no answer comes in time."""
        missing = self.missing()
        if missing:
            raise NoTorch(missing)
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        try:
            self._send(what, arguments, answers)
            answer = answers.get(timeout=within_s)
        except OSError:
            raise TorchError("the process with torch has ended") from None
        except queue.Empty:
            raise TorchError(f"no answer within {within_s:.0f} s") from None
        if answer["error"] is not None:
            raise TorchError(str(answer["error"]))
        return answer["value"]

    def _send(self, what: str, arguments: dict[str, Any], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._number += 1
            self._waiting[self._number] = answers
            self._process.stdin.write(json.dumps({"id": self._number, "do": what, **arguments}) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["id"] == 0:
                self._import_error = answer["error"]
                self._imported.set()
            else:
                self._waiting.pop(answer["id"]).put(answer)
        self._end()

    def _end(self) -> None:
        """Fail all waiting requests, because the process has ended."""
        how = f"the process with torch ended with status {self._process.wait()}"
        if not self._imported.is_set():
            self._import_error = how
            self._imported.set()
        for answers in list(self._waiting.values()):
            answers.put({"error": how})
