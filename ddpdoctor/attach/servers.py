"""The servers in a running job: torch's in the ranks, NCCL's RAS, the store, the flight recorder's pipe."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ddpdoctor.attach.find import named_file
from ddpdoctor.attach.process import inside_network, shares_network
from ddpdoctor.collect.connections import read_sockets
from ddpdoctor.collect.proc import read_text
from ddpdoctor.exchange.job_store import open_store_reader
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.attached import Refusal, StoreLook
from ddpdoctor.recorder.storage.files import parse_json
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.attach.find import FoundJob
    from ddpdoctor.attach.process import HostView
    from ddpdoctor.model.attached import SeenRank

PROC = Path("/proc")
SERVER = "worker server"
SERVER_LIMIT_S = 1.5  # our choice: an answer takes milliseconds, except that of a handler that waits for a held GIL
WHOLE_LIMIT_S = 15.0  # Our choice for a whole answer, however it drips in. A trace of tens of MiB takes seconds.
MOST_BYTES = 64 * 2**20
# Handlers that return the flight recorder without the GIL: since torch 2.13, and before it.
TRACES = ("fr_trace_json", "dump_nccl_trace_json")
STACKS = "dump_traceback"
SOCKET_VARIABLE = "TORCH_WORKER_SERVER_SOCKET"
RAS = "ras"
PORT = 28028
# Our choice for a whole answer. RAS itself waits for ranks that do not answer, as long as TIMEOUT says.
RAS_LIMIT_S = 4.0
RANKS_TIMEOUT_S = 2
MOST_RAS_BYTES, MOST_LINE_BYTES = 64 * 2**20, 2**16
STORE = "store"
STORE_LIMIT_S = 1.0  # our choice for connecting, with the name's lookup: the store of a running job listens already
ALL_LIMIT_S = 60.0  # our choice for all questions to a store together: it answers each in microseconds
MOST_KEYS, MOST_VALUES, MOST_RANKS = 20_000, 4096, 4096
DEBUG_SERVERS = "debug_server/rank"
# The ends of keys that TORCH_NCCL_DESYNC_DEBUG writes: the number and name of a rank's last collective.
_TRACES = ("_trace_start", "_trace_end")
RECORDER = "flight recorder"
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
# The prefix of a dump's path; the rank is appended.
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCHCOMM_FR_DUMP_TEMP_FILE")
OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - torch's own, up to 2.6
NEW_DEFAULT = "torch/comm_lib_trace_rank_"  # below XDG_CACHE_HOME or ~/.cache, since torch 2.7


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a server said; None: it was not asked, does not know that, or did not answer."""

    trace: bytes | None = None
    stacks: bytes | None = None
    refused: Refusal | None = None


def find_server(
    rank: SeenRank, env: Mapping[str, str], addresses: Mapping[str, str], host: HostView
) -> str | int | None:
    """Return where the server of a rank listens: a path, or a port of this machine. ``addresses`` are the store's."""
    if path := env.get(SOCKET_VARIABLE):
        # Whether it is bound to a socket of this process: ranks may inherit one path from their launcher.
        inodes = read_sockets(rank.pid) or frozenset()
        table = read_text(PROC / str(rank.pid) / "net/unix").splitlines()[1:]
        bound = (line.split(maxsplit=7) for line in table if line.endswith(path))
        if any(len(row) == 8 and row[7] == path and int(row[6]) in inodes for row in bound):
            return str(named_file(rank.pid, path))
    try:
        port = urlsplit(addresses.get(f"debug_server/rank{rank.rank}", "")).port
    except ValueError:  # no address
        return None
    if port and shares_network(rank.pid) and host.listens(rank.pid, port):
        return port
    return None


