"""The process with torch (``start``), from outside: every call has a limit, and one that hangs is left to itself."""

from __future__ import annotations

import base64
import json
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

from ddpdoctor.exchange.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

PROGRAM = "ddpdoctor.probes.rendezvous.start"
IMPORT_LIMIT_S = 120.0
"""Ours: a cold import from a network file system takes a minute on a busy cluster."""
CALL_LIMIT_S = 10.0
"""Ours: a store answers in milliseconds."""
_NOT_FOR_IT = ("DDPDOCTOR_RUN", "TORCHELASTIC_USE_AGENT_STORE")
"""What loads the recorder of `wrap`, and what changes how torch makes a store."""


class TorchError(Exception):
    """What torch said, or that it said nothing in time: a phrase."""


class NoTorch(TorchError):  # noqa: N818 - says what it is
    """torch itself is not there."""


class TorchProcess:
    """A context. The process starts with it, and ends with it, whatever it is doing."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """Start it in this environment; raises OSError."""
        kept = {name: value for name, value in env.items() if name not in _NOT_FOR_IT}
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # Peers that leave are no errors here.
            env=kept | {"TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
        self._lock = threading.Lock()
        self._number = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._import_error: str | None = None
        self._imported = threading.Event()
        threading.Thread(target=self._listen, name="ddpdoctor-torch", daemon=True).start()

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    @property
    def is_ready(self) -> bool:
        """Whether torch has been imported by now."""
        return self._imported.is_set() and self._import_error is None

    def missing(self) -> str:
        """Return why torch is not there, once that is known; empty where it is."""
        if not self._imported.wait(IMPORT_LIMIT_S):
            return f"torch was not imported within {IMPORT_LIMIT_S:g} s"
        return self._import_error or ""

    def serve(self, port: int) -> None:
        """Serve a store of torch on all addresses; raises ``TorchError``."""
        self.ask("serve", CALL_LIMIT_S + 2, port=port)

    def join(self, host: str, port: int, limit_s: float) -> None:
        """Join a store of torch; raises ``TorchError``, also where what answers is none."""
        self.ask("join", limit_s + 2, host=host, port=port, limit_s=limit_s)

    def start(self, limit_s: float, **told: Any) -> dict[str, Any]:
        """Make a real start (``Trial.run``), once; raises ``TorchError``."""
        found: dict[str, Any] = self.ask("start", limit_s + 5, limit_s=limit_s, **told)
        return found

    def store(self) -> JoinedStore:
        """Return the store that was joined, for messages of ours."""
        return JoinedStore(self)

    def ask(self, what: str, within_s: float, **arguments: Any) -> Any:
        """Return what the process answers to one request; raises ``TorchError``, also where it does not in time."""
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
        """Answer whoever waits: nothing more will come."""
        how = f"the process with torch ended with status {self._process.wait()}"
        if not self._imported.is_set():
            self._import_error = how
            self._imported.set()
        for answers in list(self._waiting.values()):
            answers.put({"error": how})


class JoinedStore:
    """A ``Store`` over the store that the process has joined."""

    def __init__(self, process: TorchProcess) -> None:
        """Take the process, which the store does not end."""
        self._process = process

    def set(self, key: str, value: bytes) -> None:
        """Leave a value."""
        self._ask("set", key=key, value=base64.b64encode(value).decode())

    def look(self, key: str) -> bytes | None:
        """Return a value, or None where there is none yet."""
        found = self._ask("look", key=key)
        return None if found is None else base64.b64decode(found)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""
        return int(self._ask("add", key=key, amount=amount))

    def forget(self, key: str) -> None:
        """Remove a value."""
        self._ask("forget", key=key)

    def close(self) -> None:
        """Leave it to the process."""

    def _ask(self, what: str, **arguments: Any) -> Any:
        try:
            return self._process.ask(what, CALL_LIMIT_S, **arguments)
        except TorchError as error:
            raise StoreError(f"the job's store: {error}") from error
