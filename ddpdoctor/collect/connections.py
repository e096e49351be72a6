"""Reads the TCP connections of a process: over which addresses they go, and which do not get their data through.

/proc/PID/net/tcp has all connections of the network namespace; those of the process are found by the inodes of its
sockets. Data that were sent and are not acknowledged stay in the send queue, and the kernel counts how often it has
tried again: that tells a dead link from a peer that is merely slow to read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.collect.addresses import parse_end
from ddpdoctor.model.transport import Connection, Connections

PROC = Path("/proc")
ESTABLISHED = "01"
MOST_BYTES = 4 * 2**20
"""Of /proc/PID/net/tcp. Ours: some thirty thousand connections."""
MOST_STALLED = 16
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An established connection of some process."""

    inode: int
    local: str
    remote: str
    unsent_bytes: int
    retries: int


def read_rows(pid: int, proc: Path = PROC) -> tuple[Row, ...]:
    """Return the established connections in the network of a process."""
    found = []
    for table in ("tcp", "tcp6"):
        for line in _text(proc / str(pid) / "net" / table).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == ESTABLISHED:
                found.append(_row(fields))
    return tuple(row for row in found if row is not None)


def _row(fields: list[str]) -> Row | None:
    """Read "sl local remote state tx:rx timer:when retries uid timeout inode": queues and retries are hexadecimal."""
    local, remote = parse_end(fields[1]), parse_end(fields[2])
    if local is None or remote is None:
        return None
    queue = int(fields[4].partition(":")[0], 16)
    return Row(inode=int(fields[9]), local=local, remote=remote, unsent_bytes=queue, retries=int(fields[6], 16))


def read_connections(pid: int, rows: tuple[Row, ...], proc: Path = PROC) -> Connections | None:
    """Return what the connections of one process show; None where its open files may not be read."""
    inodes = _sockets(pid, proc)
    if inodes is None:
        return None
    own = [row for row in rows if row.inode in inodes]
    stalled = [
        Connection(local=row.local, remote=row.remote, unsent_bytes=row.unsent_bytes, retries=row.retries)
        for row in own
        if row.unsent_bytes and row.retries
    ]
    return Connections(
        by_address=tuple(Counter(row.local.rpartition(":")[0] for row in own).most_common()),
        ends=tuple(row.local for row in own),
        stalled=tuple(stalled[:MOST_STALLED]),
    )


def _sockets(pid: int, proc: Path) -> frozenset[int] | None:
    folder = proc / str(pid) / "fd"
    found = set()
    try:
        for name in os.listdir(folder):  # noqa: PTH208 - names alone are wanted
            match = _SOCKET.match(_link(folder / name))
            if match:
                found.add(int(match[1]))
    except OSError:
        return None
    return frozenset(found)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(MOST_BYTES)
    except OSError:
        return ""
