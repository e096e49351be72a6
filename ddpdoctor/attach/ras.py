"""Asks NCCL's RAS, which answers for all ranks of a job at any of its nodes, also while the job hangs.

The protocol is that of ``ncclras`` (src/ras/client.cc): lines over TCP. JSON since NCCL 2.28.7, text since 2.24.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.attach.process import inside_network, shares_network
from ddpdoctor.model.attached import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpdoctor.attach.find import FoundJob
    from ddpdoctor.attach.process import HostView

SOURCE = "ras"
PORT = 28028
LIMIT_S = 4.0
"""Our choice for a whole answer. RAS itself waits for ranks that do not answer, as long as TIMEOUT says."""
RANKS_TIMEOUT_S = 2
MOST_BYTES, MOST_LINE_BYTES = 64 * 2**20, 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class RasAnswer:
    """What RAS said."""

    text: bytes
    is_json: bool


def find_ras(job: FoundJob, host: HostView) -> tuple[str, int] | Refusal | None:
    """Return where a rank of this job serves RAS, None if none does, or why it cannot be reached."""
    for rank in job.ranks:
        env = job.environments[rank.pid]
        port = _port(env)
        if port is None or not host.listens(rank.pid, port):
            continue
        if shares_network(rank.pid):
            return _host(env), port
        reason = "NCCL's RAS listens in another network namespace"
        return Refusal(source=SOURCE, reason=reason, remedy=inside_network(rank.pid))
    return None


def ask_ras(host: str, port: int) -> RasAnswer | Refusal:
    """Return the whole report, as JSON if this NCCL knows it."""
    deadline = time.monotonic() + LIMIT_S
    try:
        with socket.create_connection((host, port), timeout=LIMIT_S) as made:
            lines = _Lines(made, deadline)
            greeting = lines.ask(b"CLIENT PROTOCOL 2\n")
            if not greeting.startswith(b"SERVER PROTOCOL"):
                return Refusal(source=SOURCE, reason=f"what listens on port {port} is not NCCL's RAS")
            lines.ask(b"TIMEOUT %d\n" % RANKS_TIMEOUT_S)
            is_json = lines.ask(b"SET FORMAT json\n").startswith(b"OK")
            return RasAnswer(text=lines.rest(b"VERBOSE STATUS\n"), is_json=is_json)
    except OSError as error:
        return Refusal(source=SOURCE, reason=f"NCCL's RAS on port {port} gave an incomplete answer: {error}")


class _Lines:
    """A conversation in lines, which ends at a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline = connection, deadline
        self._data = b""

    def ask(self, line: bytes) -> bytes:
        """Send a line and return the line of the answer."""
        self._connection.sendall(line)
        while b"\n" not in self._data:
            self._wait()
            piece = self._connection.recv(1 << 16)
            if not piece or len(self._data) > MOST_LINE_BYTES:
                raise ConnectionError("the other side closed the connection, or its line does not end")
            self._data += piece
        answer, _, self._data = self._data.partition(b"\n")
        return answer

    def rest(self, line: bytes) -> bytes:
        """Send a line and return all that comes until the other side closes."""
        self._connection.sendall(line)
        pieces = [self._data]
        size = 0
        while size <= MOST_BYTES:
            self._wait()
            piece = self._connection.recv(1 << 16)
            if not piece:
                return b"".join(pieces)
            size += len(piece)
            pieces.append(piece)
        raise OSError("the answer is too long")

    def _wait(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it took more than {LIMIT_S:.0f} s")
        self._connection.settimeout(left_s)


def _port(env: Mapping[str, str]) -> int | None:
    if env.get("NCCL_RAS_ENABLE") == "0":
        return None
    port = _address(env)[-1]
    return int(port) if port.isdecimal() else PORT


def _host(env: Mapping[str, str]) -> str:
    host = _address(env)[0].strip("[]")
    return host if host and len(_address(env)) > 1 else "localhost"


def _address(env: Mapping[str, str]) -> Sequence[str]:
    return env.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rsplit(":", 1)
