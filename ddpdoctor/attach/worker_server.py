"""Asks the server that torch runs in a rank, if the job has started one, over TCP or a Unix socket.

``torch.distributed.debug.start_debug_server`` puts the address into the job's store, and
``torch.distributed.elastic.control_plane.worker_main`` listens on TORCH_WORKER_SERVER_SOCKET. An address is used only
if the rank itself listens there: other servers of a job, such as Gloo's, must never get a request that is not theirs.
"""

from __future__ import annotations

import http.client
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ddpdoctor.attach.find import named_file
from ddpdoctor.attach.process import shares_network
from ddpdoctor.collect.connections import read_sockets
from ddpdoctor.collect.system import read_text
from ddpdoctor.model.attached import Refusal
from ddpdoctor.recorder.storage.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.attach.process import HostView
    from ddpdoctor.model.attached import SeenRank

PROC = Path("/proc")
SOURCE = "worker server"
LIMIT_S = 1.5
"""Our choice: an answer takes milliseconds, except that of a handler that waits for a held GIL."""
WHOLE_LIMIT_S = 15.0
"""Our choice for a whole answer, however it drips in. A trace of tens of MiB takes seconds."""
MOST_BYTES = 64 * 2**20
TRACES = ("fr_trace_json", "dump_nccl_trace_json")
"""Handlers that return the flight recorder without the GIL: since torch 2.13, and before it."""
STACKS = "dump_traceback"
SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerServer:
    """Where the server of a rank listens: a path, or a port of this machine."""

    path: str | None = None
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a server said; None: it was not asked, does not know that, or did not answer."""

    trace: bytes | None = None
    stacks: bytes | None = None
    refused: Refusal | None = None


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=LIMIT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(LIMIT_S)
        self.sock.connect(self._path)


def find_server(
    rank: SeenRank, env: Mapping[str, str], addresses: Mapping[str, str], host: HostView
) -> WorkerServer | None:
    """Return the server of a rank, or None; ``addresses`` are those in the store, by its key."""
    path = env.get(SOCKET_VARIABLE)
    if path and _listens_on(rank.pid, path):
        return WorkerServer(path=str(named_file(rank.pid, path)))
    try:
        port = urlsplit(addresses.get(f"debug_server/rank{rank.rank}", "")).port
    except ValueError:  # no address
        return None
    if port and shares_network(rank.pid) and host.listens(rank.pid, port):
        return WorkerServer(port=port)
    return None


def ask_server(server: WorkerServer, *, want_stacks: bool) -> Answers:
    """Return the trace of the flight recorder, and the stacks if ``want_stacks``, which wait for the GIL."""
    try:
        handlers = parse_json(_request(server, "GET", ""))
        name = next((one for one in TRACES if one in handlers), None)
        trace = _request(server, "POST", name) if name else None
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        return Answers(refused=Refusal(source=SOURCE, reason=f"torch's server in the rank gave no answer: {error}"))
    if not want_stacks or STACKS not in handlers:
        return Answers(trace=trace)
    try:
        return Answers(trace=trace, stacks=_request(server, "POST", STACKS))
    except (OSError, http.client.HTTPException):
        reason = f"no stacks within {LIMIT_S} s: a thread of the rank holds the GIL"
        return Answers(trace=trace, refused=Refusal(source=SOURCE, reason=reason))


def _request(server: WorkerServer, method: str, handler: str) -> bytes:
    made = (
        _UnixConnection(server.path)
        if server.path
        else http.client.HTTPConnection("127.0.0.1", server.port, timeout=LIMIT_S)
    )
    over = threading.Timer(WHOLE_LIMIT_S, lambda: made.sock and made.sock.shutdown(socket.SHUT_RDWR))
    over.daemon = True
    over.start()
    try:
        made.request(method, f"/handler/{handler}")
        response = made.getresponse()
        body = response.read(MOST_BYTES)
    finally:
        over.cancel()
        made.close()
    if response.status != http.client.OK:
        raise OSError(f"status {response.status}")
    if response.length:  # what is left of the announced length
        raise OSError("the answer was cut short, or is too long")
    return body


def _listens_on(pid: int, path: str) -> bool:
    """Return whether a socket of this process is bound to a path: ranks may inherit one path from their launcher."""
    inodes = read_sockets(pid) or frozenset()
    table = read_text(PROC / str(pid) / "net/unix").splitlines()[1:]
    bound = (line.split(maxsplit=7) for line in table if line.endswith(path))
    return any(len(row) == 8 and row[7] == path and int(row[6]) in inodes for row in bound)
