"""A separate process with torch: serves or joins a TCPStore, and makes a real start with Gloo.

Requests come as lines of JSON on stdin, ``{"id": 1, "do": "join", …}``. Each is answered by a line on stdout as soon as
it is done: ``{"id": 1, "value": …}`` or ``{"id": 1, "error": "…"}``. The first line has id 0 and says that torch was
imported, or why not. The process ends when its stdin ends.

A second process makes the start. It is forked right after the import of torch and before any thread exists, so that
torch is imported once, and a crash or hang there affects nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpdoctor.model.errors import first_line, typed_line
from ddpdoctor.probes.rendezvous.trial import StartProcess, fork_trial

if TYPE_CHECKING:
    from collections.abc import Callable

SERVE_LIMIT_S = 10.0


def main() -> None:
    """Import torch, and serve the requests on stdin until it ends."""
    answers = _Answers()
    try:
        import torch.distributed  # noqa: F401 - everything here needs it
    except Exception as error:  # noqa: BLE001 - an import may raise anything, and the caller needs to know
        answers.give(0, error=f"torch cannot be imported: {typed_line(error)}")
        return
    servant = _Servant(fork_trial())
    answers.give(0, value=True)
    for line in sys.stdin:
        request = json.loads(line)
        # One thread per request, so that a call that hangs in torch does not block the others.
        threading.Thread(target=_serve_one, args=(servant, request, answers), daemon=True).start()
    # Skip torch's destructors, which may wait for a peer that is gone.
    os._exit(0)


def _serve_one(servant: _Servant, request: dict[str, Any], answers: _Answers) -> None:
    number = request.pop("id")
    try:
        value = servant.calls[request.pop("do")](**request)
    except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
        answers.give(number, error=first_line(error))
    else:
        answers.give(number, value=value)


class _Answers:
    """Writes answers to the original stdout. Everything that torch prints goes to stderr."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def give(self, number: int, *, value: Any = None, error: str | None = None) -> None:
        with self._lock:
            self._stream.write(json.dumps({"id": number, "value": value, "error": error}) + "\n")


class _Servant:
    """The store that this process serves, and the requests that it accepts."""

    def __init__(self, trial: StartProcess) -> None:
        self._served: Any = None
        self.calls: dict[str, Callable[..., Any]] = {"serve": self.serve, "join": self.join, "start": trial.run}

    def serve(self, port: int) -> None:
        """Serve a store on all addresses, as node 0 of a job does."""
        from torch.distributed import TCPStore

        limit = timedelta(seconds=SERVE_LIMIT_S)
        self._served = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit)

    def join(self, host: str, port: int, limit_s: float) -> None:
        """Connect to a store as a rank does. The check fails if it is not one."""
        from torch.distributed import TCPStore

        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
        store.check(["ddpdoctor"])


if __name__ == "__main__":
    main()