def ask_server(server: str | int, *, want_stacks: bool) -> Answers:
    """Return the trace of the flight recorder, and the stacks if ``want_stacks``, which wait for the GIL."""
    try:
        handlers = parse_json(_request(server, "GET", ""))
        name = next((handler for handler in TRACES if handler in handlers), None)
        trace = _request(server, "POST", name) if name else None
    except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
        return Answers(refused=Refusal(source=SERVER, reason=f"torch's server in the rank did not answer: {error}"))
    if not want_stacks or STACKS not in handlers:
        return Answers(trace=trace)
    try:
        return Answers(trace=trace, stacks=_request(server, "POST", STACKS))
    except (OSError, http.client.HTTPException):
        reason = f"no stacks within {SERVER_LIMIT_S} s: a thread of the rank holds the GIL"
        return Answers(trace=trace, refused=Refusal(source=SERVER, reason=reason))


def _request(server: str | int, method: str, handler: str) -> bytes:
    host, port = ("localhost", None) if isinstance(server, str) else ("127.0.0.1", server)
    made = http.client.HTTPConnection(host, port, timeout=SERVER_LIMIT_S)
    over = threading.Timer(WHOLE_LIMIT_S, lambda: made.sock and made.sock.shutdown(socket.SHUT_RDWR))
    over.daemon = True
    over.start()
    try:
        if isinstance(server, str):
            made.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.sock.settimeout(SERVER_LIMIT_S)
            made.sock.connect(server)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RasAnswer:
    """What RAS said."""

    text: bytes
    is_json: bool


def find_ras(job: FoundJob, host: HostView) -> tuple[str, int] | Refusal | None:
    """Return where a rank of this job serves RAS, None if none does, or why it cannot be reached."""
    for rank in job.ranks:
        env = job.environments[rank.pid]
        if env.get("NCCL_RAS_ENABLE") == "0":
            continue
        named, _, last = env.get("NCCL_RAS_ADDR", f"localhost:{PORT}").rpartition(":")
        port = int(last) if last.isdecimal() else PORT
        if not host.listens(rank.pid, port):
            continue
        if shares_network(rank.pid):
            return named.strip("[]") or "localhost", port
        reason = "NCCL's RAS listens in another network namespace"
        return Refusal(source=RAS, reason=reason, remedy=inside_network(rank.pid))
    return None


def ask_ras(host: str, port: int) -> RasAnswer | Refusal:
    """Return the whole report, as JSON if this NCCL knows it."""
    deadline = time.monotonic() + RAS_LIMIT_S
    try:
        with socket.create_connection((host, port), timeout=RAS_LIMIT_S) as made:
            greeting = _send_line(made, b"CLIENT PROTOCOL 2\n", deadline)
            if not greeting.startswith(b"SERVER PROTOCOL"):
                return Refusal(source=RAS, reason=f"the server on port {port} is not NCCL's RAS")
            _send_line(made, b"TIMEOUT %d\n" % RANKS_TIMEOUT_S, deadline)
            is_json = _send_line(made, b"SET FORMAT json\n", deadline).startswith(b"OK")
            return RasAnswer(text=_send_line(made, b"VERBOSE STATUS\n", deadline, to_the_end=True), is_json=is_json)
    except OSError as error:
        return Refusal(source=RAS, reason=f"NCCL's RAS on port {port} gave an incomplete answer: {error}")


def _send_line(connection: socket.socket, line: bytes, deadline: float, *, to_the_end: bool = False) -> bytes:
    """Send a line; return the line of the answer, or all that comes until the other side closes."""
    connection.sendall(line)
    data = bytearray()
    while to_the_end or b"\n" not in data:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"it took more than {RAS_LIMIT_S:.0f} s")
        connection.settimeout(left_s)
        piece = connection.recv(1 << 16)
        if to_the_end and not piece:
            break
        data += piece
        if to_the_end and len(data) > MOST_RAS_BYTES:
            raise OSError("the answer is too long")
        if not piece or (not to_the_end and len(data) > MOST_LINE_BYTES):
            raise ConnectionError("the other side closed the connection, or its line does not end")
    return bytes(data)


