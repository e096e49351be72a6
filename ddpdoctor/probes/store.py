"""Probes the store's address, from here and in a process with torch; both sides of it are here.

Requests are lines of JSON, ``{"id": 1, "do": "join", …}``, and so are answers, as soon as each is there: ``{"id": 1,
"value": …}`` or ``{"id": 1, "error": "…"}``. The first has id 0 and says that torch was imported, or why not.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.proc import safe_flags
from ddpdoctor.exchange.reach import CONNECT_LIMIT_S, LOOKUP_LIMIT_S, contact_of, describe, look_up
from ddpdoctor.exchange.store import wait_until
from ddpdoctor.model.errors import first_line, typed_line
from ddpdoctor.model.launch import Connecting, Contact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

PROGRAM = "ddpdoctor.probes.store"
IMPORT_LIMIT_S = 120.0  # our choice: on a busy cluster, a cold import from a network file system takes a minute
CALL_LIMIT_S = 10.0  # our choice: a store answers within milliseconds
# Variables that load the recorder of `wrap`, or change how torch creates a store.
_NOT_FOR_IT = ("DDPDOCTOR_RUN", "TORCHELASTIC_USE_AGENT_STORE")
ELEMENTS = 2**18  # the size of the larger all-reduce: 1 MiB of float32, many packets on any path
PR_SET_PDEATHSIG = 1  # from prctl(2)
GRACE_S = 1.0  # our choice: how much longer than its own limit the process may take to report what happened
SERVE_LIMIT_S = 10.0
FIRST_AFTER_S = 1.0
EVERY_S = 2.0
# The most telling result first. A refused connection says little: nobody listens there yet, or any more.
_TELLING = (
    Contact.CONNECTED, Contact.NO_STORE, Contact.RESET, Contact.UNREACHABLE, Contact.NO_ANSWER, Contact.FAILED,
    Contact.REFUSED, Contact.UNRESOLVED,
)  # fmt: skip
JOIN_LIMIT_S = 5.0  # our choice: a store answers within milliseconds once its port does


class TorchError(Exception):
    """torch's error, or that it did not answer in time. The message is a phrase."""


class NoTorch(TorchError):  # noqa: N818 - says what it is
    """torch cannot be imported."""


class StoreWatch:
    """A context manager that probes the store from a thread, every ``EVERY_S`` seconds."""

    def __init__(self, host: str, port: int, torch: TorchProcess) -> None:
        self.attempts: tuple[Connecting, ...] = ()  # of the most telling probe
        self._host, self._port, self._torch = host, port, torch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._probe, name="ddpdoctor-store", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # without waiting for a probe that is under way

    def _probe(self) -> None:
        pause_s = FIRST_AFTER_S
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            found = knock(self._host, self._port, self._torch if self._torch.is_ready else None)
            if not self._ended.is_set():
                self.attempts = more_telling(self.attempts, found)


def more_telling(probe: tuple[Connecting, ...], other: tuple[Connecting, ...]) -> tuple[Connecting, ...]:
    """Return the more telling of two probes, of equal ones the later, which is ``other``."""

    def order(attempts: tuple[Connecting, ...]) -> int:
        return min((_TELLING.index(attempt.contact) for attempt in attempts), default=len(_TELLING))

    return min((other, probe), key=order)


def knock(host: str, port: int, torch: TorchProcess | None) -> tuple[Connecting, ...]:
    """Connect to every address of a name, and join the first that answers as a torch store."""
    # There is one attempt per address, in torch's order: IPv6 first (``prefer_ipv6`` in c10d's socket.h). Without
    # torch, anything that answers counts as a store.
    began = time.monotonic()
    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError as error:
        return (_attempt(host, None, port, Contact.UNRESOLVED, describe(error), began),)
    addresses.sort(key=lambda address: address[0] is not socket.AF_INET6)
    attempts = [_connect(host, family, address) for family, address in addresses]
    for place, attempt in enumerate(attempts):
        if torch is None or attempt.contact is not Contact.CONNECTED:
            continue
        began = time.monotonic()
        try:
            torch.join(attempt.address or host, attempt.port, JOIN_LIMIT_S)
            break
        except NoTorch:
            continue
        except TorchError as error:
            attempts[place] = _attempt(host, attempt.address, attempt.port, Contact.NO_STORE, str(error), began)
    return tuple(attempts)


