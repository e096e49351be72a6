"""Makes NCCL log while the bench runs, and reads which network and which transports between ranks it chose.

Only lines of the subsystem INIT are read. NCCL writes them while it connects, never during a measurement. The formats
are from src/init.cc, src/transport/{p2p,shm,net,nvls}.cc and src/transport/net_{ib,socket}.cc, 2.18 to 2.30.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import NcclLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

    from ddpdoctor.exchange.conversation import Conversation
    from ddpdoctor.probes.bandwidth.group import RankGroup

FILE = "nccl.%h.%p.log"
"""NCCL replaces %h by the host's name and %p by the process id."""
MOST_BYTES = 16 * 2**20
"""Our choice: even the log of a rank among thousands is smaller than this."""

NETWORK = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
WAY = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] (?:\[(?:send|receive)\] )?via "
    r"(?:(?P<near>P2P/direct pointer|P2P/\w+|SHM)|(?P<net>(?:NET|COLLNET)/[^/\n]+)/\d+(?:\(\d+\))?(?P<gdr>/GDRDMA)?)"
)
"""A channel to another rank: "[send] via NET/IB/3/GDRDMA", where 3 is the card, or "NET/IB/3(5)" through rank 5."""
CARDS = re.compile(r"NCCL INFO NET/IB : Using (.*?)(?:; OOB.*)?$", re.MULTILINE)
CARD = re.compile(r"([\w.-]+:\d+)(?=[/\s,}]|$)")
"""A port in "[0]mlx5_0:1/IB", since 2.30 in "[0]mlx5_0:1", and in "[0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}" if NCCL
merges two ports."""
SOCKETS = re.compile(r"NCCL INFO NET/Socket : Using (.*)$", re.MULTILINE)
INTERFACE = re.compile(r"\[\d+\]([^\s:]+):")
MULTICAST = re.compile(r"NCCL INFO NVLS multicast support is (not )?available")
NVLS_CHANNELS = re.compile(r"NCCL INFO .*?(\d+) nvls channels")


class NcclLogs:
    """A context manager around the life of the process group."""

    def __init__(self, backend: str) -> None:
        """Create the folder. With another backend than NCCL, this object does nothing."""
        self._folder = (
            TemporaryDirectory(prefix="ddpdoctor-nccl-", ignore_cleanup_errors=True) if backend == "nccl" else None
        )

    def __enter__(self) -> Self:
        """Make NCCL log to the folder."""
        if self._folder is not None:
            os.environ.update(nccl_log_environment(os.environ, self._folder.name))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder."""
        self.close()

    def close(self) -> None:
        """Remove the folder. A second call does nothing. It does no harm if NCCL is still writing."""
        if self._folder is not None:
            self._folder.cleanup()

    def share(self, group: RankGroup, conversation: Conversation) -> tuple[NcclLog, ...]:
        """Return the logs of all ranks on rank 0, and this rank's own on the others. Raises ``StoreError``."""
        if self._folder is None:
            return ()
        rank = group.ranks[group.index]
        own = read_nccl_log(self._folder.name, rank)
        if own is not None:
            conversation.send(f"nccl/{rank}", own)
        group.barrier()
        if rank != 0:
            return () if own is None else (own,)
        found = (conversation.get(NcclLog, f"nccl/{other}", f"rank {other}") for other in group.ranks)
        return tuple(log for log in found if log is not None)


def nccl_log_environment(env: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the variables that make NCCL log to ``folder``, or {} if the user already has NCCL log.

    They must be set before the first communicator is created. The user loses nothing: without NCCL_DEBUG, NCCL writes
    nothing, and torch's errors repeat its last warning.
    """
    if env.get("NCCL_DEBUG") or env.get("NCCL_DEBUG_FILE"):
        return {}
    file = f"{folder.replace('%', '%%')}/{FILE}"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT", "NCCL_DEBUG_FILE": file}


def read_nccl_log(folder: str, rank: int) -> NcclLog | None:
    """Return what NCCL has logged to the folder so far, or None if it has not logged its network."""
    texts = []
    for path in sorted(Path(folder).glob("nccl.*.log")):
        try:
            with path.open("rb") as file:
                texts.append(file.read(MOST_BYTES).decode(errors="replace"))
        except OSError:
            continue
    return parse_nccl_log("\n".join(texts), rank)


def parse_nccl_log(text: str, rank: int) -> NcclLog | None:
    """Return what a log says about all communicators together, or None if no line names the network."""
    networks = NETWORK.findall(text)
    if not networks:
        return None
    return NcclLog(
        rank=rank,
        network=networks[0],
        interfaces=tuple(dict.fromkeys(_interfaces(text, networks[0]))),
        transports=dict(Counter(_ways(text))),
        nvls=_nvls(text),
    )


def _interfaces(text: str, network: str) -> Iterator[str]:
    """Yield the ports of RDMA cards, or the interfaces of TCP. Other network plugins log neither."""
    lines, each = (SOCKETS, INTERFACE) if network == "Socket" else (CARDS, CARD)
    for line in lines.findall(text):
        yield from each.findall(line)


def _ways(text: str) -> Iterator[str]:
    for match in WAY.finditer(text):
        yield match["near"] or match["net"] + (match["gdr"] or "")


def _nvls(text: str) -> bool | None:
    """Return whether NVLink SHARP is used, or None if NCCL did not look for it, as with two GPUs.

    One communicator with NVLS channels is enough, because a communicator of two ranks never has them.
    """
    found = MULTICAST.findall(text)
    if not found:
        return None
    return any(int(count) for count in NVLS_CHANNELS.findall(text))