def read_store(job: FoundJob) -> StoreLook | Refusal | None:
    """Return what stands in the store, why it cannot be read, or None if no variable has its address."""
    host, port = job.identity.master_addr, job.identity.master_port
    if host is None or port is None:
        return None
    if job.ranks and not any(shares_network(rank.pid) for rank in job.ranks):
        reason = f"the ranks and the job's store at {host}:{port} are in another network namespace"
        return Refusal(source=STORE, reason=reason, remedy=inside_network(job.ranks[0].pid))
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    try:
        deadline = time.monotonic() + ALL_LIMIT_S
        keys, asked = _read_keys(host, port, job.world_size or 0, deadline)
        with contextlib.closing(open_store_reader(host, port, STORE_LIMIT_S)) as reader:
            wanted = [key for key in keys if key.startswith(DEBUG_SERVERS) or key.endswith(_TRACES)][:MOST_VALUES]
            read = {key: reader.get(key) for key in wanted if _in_time(deadline)}
        values = {key: hide_in_text(value.decode(errors="replace")) for key, value in read.items() if value is not None}
    except StoreError as error:
        reason = hide_in_text(f"the job's store at {host}:{port} cannot be read: {error}")
        remedy = "Run ddpdoctor attach on the machine, and in the container, of rank 0."
        return Refusal(source=STORE, reason=reason, remedy=remedy)
    return StoreLook(
        host=socket.gethostname(), wall_ns=wall_ns, monotonic_ns=monotonic_ns, job=job.identity,
        address=f"{host}:{port}", keys=tuple(hide_in_text(key) for key in keys[:MOST_KEYS]),
        complete=not asked and len(keys) <= MOST_KEYS, asked=asked, values=values,
    )  # fmt: skip


def _read_keys(host: str, port: int, world_size: int, deadline: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the keys, and those that were asked for if an older store cannot list them."""
    try:
        with contextlib.closing(open_store_reader(host, port, STORE_LIMIT_S)) as reader:
            return reader.list_keys(), ()
    except StoreError:
        # An older torch. If nothing can be read at all, this fails again, with the reason.
        with contextlib.closing(open_store_reader(host, port, STORE_LIMIT_S)) as reader:
            of_rank = ("default_pg/0//cpu//0/{}", DEBUG_SERVERS + "{}")
            ranks = range(min(world_size, MOST_RANKS))
            asked = ("default_pg/0//cuda//0", *(key.format(rank) for rank in ranks for key in of_rank))
            return tuple(key for key in asked if _in_time(deadline) and reader.has(key)), asked


def _in_time(deadline: float) -> bool:
    if time.monotonic() > deadline:
        raise StoreError(f"its answers took more than {ALL_LIMIT_S:.0f} s")
    return True


def ask_for_dump(rank: SeenRank, env: Mapping[str, str]) -> Refusal | None:
    """Write a byte into the rank's pipe, if it has one that it reads. Never waits."""
    stem = env.get(PIPE)
    if not stem or rank.rank is None:
        return None
    path = named_file(rank.pid, f"{stem}{rank.rank}.pipe")
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        reason = "no process reads" if error.errno == errno.ENXIO else f"{error.strerror or error}:"
        return Refusal(source=RECORDER, reason=f"{reason} {stem}{rank.rank}.pipe, the pipe that {PIPE} names")
    try:
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return Refusal(source=RECORDER, reason=f"{stem}{rank.rank}.pipe is not a pipe")
        os.write(pipe, b"1")
    except OSError as error:
        return Refusal(source=RECORDER, reason=f"{stem}{rank.rank}.pipe: {error.strerror or error}")
    finally:
        os.close(pipe)
    return None


def find_dump(rank: SeenRank, env: Mapping[str, str], started_ns: int) -> Path | None:
    """Return the newest dump that this process has written since it started, or None."""
    if rank.rank is None:
        return None
    named = [env[name] for name in PREFIXES if env.get(name)]
    cache = env.get("XDG_CACHE_HOME") or f"{env.get('HOME', '/root')}/.cache"
    found: dict[Path, int] = {}
    for prefix in named or (OLD_DEFAULT, f"{cache}/{NEW_DEFAULT}"):
        path = named_file(rank.pid, f"{prefix}{rank.rank}")
        with contextlib.suppress(OSError):
            state = path.lstat()
            if stat.S_ISREG(state.st_mode) and state.st_mtime_ns >= started_ns:
                found[path] = state.st_mtime_ns
    return max(found, key=lambda path: found[path], default=None)