def is_own(host: str, port: int) -> bool | None:
    """Return whether a name resolves to a non-loopback address of this host, or None if it does not resolve."""
    try:
        addresses = look_up(host, port, LOOKUP_LIMIT_S)
    except OSError:
        return None
    for family, address in addresses:
        if address[0].startswith("127.") or address[0] in {"::1", "0.0.0.0", "::"}:  # noqa: S104 - compared, not bound
            continue
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address[0], 0, *address[2:]))
            return True
    return False


def _connect(host: str, family: socket.AddressFamily, address: Any) -> Connecting:
    began = time.monotonic()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(CONNECT_LIMIT_S)
            connection.connect(address)
    except OSError as error:
        return _attempt(host, address[0], address[1], contact_of(error), describe(error), began)
    return _attempt(host, address[0], address[1], Contact.CONNECTED, "", began)


def _attempt(host: str, address: str | None, port: int, contact: Contact, error: str, began: float) -> Connecting:
    took_s = time.monotonic() - began
    return Connecting(host=host, address=address, port=port, contact=contact, error=error, duration_s=took_s)


class TorchProcess:
    """A context manager. The process starts when it is created, which may raise ``OSError``, and is killed on exit."""

    def __init__(self, env: Mapping[str, str]) -> None:
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
        """Make a real start (``StartProcess.run``). This works once. Raises ``TorchError``."""
        found: dict[str, Any] = self._ask("start", limit_s + 5, limit_s=limit_s, **settings)
        return found

    def _ask(self, what: str, within_s: float, **arguments: Any) -> Any:
        missing = self.missing()
        if missing:
            raise NoTorch(missing)
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._number += 1
                self._waiting[self._number] = answers
                self._process.stdin.write(json.dumps({"id": self._number, "do": what, **arguments}) + "\n")
                self._process.stdin.flush()
            answer = answers.get(timeout=within_s)
        except OSError:
            raise TorchError("the process with torch has ended") from None
        except queue.Empty:
            raise TorchError(f"no answer within {within_s:.0f} s") from None
        if answer["error"] is not None:
            raise TorchError(str(answer["error"]))
        return answer["value"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["id"] == 0:
                self._import_error = answer["error"]
                self._imported.set()
            else:
                self._waiting.pop(answer["id"]).put(answer)
        # The process has ended, so fail all waiting requests.
        how = f"the process with torch ended with status {self._process.wait()}"
        if not self._imported.is_set():
            self._import_error = how
            self._imported.set()
        for answers in list(self._waiting.values()):
            answers.put({"error": how})


def fork_trial() -> StartProcess:
    """Fork a process that makes a real start on command, before any thread exists, so that torch is imported once."""
    there, here = os.pipe(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(there[0])
        os.close(here[1])
        return StartProcess(pid, there[1], here[0])
    os.close(there[1])
    os.close(here[0])
    # The kernel kills this process when its parent ends, because it may hang in torch by then.
    with suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with os.fdopen(there[0]) as orders:
        line = orders.readline()
    if line:
        with os.fdopen(here[1], "w", buffering=1) as out:
            job, stage = json.loads(line), ""
            try:
                for stage in _stages(job):  # each is written before it begins
                    out.write(json.dumps({"stage": stage}) + "\n")
            except Exception as error:  # noqa: BLE001 - whatever torch raises is the result of the start
                end: dict[str, Any] = {"stage": stage, "error": first_line(error)}
            else:
                end = {"stage": stage, "done": True}
            out.write(json.dumps(end) + "\n")
    os._exit(0)


class StartProcess:
    """The parent's handle of the process that makes the start."""

    def __init__(self, pid: int, write_to: int, read_from: int) -> None:
        self._pid, self._write_to, self._read_from = pid, write_to, read_from

    def run(self, **job: Any) -> dict[str, Any]:
        """Make the start of ``job`` in its ``limit_s``; return ``stage``, ``error`` ("": success), ``duration_s``."""
        began = time.monotonic()
        os.write(self._write_to, json.dumps(job).encode() + b"\n")
        os.close(self._write_to)
        limit_s = float(job["limit_s"])
        # The stages that it reports until it hangs up or the time is up
        text, hung_up, deadline = b"", False, began + limit_s + GRACE_S
        while not hung_up and (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self._read_from], [], [], left_s)[0]:
                break
            part = os.read(self._read_from, 65536)
            hung_up = not part
            text += part
        stages = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
        last = stages[-1] if stages else {"stage": "store"}
        error = "" if last.get("done") else last.get("error") or None
        if error is None and hung_up:  # it is about to end
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            error = f"the process {how}"
        elif error is None:
            error = f"it did not end within {limit_s:g} s"
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return {"stage": last["stage"], "error": error, "duration_s": time.monotonic() - began}


def _stages(job: dict[str, Any]) -> Iterator[str]:
    import torch
    import torch.distributed as dist

    rank, world_size, limit = int(job["rank"]), int(job["world_size"]), timedelta(seconds=float(job["limit_s"]))
    yield "store"
    store = dist.TCPStore(job["host"], int(job["port"]), is_master=False, wait_for_workers=False, timeout=limit)
    joined = dist.PrefixStore(str(job["prefix"]), store)
    yield "init_process_group"
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=world_size, timeout=limit)
    yield "all_reduce"
    sums = []
    for elements in (1, ELEMENTS):
        values = torch.full((elements,), float(rank + 1))
        dist.all_reduce(values)
        sums.append((float(values.min()), float(values.max())))
    yield "result"
    wanted = world_size * (world_size + 1) / 2
    if any(total != (wanted, wanted) for total in sums):
        raise ValueError(f"the sum of 1 to {world_size} was {sums}")
    # Wait for the other ranks. A rank that leaves early breaks the connections of those that are not done.
    joined.add("left", 1)
    wait_until(lambda: int(joined.add("left", 0)) >= world_size, GRACE_S, 0.01)


