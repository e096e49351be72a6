"""What NCCL's INFO lines say about version, network and transports: notes, and nothing that anybody is accused of."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from ddpdoctor.evidence.quotes import quote
from ddpdoctor.model.evidence import Hint, Who

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.evidence.nccl_processes import NcclProcess, NcclProcesses
    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact

MOST_HOSTS = 4096
MOST_NAMED = 4
"""How many hosts, interfaces or adapters a note names."""
_NETWORK = re.compile(r"Using network (?P<network>[\w./ -]{1,40})")
_ADAPTERS = re.compile(r"NET/IB ?: Using (?P<list>\[.{1,400})")
_ADAPTER = re.compile(r"\[\d+\](?P<name>[\w.-]+):\d+(?:/\w+)?")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<source>\d+)\[[\w.]+\] -> (?P<target>\d+)\[[\w.]+\] (?:\[(?:send|receive)\] )?"
    r"via (?P<way>[\w/ ]+)"
)
_SETTING = re.compile(r"(?P<name>NCCL_\w+) set by environment to (?P<value>\S{1,200})")
_SUSPICIOUS = {
    "NCCL_P2P_DISABLE": "GPUs of one host do not exchange data directly",
    "NCCL_SHM_DISABLE": "processes of one host do not share memory",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE are not used",
    "NCCL_NVLS_ENABLE": "",
    "NCCL_IGNORE_NET_MISMATCH": "hosts with different networks are not refused, and may hang instead",
}
_OFF = {"", "0"}
_WAYS = (
    ("P2P", "directly between GPUs"),
    ("SHM", "through the host's memory"),
    ("NET/Socket", "over TCP"),
    ("NET/", "over the network"),
)


class Notes:
    """Gathers what is worth a note in one log."""

    def __init__(self) -> None:
        self._version: tuple[str, Line] | None = None
        self._networks: dict[str, dict[str, Line]] = {}
        self._adapters: dict[str, tuple[str, ...]] = {}
        self._ways: Counter[str] = Counter()
        self._way_line: Line | None = None
        self._detours: dict[tuple[int, int], Line] = {}
        self._settings: dict[str, tuple[str, Line]] = {}

    def version(self, nccl: str, cuda: str | None, line: Line) -> None:
        """Take in the version of NCCL."""
        self._version = (f"NCCL {nccl}" + (f", built for CUDA {cuda}" if cuda else ""), line)

    def read(self, process: NcclProcess, text: str, line: Line) -> None:
        """Take in a line about networks, adapters, channels or settings."""
        host = process.who.host
        if (found := _CHANNEL.search(text)) is not None:
            self._channel(found, line)
        elif (found := _NETWORK.search(text)) is not None:
            network = found["network"].strip()
            if len(self._networks) < MOST_HOSTS or host in self._networks.get(network, {}):
                self._networks.setdefault(network, {}).setdefault(host, line)
        elif (found := _ADAPTERS.search(text)) is not None:
            if len(self._adapters) < MOST_HOSTS:
                self._adapters[host] = tuple(_ADAPTER.findall(found["list"]))
        elif (found := _SETTING.search(text)) is not None and len(self._settings) < MOST_HOSTS:
            self._settings[found["name"]] = (found["value"].rstrip("."), line)

    def _channel(self, found: re.Match[str], line: Line) -> None:
        way = found["way"].strip()
        name = next((words for start, words in _WAYS if way.startswith(start)), "")
        if not name:
            return
        self._ways[name + (", straight from GPU memory" if "GDRDMA" in way else "")] += 1
        self._way_line = self._way_line or line
        if way.startswith("NET/") and len(self._detours) < MOST_HOSTS:
            self._detours.setdefault((int(found["source"]), int(found["target"])), line)

    def tell(self, processes: NcclProcesses) -> Iterator[Fact]:
        """Return all notes of the log."""
        if self._version is not None:
            yield _hint(self._version[0], "nccl-version", self._version[1])
        for network, hosts in self._networks.items():
            first = next(iter(hosts.values()))
            words = "TCP (Socket)" if network == "Socket" else network
            yield _hint(f"NCCL uses the network {words} on {_some(hosts)}", "transport", first)
            idle = {host: names for host, names in self._adapters.items() if host in hosts and names}
            if network == "Socket" and idle:
                host, names = next(iter(idle.items()))
                words = f"{host} has InfiniBand or RoCE adapters ({_some(names)}), and NCCL goes over TCP"
                yield _hint(words, "suspicious-transport", hosts[host])
        if self._way_line is not None:
            ways = ", ".join(f"{count} {words}" for words, count in self._ways.most_common())
            yield _hint(f"channels between GPUs: {ways}", "channels", self._way_line)
        yield from self._within_host(processes)
        yield from self._set()
        yield from _interfaces(processes)

    def _within_host(self, processes: NcclProcesses) -> Iterator[Fact]:
        """Note a channel that leaves the network card although both ranks are on one host."""
        world = processes.world()
        hosts = {
            one.largest.rank: one.who.host
            for one in processes
            if one.largest is not None and one.largest.ranks == world
        }  # fmt: skip
        for (source, target), line in self._detours.items():
            if source in hosts and hosts[source] == hosts.get(target):
                words = (
                    f"ranks {source} and {target} are both on {hosts[source]} and use the network: neither P2P nor "
                    "shared memory works or is allowed between them"
                )
                yield _hint(words, "suspicious-transport", line)
                return

    def _set(self) -> Iterator[Fact]:
        for name, meaning in _SUSPICIOUS.items():
            value, line = self._settings.get(name, ("", None))
            off = name == "NCCL_NVLS_ENABLE"
            if line is not None and ((value in _OFF) == off):
                words = f"{name}={value}" + (f": {meaning}" if meaning else ": NVLink SHARP is off")
                yield _hint(words, "setting", line)


def _interfaces(processes: NcclProcesses) -> Iterator[Fact]:
    """Say which interface each host uses, and whether it can lead to other hosts."""
    from ddpdoctor.rules.interface_choice import is_bridge, is_tunnel

    by_interface: dict[str, dict[str, NcclProcess]] = {}
    for process in processes:
        if process.interface and len(by_interface) < MOST_HOSTS:
            by_interface.setdefault(process.interface, {}).setdefault(process.who.host, process)
    several = len({host for hosts in by_interface.values() for host in hosts}) > 1
    for name, hosts in by_interface.items():
        first = next(iter(hosts.values()))
        shown = [f"{host} ({process.who.address})" for host, process in hosts.items()]
        words = f"NCCL's connections go over {name} on {_some(shown)}"
        kind = "interface"
        if is_bridge(name) or (name == "lo" and several):
            words += ", which leads only to its own host"
            kind = "suspicious-interface"
        elif is_tunnel(name):
            words += ", which is a VPN's"
            kind = "suspicious-interface"
        yield Hint(who=Who(host=first.who.host), spot=first.spot, words=words, kind=kind)


def _hint(words: str, kind: str, line: Line) -> Hint:
    return Hint(who=line.who, spot=line.spot(), time=line.time, said=quote(line.text), words=words, kind=kind)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else ""
    return ", ".join(every[:MOST_NAMED]) + more
