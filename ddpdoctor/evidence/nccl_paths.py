"""Reads the connections of each process from NCCL's INFO lines, in the formats of NCCL 2.4 to 2.30."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.nccl_paths import DataWay, NcclEdge, NcclMember, NcclPaths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpdoctor.evidence.nccl_processes import NcclProcess, NcclProcesses
    from ddpdoctor.evidence.reader import Line

MOST_EDGES = 256
"""Our choice, for each process: rings and trees need a few, and point-to-point operations one for each peer."""
MOST_SETTINGS = 64
WANTED = (
    r"Using network|NET/IB ?: Using \[| via |set by environment|DMA-BUF is available|NVLS multicast support|"
    r"coll channels|Init timings|-> Algo "
)
"""The lines that are read, as a regular expression."""
_NETWORK = re.compile(r"Using network (?P<network>[\w./ -]{1,40})")
_ADAPTERS = re.compile(r"NET/IB ?: Using (?P<list>\[.{1,400})")
_ADAPTER = re.compile(r"\[\d+\] ?(?P<name>[\w.-]+):\d+(?:/\w+)?")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<source>\d+)(?:\[\w+\])? -> (?P<target>\d+)(?:\[\w+\])? "
    r"(?:\[(?P<side>send|receive)\] )?via (?P<way>[\w/ ()-]{1,80})"
)
_SETTING = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>\S{1,200})")
_NVLS = re.compile(r"NVLS multicast support is (?P<lacks>not )?available")
_CHANNELS = re.compile(r"(?P<count>\d{1,4}) coll channels")
_TIMINGS = re.compile(r"Init timings.*? total (?P<seconds>\d{1,7}\.\d+)")
_ALGORITHM = re.compile(r"(?P<op>\w+): \d+ Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)")
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
"""In the order of NCCL's numbers (nccl_common.h), which older versions print in place of names."""


@dataclass(slots=True)
class _Connections:
    """The connections of one process so far."""

    network: str = ""
    adapters: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    edges: dict[tuple[int, int, DataWay], tuple[str, str]] = field(default_factory=dict)
    """By own rank, peer and transport: NCCL's text, and the line."""
    counts: Counter[tuple[int, int, DataWay, str]] = field(default_factory=Counter)
    """Lines for each of them and each direction."""
    dmabuf: bool = False
    nvls: bool | None = None
    channels: int | None = None
    algorithms: Counter[str] = field(default_factory=Counter)
    init_s: float | None = None


class Paths:
    """Gathers the connections of all processes of one log."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, int | None], _Connections] = {}

    def read(self, process: NcclProcess, text: str, line: Line) -> None:
        """Take in a line of a process."""
        one = self._all.setdefault((process.who.host, process.who.pid), _Connections())
        if (found := _CHANNEL.search(text)) is not None:
            _edge(one, found, line)
        elif (found := _NETWORK.search(text)) is not None:
            one.network = found["network"].strip()
        elif (found := _ADAPTERS.search(text)) is not None:
            one.adapters = tuple(_ADAPTER.findall(found["list"]))
        elif (found := _SETTING.search(text)) is not None:
            if len(one.settings) < MOST_SETTINGS:
                one.settings[found["name"]] = found["value"].rstrip(".")
        elif (found := _CHANNELS.search(text)) is not None:
            one.channels = int(found["count"])
        else:
            _rest(one, text)

    def tell(self, processes: NcclProcesses) -> Iterator[NcclPaths]:
        """Yield the connections of each process."""
        for process in processes:
            one = self._all.get((process.who.host, process.who.pid))
            if one is not None:
                yield _fact(one, process, processes)


def _edge(one: _Connections, found: re.Match[str], line: Line) -> None:
    text = found["way"].partition(" comm ")[0].strip()
    way = _way(text)
    if way is None:
        return
    ends = int(found["source"]), int(found["target"])
    own, peer = reversed(ends) if found["side"] == "receive" else ends
    key = own, peer, way
    if key in one.edges or len(one.edges) < MOST_EDGES:
        counted = (*key, found["side"] or "send")
        one.counts[counted] += 1
        one.edges.setdefault(key, (text, quote(line.text)))


def _way(text: str) -> DataWay | None:
    if text.startswith("P2P/indirect"):
        return DataWay.INDIRECT
    if text.startswith("P2P"):
        return DataWay.P2P
    if text.startswith("SHM"):
        return DataWay.SHM
    if text.startswith("NET/Socket"):
        return DataWay.TCP
    if text.startswith("NET/"):
        return DataWay.GDRDMA if "/GDRDMA" in text else DataWay.NET
    return None


def _rest(one: _Connections, text: str) -> None:
    if (found := _NVLS.search(text)) is not None:
        one.nvls = found["lacks"] is None
    elif "DMA-BUF is available" in text:
        one.dmabuf = True
    elif (found := _TIMINGS.search(text)) is not None:
        one.init_s = max(one.init_s or 0.0, float(found["seconds"]))
    elif (found := _ALGORITHM.search(text)) is not None:
        algorithm, protocol = _named(found["algorithm"], _ALGORITHMS), _named(found["protocol"], _PROTOCOLS)
        one.algorithms[f"{found['op']} {algorithm} {protocol}"] += 1


def _named(word: str, names: tuple[str, ...]) -> str:
    return names[int(word)] if word.isdecimal() and int(word) < len(names) else word


def _count(one: _Connections, key: tuple[int, int, DataWay]) -> int:
    directions = [(*key, side) for side in ("send", "receive")]
    return max(one.counts[direction] for direction in directions)


def _fact(one: _Connections, process: NcclProcess, processes: NcclProcesses) -> NcclPaths:
    members = process.members.items()
    edges = (
        NcclEdge(own=key[0], peer=key[1], way=key[2], text=text, channels=_count(one, key), said=said)
        for key, (text, said) in one.edges.items()
    )
    return NcclPaths(
        who=processes.who(process),
        spot=process.spot,
        members=tuple(NcclMember(communicator=key, rank=rank, ranks=ranks) for key, (rank, ranks) in members),
        edges=tuple(edges),
        network=one.network,
        adapters=one.adapters,
        settings=one.settings,
        dmabuf=one.dmabuf,
        nvls=one.nvls,
        channels=one.channels,
        algorithms=dict(one.algorithms),
        init_s=one.init_s,
    )
