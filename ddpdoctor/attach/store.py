"""Reads the job's store: which ranks came to init_process_group, and where debug servers listen. It never writes."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpdoctor.attach.process import inside_network, shares_network
from ddpdoctor.exchange.job_store import open_store_reader
from ddpdoctor.exchange.store import StoreError
from ddpdoctor.model.attached import Refusal, StoreLook
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.attach.find import FoundJob
    from ddpdoctor.exchange.job_store import StoreReader

SOURCE = "store"
LIMIT_S = 1.0
"""Our choice for connecting, with the name's lookup: the store of a running job listens already."""
ALL_LIMIT_S = 60.0
"""Our choice for all questions to a store together: it answers each in microseconds."""
MOST_KEYS, MOST_VALUES, MOST_RANKS = 20_000, 4096, 4096
DEBUG_SERVERS = "debug_server/rank"
_VALUES = (DEBUG_SERVERS,)
_TRACES = ("_trace_start", "_trace_end")
"""The ends of keys that TORCH_NCCL_DESYNC_DEBUG writes: the number and name of a rank's last collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    keys: tuple[str, ...]
    asked: tuple[str, ...] = ()


def read_store(job: FoundJob) -> StoreLook | Refusal | None:
    """Return what stands in the store, why it cannot be read, or None if no variable has its address."""
    host, port = job.identity.master_addr, job.identity.master_port
    if host is None or port is None:
        return None
    if job.ranks and not any(shares_network(rank.pid) for rank in job.ranks):
        reason = f"the ranks and the job's store at {host}:{port} are in another network namespace"
        return Refusal(source=SOURCE, reason=reason, remedy=inside_network(job.ranks[0].pid))
    wall_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
    try:
        deadline = time.monotonic() + ALL_LIMIT_S
        keys = _read_keys(host, port, job.world_size or 0, deadline)
        with contextlib.closing(open_store_reader(host, port, LIMIT_S)) as reader:
            values = _read_values(reader, keys.keys, deadline)
    except StoreError as error:
        reason = hide_in_text(f"the job's store at {host}:{port} cannot be read: {error}")
        remedy = "Run ddpdoctor attach on the machine, and in the container, of rank 0."
        return Refusal(source=SOURCE, reason=reason, remedy=remedy)
    return StoreLook(
        host=socket.gethostname(), wall_ns=wall_ns, monotonic_ns=monotonic_ns, job=job.identity,
        address=f"{host}:{port}", keys=tuple(hide_in_text(key) for key in keys.keys[:MOST_KEYS]),
        complete=not keys.asked and len(keys.keys) <= MOST_KEYS, asked=keys.asked, values=values,
    )  # fmt: skip


def _read_keys(host: str, port: int, world_size: int, deadline: float) -> _Keys:
    try:
        with contextlib.closing(open_store_reader(host, port, LIMIT_S)) as reader:
            return _Keys(keys=reader.list_keys())
    except StoreError:
        # An older torch. If nothing can be read at all, this fails again, with the reason.
        with contextlib.closing(open_store_reader(host, port, LIMIT_S)) as reader:
            asked = tuple(_expected(min(world_size, MOST_RANKS)))
            return _Keys(keys=tuple(key for key in asked if _in_time(deadline) and reader.has(key)), asked=asked)


def _expected(world_size: int) -> Iterable[str]:
    yield "default_pg/0//cuda//0"
    for rank in range(world_size):
        yield f"default_pg/0//cpu//0/{rank}"
        yield f"{DEBUG_SERVERS}{rank}"


def _read_values(reader: StoreReader, keys: Iterable[str], deadline: float) -> dict[str, str]:
    wanted = [key for key in keys if key.startswith(_VALUES) or key.endswith(_TRACES)][:MOST_VALUES]
    found = {key: reader.get(key) for key in wanted if _in_time(deadline)}
    return {key: hide_in_text(value.decode(errors="replace")) for key, value in found.items() if value is not None}


def _in_time(deadline: float) -> bool:
    if time.monotonic() > deadline:
        raise StoreError(f"its answers took more than {ALL_LIMIT_S:.0f} s")
    return True