def main() -> None:
    """Serve the requests on stdin. What torch prints goes to stderr."""
    lock, answers = threading.Lock(), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def give(number: int, *, value: Any = None, error: str | None = None) -> None:
        with lock:
            answers.write(json.dumps({"id": number, "value": value, "error": error}) + "\n")

    try:
        import torch.distributed as dist
    except Exception as error:  # noqa: BLE001 - an import may raise anything, and the caller needs to know
        give(0, error=f"torch cannot be imported: {typed_line(error)}")
        return
    served: list[Any] = []

    def serve(port: int) -> None:
        limit = timedelta(seconds=SERVE_LIMIT_S)
        served.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=limit))

    def join(host: str, port: int, limit_s: float) -> None:
        limit = timedelta(seconds=limit_s)
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        store.check(["ddpdoctor"])  # fails if it is none

    def answer(request: dict[str, Any]) -> None:
        number = request.pop("id")
        try:
            value = calls[request.pop("do")](**request)
        except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
            give(number, error=first_line(error))
        else:
            give(number, value=value)

    calls: dict[str, Callable[..., Any]] = {"serve": serve, "join": join, "start": fork_trial().run}
    give(0, value=True)
    for line in sys.stdin:
        # One thread per request, so that a call that hangs in torch does not block the others.
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    # Skip torch's destructors, which may wait for a peer that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
