"""NCCL's own log (NCCL_DEBUG=WARN or INFO), of all versions from 2.7 to 2.30.

Every line has a head "host:pid:tid [device] NCCL INFO text". A warning has its place in the source before "NCCL WARN":
"file.cc:123", since 2.30 "file.cc:123 (function)". Up to 2.26 an empty line comes first. A time may stand before all.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.logs.errors import link_of, warned
from ddpdoctor.logs.lines import MOST_QUOTED, LineReader, quote
from ddpdoctor.model import log_facts as lf
from ddpdoctor.model.known_errors import MAPPED, read_warning
from ddpdoctor.model.words import first_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ddpdoctor.logs.lines import Line

MOST_PROCESSES = 65_536  # Our choice: more processes than any job has. Further processes are ignored.
_INIT = re.compile(
    r"comm (?P<pointer>0x[0-9a-f]+) rank (?P<rank>\d+) n[rR]anks (?P<ranks>\d+) (?:.*?cudaDev (?P<gpu>\d+))?"
    r"(?:.*?busId (?P<bus>[0-9a-f]+))?(?:.*?commId (?P<id>0x[0-9a-f]+))?.*?- (?P<phase>Init (?:START|COMPLETE)|"
    r"Abort COMPLETE|Destroy COMPLETE)"
)
_BOOTSTRAP = re.compile(
    r"Bootstrap ?: Using (?:\[\d+\])?(?P<interface>[\w.@-]+):(?P<address>[0-9A-Fa-f.:]+?)(?:%\w+)?<\d+>"
)


@dataclass(slots=True)
class Communicator:
    """One communicator in one process."""

    key: str  # equal in all processes if the log says so, else ""
    rank: int
    ranks: int
    spot: lf.Spot
    time: lf.Time | None
    said: str
    ready: bool = False


@dataclass(slots=True)
class NcclProcess:
    """One process in the log."""

    who: lf.Who
    spot: lf.Spot
    interface: str = ""
    # By pointer. Destroyed communicators are removed.
    communicators: dict[str, Communicator] = field(default_factory=dict)
    largest: Communicator | None = None
    bus: str = ""
    # For each communicator it ever had: its rank, and the number of ranks.
    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    reported: bool = False
    # What it says of its connections: fields of ``NcclPaths``. None: nothing.
    paths: dict[str, Any] | None = None
    # By own rank, peer and transport: NCCL's text, and the line.
    edges: dict[tuple[int, int, lf.DataWay], tuple[str, str]] = field(default_factory=dict)
    # Lines for each of them and each direction.
    counts: Counter[tuple[int, int, lf.DataWay, str]] = field(default_factory=Counter)
    order: dict[str, int] = field(default_factory=dict)  # the pointers of its communicators, as it used them first
    # The number of its last call in each of them, and how many of a group call it made under that number before.
    place: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class NcclProcesses:
    """All processes of one log."""

    _all: dict[tuple[str, int], NcclProcess] = field(default_factory=dict)

    def __iter__(self) -> Iterator[NcclProcess]:
        return iter(self._all.values())

    def get(self, host: str, pid: int, line: Line) -> NcclProcess | None:
        """Return the process that wrote a line, or None if there are too many."""
        found = self._all.get((host, pid))
        if found is None and len(self._all) < MOST_PROCESSES:
            who = replace(line.who, host=host, pid=pid)
            found = self._all[host, pid] = NcclProcess(who=who, spot=line.spot())
        if found is not None and found.who.rank is None and line.who.rank is not None:
            found.who = replace(found.who, rank=line.who.rank)
        return found

    def who(self, process: NcclProcess) -> lf.Who:
        """Return a process, with its global rank if that is known by now."""
        largest = process.largest
        if process.who.rank is not None or largest is None or not self._is_world(largest):
            return process.who
        return replace(process.who, rank=largest.rank)

    def _is_world(self, comm: Communicator) -> bool:
        """Return whether a communicator seems to have all ranks: it is the largest, and there are no more processes."""
        if comm.ranks < 2 or len(self._all) > comm.ranks:
            return False
        others = [process.largest for process in self._all.values() if process.largest is not None]
        return all(other.ranks < comm.ranks or other.key == comm.key for other in others)

    def tell(self) -> Iterator[lf.Fact]:
        """Return the rank of each process, and which processes wait in the set-up of a communicator."""
        all_largest = [process.largest for process in self._all.values() if process.largest is not None]
        world = next((communicator.ranks for communicator in all_largest if self._is_world(communicator)), None)
        for process in self._all.values():
            who, largest = self.who(process), process.largest
            if not process.reported:
                process.reported = True
                spot, time = (largest.spot, largest.time) if largest else (process.spot, None)
                yield lf.Seen(who=who, spot=spot, time=time, said=largest.said if largest else "", gpu=process.bus)
                if world and largest is not None and largest.ranks == world:
                    yield lf.Size(spot=spot, ranks=world)
                    world = None
            for comm in (communicator for communicator in process.communicators.values() if not communicator.ready):
                words = f"the communicator {comm.key.removeprefix('comm ')} of {comm.ranks} ranks".replace("  ", " ")
                operation = lf.Operation(op="init", group=comm.key, group_words=words)
                common: dict[str, Any] = {"spot": comm.spot, "time": comm.time, "said": comm.said}
                yield lf.Waiting(who=who, operation=operation, in_init=True, **common)


def _read_communicator(process: NcclProcess, text: str, line: Line) -> None:
    found = _INIT.search(text)
    if found is None:
        if (found := _BOOTSTRAP.search(text)) is not None:
            process.interface = found["interface"]
            process.who = replace(process.who, address=MAPPED.sub("", found["address"]))
        return
    pointer, phase = found["pointer"], found["phase"]
    if not phase.startswith("Init"):
        process.communicators.pop(pointer, None)
        return
    rank, ranks = int(found["rank"]), int(found["ranks"])
    if not rank < ranks <= lf.MOST_RANKS:
        return
    key = f"comm {found['id']}" if found["id"] else ""
    comm = Communicator(key=key, rank=rank, ranks=ranks, spot=line.spot(), time=line.time, said=quote(line.text))
    comm.ready = phase == "Init COMPLETE"
    former = process.communicators.get(pointer)
    if not comm.key and former is not None:
        comm.key = former.key
    process.communicators[pointer] = comm
    process.members[comm.key or f"of {ranks}"] = (rank, ranks)
    if process.largest is None or ranks > process.largest.ranks:
        process.largest = comm
    if found["bus"]:  # "4e000", which is domain, bus, device and function in hexadecimal digits
        digits = found["bus"].lower().removeprefix("0x").zfill(5)
        process.bus = f"{digits[-5:-3]}:{digits[-3:-1]}"


MOST_OPEN = 512  # our choice: how many numbers of a communicator are kept for which ranks are missing or differ
MOST_COMMUNICATORS = 4096
KEPT = 4  # how many last calls of each process are kept
MOST_SHOWN = 4096
_CALL = re.compile(
    r"(?P<op>[A-Z]\w+): opCount (?P<number>[0-9a-f]{1,16}) sendbuff \S+ recvbuff \S+ count (?P<count>\d+) datatype "
    r"(?P<dtype>\d+) op (?P<redop>\d+) root (?P<root>\d+) comm (?P<pointer>0x[0-9a-f]+)(?: \[nranks=(?P<ranks>\d+)\])?"
)
# torch's names of NCCL's. Sends and receives are left out: they differ between ranks as a rule.
COLLECTIVES = {
    "AllReduce": "all_reduce", "Broadcast": "broadcast", "Reduce": "reduce", "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
# ncclDataType_t.
_DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")


@dataclass(slots=True)
class _Made:
    process: NcclProcess
    call: tuple[str, int, int, int, int]  # operation, count, dtype, reduction, root
    number: int
    source: str
    line: int
    said: str  # The line. Only a call that is shown becomes a fact.


@dataclass(slots=True)
class _Track:
    group: str
    ranks: int
    open: dict[tuple[int, int], dict[int, _Made]] = field(default_factory=dict)
    last: dict[int, deque[_Made]] = field(default_factory=dict)  # by process


@dataclass(slots=True)
class Calls:
    """All calls of one log."""

    _tracks: dict[str, _Track] = field(default_factory=dict)

    def read(self, process: NcclProcess, text: str, line: Line) -> None:
        found = _CALL.search(text)
        if found is None or found["op"] not in COLLECTIVES:
            return
        pointer, number = found["pointer"], int(found["number"], 16)
        communicator = process.communicators.get(pointer)
        ranks = int(found["ranks"] or 0)
        if communicator is not None and communicator.key:
            key, ranks = communicator.key, communicator.ranks
        else:  # the order in which a process uses its communicators is the same in all, as a rule
            key = f"comm no. {process.order.setdefault(pointer, len(process.order))} of {ranks} ranks"
        if key not in self._tracks and len(self._tracks) < MOST_COMMUNICATORS:
            self._tracks[key] = _Track(group=key, ranks=ranks)
        track = self._tracks.get(key)
        if track is None:
            return
        count, dtype, redop, root = map(int, found.group("count", "dtype", "redop", "root"))
        call = (COLLECTIVES[found["op"]], count, dtype, redop, root)
        former, place = process.place.get(pointer, (-1, 0))
        place = place + 1 if former == number else 0
        process.place[pointer] = (number, place)
        made = _Made(process, call, number, line.source, line.number, line.text[: 2 * MOST_QUOTED])
        track.last.setdefault(id(process), deque(maxlen=KEPT)).append(made)
        # A call is kept until all ranks have made it, and dropped if all made the same.
        entry = track.open.setdefault((number, place), {})
        entry[id(process)] = made
        if len(entry) == track.ranks and not _differ(entry):
            del track.open[number, place]
        elif len(track.open) > MOST_OPEN:
            oldest = next((key for key, those in track.open.items() if not _differ(those)), None)
            track.open.pop(oldest if oldest is not None else max(track.open))

    def tell(self, processes: NcclProcesses) -> Iterator[lf.Fact]:
        """Return the first calls that differ, and the last calls of each process."""
        shown = 0
        for track in self._tracks.values():
            odd = next((made for _, made in sorted(track.open.items(), key=lambda item: item[0]) if _differ(made)), {})
            last = [call for calls in track.last.values() for call in calls]
            words = f"NCCL's communicator {track.group.removeprefix('comm ')}"
            for made in {id(comm): comm for comm in [*odd.values(), *last]}.values():
                if shown < MOST_SHOWN:
                    shown += 1
                    op, count, dtype, _, _ = made.call
                    operation = lf.Operation(
                        op=op, group=track.group, group_words=words, seq=made.number, numel_in=count,
                        dtype=_DTYPES[dtype] if dtype < len(_DTYPES) else "",
                    )  # fmt: skip
                    who = processes.who(made.process)
                    spot = lf.Spot(source=made.source, line=made.line)
                    yield lf.Called(who=who, spot=spot, said=quote(made.said), operation=operation)


def _differ(entry: dict[int, _Made]) -> bool:
    calls = iter(entry.values())
    first = next(calls, None)
    return first is not None and any(call.call != first.call for call in calls)


MOST_HOSTS = 4096
MOST_NAMED = 4  # how many hosts a note names


def interface_notes(processes: NcclProcesses) -> Iterator[lf.Fact]:
    """Report which interface each host uses, and whether it can reach other hosts."""
    from ddpdoctor.rules.network import is_bridge, is_tunnel

    by_interface: dict[str, dict[str, NcclProcess]] = {}
    for process in processes:
        if process.interface and len(by_interface) < MOST_HOSTS:
            by_interface.setdefault(process.interface, {}).setdefault(process.who.host, process)
    several = len({host for hosts in by_interface.values() for host in hosts}) > 1
    for name, hosts in by_interface.items():
        first = next(iter(hosts.values()))
        shown = [f"{host} ({process.who.address})" for host, process in hosts.items()]
        words = f"NCCL connects over {name} on {first_names(shown, MOST_NAMED)}"
        kind = "interface"
        if is_bridge(name) or (name == "lo" and several):
            words += ", which reaches only its own host"
            kind = "suspicious-interface"
        elif is_tunnel(name):
            words += ", which belongs to a VPN"
            kind = "suspicious-interface"
        yield lf.Hint(who=lf.Who(host=first.who.host), spot=first.spot, words=words, kind=kind)


# Our choice, for each process: rings and trees need a few, and point-to-point operations one for each peer.
MOST_EDGES = 256
MOST_SETTINGS = 64
# The lines that are read, as a regular expression.
WANTED = (
    r"Using network|NET/IB ?: Using \[| via |set by environment|NVLS multicast support|"
    r"coll channels|Init timings|-> Algo "
)
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
# In the order of NCCL's numbers (nccl_common.h), which older versions print in place of names.
_PROTOCOLS = ("LL", "LL128", "SIMPLE")
# By how NCCL's words for a transport begin.
_WAYS = {
    "P2P/indirect": lf.DataWay.INDIRECT, "P2P": lf.DataWay.P2P, "SHM": lf.DataWay.SHM, "NET/Socket": lf.DataWay.TCP,
    "NET/": lf.DataWay.NET,
}  # fmt: skip


def _read_connection(process: NcclProcess, text: str, line: Line) -> None:
    paths = process.paths = {} if process.paths is None else process.paths
    if (found := _CHANNEL.search(text)) is not None:
        words = found["way"].partition(" comm ")[0].strip()
        way = next((way for beginning, way in _WAYS.items() if words.startswith(beginning)), None)
        way = lf.DataWay.GDRDMA if way is lf.DataWay.NET and "/GDRDMA" in words else way
        ends = int(found["source"]), int(found["target"])
        own, peer = reversed(ends) if found["side"] == "receive" else ends
        if way is not None and ((own, peer, way) in process.edges or len(process.edges) < MOST_EDGES):
            process.counts[own, peer, way, found["side"] or "send"] += 1
            process.edges.setdefault((own, peer, way), (words, quote(line.text)))
    elif (found := _NETWORK.search(text)) is not None:
        paths["network"] = found["network"].strip()
    elif (found := _ADAPTERS.search(text)) is not None:
        paths["adapters"] = tuple(_ADAPTER.findall(found["list"]))
    elif (found := _SETTING.search(text)) is not None:
        settings = paths.setdefault("settings", {})
        if len(settings) < MOST_SETTINGS:
            settings[found["name"]] = found["value"].rstrip(".")
    elif (found := _CHANNELS.search(text)) is not None:
        paths["channels"] = int(found["count"])
    elif (found := _NVLS.search(text)) is not None:
        paths["nvls"] = found["lacks"] is None
    elif (found := _TIMINGS.search(text)) is not None:
        paths["init_s"] = max(paths.get("init_s", 0.0), float(found["seconds"]))
    elif (found := _ALGORITHM.search(text)) is not None:
        chosen = paths.setdefault("algorithms", {})
        algorithm, protocol = _named(found["algorithm"], _ALGORITHMS), _named(found["protocol"], _PROTOCOLS)
        name = f"{found['op']} {algorithm} {protocol}"
        chosen[name] = chosen.get(name, 0) + 1


def _tell_connections(processes: NcclProcesses) -> Iterator[lf.NcclPaths]:
    for process in processes:
        if process.paths is None:
            continue
        members = process.members.items()
        edges = (
            lf.NcclEdge(
                own=own, peer=peer, way=way, text=text, said=said,
                channels=max(process.counts[own, peer, way, side] for side in ("send", "receive")),
            )
            for (own, peer, way), (text, said) in process.edges.items()
        )  # fmt: skip
        yield lf.NcclPaths(
            who=processes.who(process), spot=process.spot, edges=tuple(edges), **process.paths,
            members=tuple(lf.NcclMember(communicator=key, rank=rank, ranks=ranks) for key, (rank, ranks) in members),
        )  # fmt: skip


def _named(word: str, names: tuple[str, ...]) -> str:
    return names[int(word)] if word.isdecimal() and int(word) < len(names) else word


_HEAD = re.compile(
    r"(?P<host>[A-Za-z0-9][\w.-]{0,252}):(?P<pid>\d{1,10}):\d{1,10} \[[\w-]{1,8}\] (?:(?P<place>\S{1,120}:\d{1,6}) )?"
    r"(?:\([^()]{0,80}\) )?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
_WARN = re.compile(r"(?:(?P<place>[\w./-]{1,120}:\d{1,6}) )?(?:\([^()]{0,80}\) )?NCCL WARN (?P<text>.+)")
_VERSION = re.compile(r"NCCL version (?P<nccl>\d+\.\d+\.\d+)(?:\+cuda(?P<cuda>\d+\.\d+))?")
_WAY_UP = re.compile(r" -> (?P<code>[1-7])(?: \[|$)")
# The INFO lines that are read. Any other line costs one search.
WANTED_INFO = re.compile(
    rf"Init (?:START|COMPLETE)|(?:Abort|Destroy) COMPLETE|Bootstrap ?: Using|{WANTED}| -> [1-7](?: \[|$)|: opCount "
)
_WAY_UP_WORDS = {1: "a CUDA call by NCCL failed", 2: "a system call by NCCL failed"}
_REMOTE = 6  # ncclRemoteError. Further up it becomes 3, internal error, so the first code of a process counts.


@dataclass(slots=True, eq=False)
class NcclLogReader(LineReader):
    """Reads NCCL's warnings, and its INFO lines about processes, communicators, transports and calls."""

    name = "NCCL log"
    triggers = (b"NCCL WARN", b"NCCL INFO", b"NCCL version")
    _processes: NcclProcesses = field(default_factory=NcclProcesses)
    _version: lf.Hint | None = None
    _calls: Calls = field(default_factory=Calls)
    _warned: set[tuple[str, int]] = field(default_factory=set)
    _way_up: dict[tuple[str, int], tuple[int, Line]] = field(default_factory=dict)
    _ended: bool = False

    def read(self, line: Line) -> Iterable[lf.Fact]:
        """Return the facts of a warning. All others follow when the log, or a run in it, ends."""
        text = line.text
        if "NCCL" not in text:
            return self.end() if self._ended and line.begins_run else ()
        if "NCCL WARN " in text:
            self._ended = True
            return self._warning(line)
        if "NCCL INFO " in text and "NCCL version " not in text:
            if WANTED_INFO.search(text):
                self._info(line)
            return ()
        if (found := _VERSION.search(text)) is None:
            return ()
        facts = list(self.end()) if self._ended else []
        words = f"NCCL {found['nccl']}" + (f", built for CUDA {found['cuda']}" if found["cuda"] else "")
        self._version = lf.Hint(words=words, kind="nccl-version", **line.says())
        return facts

    def end(self) -> Iterable[lf.Fact]:
        facts = [*self._processes.tell(), *self._calls.tell(self._processes), *self._failed_silently()]
        facts += [] if self._version is None else [self._version]
        facts += [*_tell_connections(self._processes), *interface_notes(self._processes)]
        self._processes, self._version, self._calls = NcclProcesses(), None, Calls()
        self._warned, self._way_up, self._ended = set(), {}, False
        return facts

    def _info(self, line: Line) -> None:
        found = _HEAD.search(line.text)
        if found is None:
            return
        host, pid, text = found["host"], int(found["pid"]), found["text"]
        process = self._processes.get(host, pid, line)
        if process is None:
            return
        if " via " in text:
            _read_connection(process, text, line)
        elif ": opCount " in text:
            self._calls.read(process, text, line)
        elif "omm 0x" in text or text.startswith("Bootstrap"):
            self._ended = self._ended or text.endswith(("Abort COMPLETE", "Destroy COMPLETE"))
            _read_communicator(process, text, line)
        elif (code := _WAY_UP.search(text)) is not None:
            self._ended = True
            self._way_up.setdefault((host, pid), (int(code["code"]), line))
        else:
            _read_connection(process, text, line)

    def _warning(self, line: Line) -> list[lf.Fact]:
        found = _HEAD.search(line.text)
        if found is None:  # the head was cut off, or belongs to another writer
            bare = _WARN.search(line.text)
            return [] if bare is None else [warned(bare["text"], bare["place"], line.says())]
        host, pid = found["host"], int(found["pid"])
        self._warned.add((host, pid))
        process = self._processes.get(host, pid, line)
        who = self._processes.who(process) if process is not None else replace(line.who, host=host, pid=pid)
        return [warned(found["text"], found["place"], line.says(who))]

    def _failed_silently(self) -> Iterator[lf.Fact]:
        """Yield the failures of processes whose lines only pass on an error code, without the warning itself."""
        for (host, pid), (code, line) in self._way_up.items():
            if (host, pid) in self._warned:
                continue
            process = self._processes.get(host, pid, line)
            who = self._processes.who(process) if process is not None else lf.Who(host=host, pid=pid)
            if code == _REMOTE:
                warning = read_warning("Connection closed by remote peer")
                assert warning is not None
                yield link_of(warning, line.says(who))
            elif code in _WAY_UP_WORDS:
                yield lf.Hint(words=_WAY_UP_WORDS[code], kind="nccl-warning", **line.says(who))
