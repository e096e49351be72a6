"""Errors of torch's collectives, of its store and of the rendezvous: who differs, is late or lost, what is in use."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddpdoctor.evidence.errors import numbers
from ddpdoctor.evidence.frameworks import begins_run
from ddpdoctor.evidence.lines import origin_of
from ddpdoctor.evidence.reader import quote
from ddpdoctor.model.evidence import (
    MOST_RANKS,
    Absent,
    Differ,
    Failed,
    Link,
    Nature,
    Operation,
    Shown,
    Size,
    Trouble,
    Waiting,
    Who,
)
from ddpdoctor.model.words import group_alike, op_type_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.evidence.reader import Line
    from ddpdoctor.model.evidence import Fact


MARK = "mismatch between collectives"
_CALL = re.compile(
    r"Rank (?P<rank>\d{1,9}) is running (?:inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(?P<seq>\d{1,20}),? ?)?OpType=(?P<op>\w{1,60})"
    r"(?:, TensorShape=(?P<shape>\[[\[\]\d, ]{0,2000}\]|\d*))?"
    r"(?:, TensorDtypes=(?P<dtypes>[\w, ]{0,200}?)(?:, Tensor|\)))?"
)
# c10's names of scalar types that differ from Python's.
_DTYPES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32",
    "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
}  # fmt: skip
_MOST_CALLS = 20_000


class Mismatches:
    """Collects reports of a mismatch from the ranks in one stream of lines."""

    def __init__(self) -> None:
        self._own: dict[int, Operation] = {}
        self._others: dict[int, Operation] = {}
        self._first: Line | None = None

    def add(self, line: Line) -> None:
        """Add one rank's message."""
        calls = [(int(match["rank"]), _operation(match)) for match in _CALL.finditer(line.text)]
        if not calls or len(self._own) > _MOST_CALLS or any(rank >= MOST_RANKS for rank, _ in calls):
            return
        self._first = self._first or line
        own, operation = calls[0]
        of_world = line.who.rank in {None, own}
        self._own.setdefault(own if line.who.rank is None else line.who.rank, operation)
        if of_world:  # else these are ranks of a smaller group
            for rank, other in calls[1:]:
                self._others.setdefault(rank, other)

    def facts(self) -> list[Differ]:
        """Return the facts of all messages, and forget the messages."""
        line, calls = self._first, {**self._others, **self._own}
        self._own, self._others, self._first = {}, {}, None
        if line is None:
            return []
        ordered = group_alike(calls)
        if len(ordered) < 2:
            return []
        is_plain = len(ordered[0][1]) > len(ordered[1][1])
        odd = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks)) if is_plain else None
        return [
            Differ(
                spot=line.spot(), time=line.time, said=quote(line.text[line.text.find(MARK) - 9 :]),
                sides=tuple((ranks, operation) for operation, ranks in ordered), odd=odd,
                aspect=aspect_of([operation for operation, _ in ordered]),
            )
        ]  # fmt: skip


def aspect_of(operations: list[Operation]) -> str:
    """Return in what calls differ: the operation before the number, the number before shapes and dtypes."""
    for aspect, values in (
        ("operation", Counter(one.op for one in operations)),
        ("number", Counter(one.seq for one in operations)),
        ("shape", Counter((one.shape, one.numel_in, one.numel_out) for one in operations)),
        ("dtype", Counter(one.dtype for one in operations)),
    ):
        if len(values) > 1:
            return aspect
    return ""


def _operation(match: re.Match[str]) -> Operation:
    seq = match["seq"]
    shapes = re.findall(r"\[([\d, ]*)\]", match["shape"] or "")
    shape = tuple(int(size) for size in re.findall(r"\d{1,18}", shapes[0])) if len(shapes) == 1 else None
    dtype = (match["dtypes"] or "").strip()
    return Operation(
        op=op_type_name(match["op"]),
        seq=int(seq) + 1 if seq and len(seq) < 10 else None,  # it counts from 0, all other sources from 1
        shape=shape,
        dtype=_DTYPES.get(dtype, dtype.lower()),
    )


_KEYS = re.compile(r"[Ww]ait timeout after (?P<ms>\d{1,12}) ?ms, keys: (?P<keys>[^\n]{1,2000})")
_KEY = re.compile(r"Timeout waiting for key: (?P<keys>\S{1,500}) after (?P<ms>\d{1,12}) ?ms")
# Where a rank leaves its address for Gloo's peers.
_ADDRESS = re.compile(r"^/?default_pg/\d+//\w+//\d+/(?P<rank>\d{1,9})$")
_UNIQUE_ID = re.compile(r"^/?default_pg/0(?://cuda//0|/0)$")  # where rank 0 leaves NCCL's id for all
_ASKS_0 = re.compile(
    r"retrieving ncclUniqueId from \[(?P<rank>\d{1,9})\] via c10d key-value store by key '(?P<key>[^']*)'"
)
_CLIENTS = re.compile(
    r"Timed out after (?P<seconds>\d{1,9}) seconds waiting for clients\. (?P<came>\d{1,9})/(?P<all>\d{1,9}) clients"
)
_CLIENT = re.compile(
    r"client socket has timed out after (?P<limit>\d{1,12}) ?(?P<unit>ms|s)? while trying to connect to"
    r" [(\[]?(?P<host>[^,\s)\]]{1,253}?)(?:, |\]?:)(?P<port>\d{1,5})(?:[^\w:.,\]]|\.?(?:\s|$))"
)
_UNKNOWN_NAME = re.compile(
    r"client socket has failed to connect to any network address of \((?P<host>[^,\s)]{1,253}), (?P<port>\d{1,5})\)"
    r"(?P<why>.{0,400})"
)
_IN_USE = re.compile(
    r"server socket has failed to listen on any local network address.{0,400}?"
    r"(?:port: (?P<port>\d{1,5})|:(?P<other>\d{4,5})\b)"
)
_LOST = re.compile(
    r"(?:recvValue|recvVector|recvString|sendBytes|sendValue) failed on SocketImpl\((?P<socket>[^)]{0,400})\)"
)
_REMOTE = re.compile(r"remote=\[?(?P<host>[^\]\s,]{1,253}?)\]?:\d{1,5}\b")
_BARRIER = re.compile(
    r"(?P<how>Waiting in|Timed out initializing process group in) store based barrier.{0,60}? rank: (?P<rank>\d{1,9}),"
    r".{0,80}?\(world_size=(?P<world>\d{1,9}), worker_count=(?P<count>\d{1,9}), timeout=(?P<limit>[\d:]{1,20})"
)
_PASSED = re.compile(r"Rank (?P<rank>\d{1,9}): Completed store-based barrier")
STORE_MARKS = (
    "ait timeout after", "Timeout waiting for key", "retrieving ncclUniqueId", "waiting for clients. ",
    "client socket has timed out", "failed to connect to any network", "server socket has failed to",
    " failed on SocketImpl", "store based barrier",
    "store-based barrier", "waitForInput: poll for socket",
)  # fmt: skip


class StoreErrors:
    """Reads these errors. A barrier that all ranks passed in the end is left out."""

    def __init__(self) -> None:
        self._barriers: dict[int, list[Fact]] = {}

    def read(self, line: Line) -> list[Fact]:
        """Return what a line with one of ``STORE_MARKS`` says."""
        text = line.text
        if "barrier" in text:
            return self._barrier(line)
        keys = _KEYS.search(text) or _KEY.search(text)
        asks = _ASKS_0.search(text)
        if keys is not None or asks is not None:
            return _key_facts(line, keys, asks)
        if (clients := _CLIENTS.search(text)) is not None:
            came, world = int(clients["came"]), int(clients["all"])
            common = origin_of(line)
            found: list[Fact] = [_waiting(float(clients["seconds"]), **common)]
            if 0 < world < MOST_RANKS:
                found.append(Size(ranks=world, **common))
            if came == 1 and world == 2:  # the server counts itself, and serves as rank 0
                common.pop("who")
                found.append(Absent(who=Who(rank=1), waiters=(0,), in_init=True, shown=Shown.WORDS, **common))
            return found
        client = _CLIENT.search(text)
        return _unreached(line, client) if client is not None else self._socket(line)

    def _socket(self, line: Line) -> list[Fact]:
        text = line.text
        common = origin_of(line)
        if (unknown := _UNKNOWN_NAME.search(text)) is not None:  # the store's host has no address, or refuses
            host = unknown["host"]
            why = "its name is unknown there" if "gai error" in unknown["why"] else "it does not answer"
            problem = f"cannot connect to the job's store at {host}:{unknown['port']}: {why}"
            fix = f"check MASTER_ADDR on all hosts, and that each can resolve it: `getent hosts {host}`"
            return [Link(to=_host(host), problem=problem, fix=fix, **common)]
        if "failed on SocketImpl" in text:  # the store's server, in rank 0 or an agent, has ended
            if (lost := _LOST.search(text)) is None:
                return []
            remote = _REMOTE.search(lost["socket"])
            problem = (
                "lost the connection to the job's store: the process that serves it, rank 0 or its agent, had ended"
            )
            fix = "look for what ended rank 0 and its launcher first"
            to = replace(_host(remote["host"]) if remote is not None else Who(), rank=0)
            return [Link(to=to, problem=problem, fix=fix, victim=True, **common)]
        if "waitForInput" in text:
            return [_waiting(None, in_init=False, **common)] if "likely a timeout" in text else []
        in_use = _IN_USE.search(text)
        if in_use is None or not ("EADDRINUSE" in text or "ddress already in use" in text):
            return []
        port = in_use["port"] or in_use["other"]
        fix = (
            f"end what listens there (`ss -ltnp 'sport = :{port}'`), often a rank of an earlier run, or give this job "
            "another port: `torchrun --master-port`, MASTER_PORT"
        )
        return [Trouble(kind="port", problem=f"port {port} is in use already", fix=fix, **common)]

    def end(self) -> list[Fact]:
        """Return the barriers that ranks were still waiting in."""
        found = [fact for facts in self._barriers.values() for fact in facts]
        self._barriers.clear()
        return found

    def _barrier(self, line: Line) -> list[Fact]:
        """Read torch's barrier before 2.3: each rank counts itself and looks how many have come."""
        if (passed := _PASSED.search(line.text)) is not None:
            self._barriers.pop(int(passed["rank"]), None)
            return []
        match = _BARRIER.search(line.text)
        if match is None or int(match["world"]) >= MOST_RANKS or int(match["rank"]) >= MOST_RANKS:
            return []
        rank, world, count = int(match["rank"]), int(match["world"]), int(match["count"])
        common = origin_of(line)
        common["who"] = replace(line.who, rank=rank)
        late = match["how"].startswith("Timed out")
        parts = [int(part) for part in match["limit"].split(":") if part]  # "0:30:00"
        limit_s = float(sum(part * 60**power for power, part in enumerate(reversed(parts)))) if parts else None
        facts: list[Fact] = [Size(ranks=world, **common), _waiting(limit_s, timed_out=late, came=count, **common)]
        if count > world:
            problem = (
                f"{count} processes came to a job of {world}: two jobs share one port, or ranks were started twice"
            )
            fix = "give each job a MASTER_PORT of its own, and start each rank once"
            facts.append(Trouble(kind="port", problem=problem, fix=fix, **{**common, "who": Who(host=line.who.host)}))
        self._barriers.pop(rank, None)
        if late or len(self._barriers) >= MOST_RANKS:
            return facts
        self._barriers[rank] = facts
        return []


def _key_facts(line: Line, keys: re.Match[str] | None, asks: re.Match[str] | None) -> list[Fact]:
    """Read which ranks waited for a key, and which rank never set it."""
    common = origin_of(line)
    limit_s = int(keys["ms"]) / 1000 if keys is not None else None
    names = [key.strip() for key in keys["keys"].split(",")][:64] if keys is not None else []
    in_init = asks is not None or any("default_pg/" in name for name in names)
    waiting = _waiting(limit_s, in_init=in_init, **common)
    found: list[Fact] = [waiting] if keys is not None or "imeout" in line.text else []
    waiters = (line.who.rank,) if line.who.rank is not None else ()
    ranks = {int(match["rank"]) for name in names if (match := _ADDRESS.match(name.rstrip("]'\". "))) is not None}
    ranks |= {0 for name in names if _UNIQUE_ID.match(name.rstrip("]'\". "))}
    certain = bool(ranks)
    if not ranks and asks is not None and asks["key"] == "0" and not names:
        ranks = {int(asks["rank"])}  # of a group that is not named: of the first one, most likely
    common.pop("who")
    found += [
        Absent(
            who=Who(rank=rank), waiters=waiters, in_init=True, certain=certain, expected=bool(asks),
            shown=Shown.WORDS, **common,
        )
        for rank in sorted(ranks)
        if rank < MOST_RANKS and rank != line.who.rank
    ]  # fmt: skip
    return found


def _unreached(line: Line, client: re.Match[str]) -> list[Fact]:
    """Read that a rank or an agent could not connect to the store."""
    seconds = int(client["limit"]) / (1 if client["unit"] == "s" else 1000)
    where = f"{client['host']}:{client['port']}"
    problem = f"could not connect to the job's store at {where} within {seconds:g} s"
    fix = (
        f"check that rank 0 was started on {client['host']}, that MASTER_ADDR and MASTER_PORT name it on all hosts, "
        "and that no firewall blocks the port: `ddpdoctor check-rendezvous`"
    )
    common = origin_of(line)
    return [_waiting(seconds, **common), Link(to=_host(client["host"]), problem=problem, fix=fix, **common)]


def _waiting(limit_s: float | None, *, timed_out: bool = True, in_init: bool = True, **common: Any) -> Waiting:
    return Waiting(
        operation=Operation(), timed_out=timed_out, limit_s=limit_s, in_init=in_init, in_store=True, **common
    )  # fmt: skip


def _host(name: str) -> Who:
    is_address = bool(re.fullmatch(r"[\d.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", name))
    return Who(address=name) if is_address else Who(host=name)


_MARKS = (
    MARK, "onitoredBarrier", "DDP expects same model", "appears not to match", "op.preamble.length <= op.nbytes",
    *STORE_MARKS,
)  # fmt: skip
_NOT_PASSED = re.compile(
    r"\[Rank (?P<rank>\d{1,9})\]: Ranks? (?P<ranks>\d[\d, ]{0,100000}?) failed to pass monitoredBarrier"
    r" in (?P<ms>\d{1,12})"
)
_INNOCENT = re.compile(r"Rank (?P<rank>\d{1,9}) successfully reached monitoredBarrier, but received errors")
_PARAMETERS = re.compile(
    r"Rank (?P<one>\d{1,9}) has (?P<count>\d{1,20}) params, while rank (?P<other>\d{1,9}) has inconsistent"
    r" (?P<others>-?\d{1,20}) params"
)
_SIZES = re.compile(
    r"params\[(?P<number>\d{1,9})\] in this process with sizes \[(?P<sizes>[\d, ]{0,200})\] appears not to match"
    r" sizes of the same param in process (?P<other>\d{1,9})"
)
_LENGTHS = re.compile(r"op\.preamble\.length <= op\.nbytes\.? ?(?P<sent>\d{1,20}) vs (?P<expected>\d{1,20})")
_CONSTRUCTOR = "DistributedDataParallel()"
_MOST_PARAMETERS = 10**8  # Our choice: no model has more tensors. A victim reads memory that was never set.


class CollectiveErrorReader:
    """Finds errors of collectives, of the store and of the rendezvous."""

    name = "errors of collectives"
    triggers = (
        b"rror", b"imeout", b"imed out", b"onitoredBarrier", b"server socket has failed", b"failed on SocketImpl",
        b"store based barrier", b"store-based barrier",
    )  # fmt: skip

    def __init__(self) -> None:
        self._mismatches = Mismatches()
        self._store = StoreErrors()
        self._holds = False
        """Whether a fact waits for later lines that may add to it."""

    def read(self, line: Line) -> Iterable[Fact]:
        """Return the facts that end with this line."""
        text = line.text
        if self._holds and begins_run(text):
            return self.end()
        mark = next((mark for mark in _MARKS if mark in text), None)
        if mark is None:
            return ()
        if mark == MARK:
            self._mismatches.add(line)
            self._holds = True
            return ()
        if mark in STORE_MARKS:
            self._holds = True
            return self._store.read(line)
        return _READERS[mark](line)

    def end(self) -> Iterable[Fact]:
        """Return the facts that still wait for later lines."""
        self._holds = False
        return [*self._mismatches.facts(), *self._store.end()]


def _monitored_barrier(line: Line) -> list[Fact]:
    """Read which ranks a monitored barrier misses. Only rank 0 of the group reports it."""
    operation = Operation(op="monitored_barrier")
    common = origin_of(line)
    if (innocent := _INNOCENT.search(line.text)) is not None:
        who = line.who if line.who.rank is not None else Who(rank=int(innocent["rank"]))
        return [Waiting(operation=operation, timed_out=True, **{**common, "who": who})]
    match = _NOT_PASSED.search(line.text)
    if match is None:
        return []
    limit_s = int(match["ms"]) / 1000
    rank = line.who.rank if line.who.rank is not None else int(match["rank"])
    of_world = rank == int(match["rank"])  # else these are ranks of a smaller group
    waiting = Waiting(operation=operation, timed_out=True, limit_s=limit_s, **{**common, "who": _rank(line, rank)})
    late = numbers(match["ranks"])
    common.pop("who")
    absent = [
        Absent(
            who=Who(rank=one) if of_world else Who(group="unknown", group_rank=one), operation=operation,
            waiters=(rank,), shown=Shown.WORDS, **common,
        )
        for one in late
    ]  # fmt: skip
    return [waiting, *absent]


def _rank(line: Line, rank: int) -> Who:
    return line.who if line.who.rank is not None else Who(rank=rank, host=line.who.host, pid=line.who.pid)


def _parameters(line: Line) -> list[Fact]:
    """Read how many parameters two ranks have. For a rank that ended, the number is 0 or random memory."""
    match = _PARAMETERS.search(line.text)
    if match is None or int(match["one"]) >= MOST_RANKS or int(match["other"]) >= MOST_RANKS:
        return []
    one, other = int(match["one"]), int(match["other"])
    count, others = int(match["count"]), int(match["others"])
    if not 0 < count < _MOST_PARAMETERS:
        return []
    if not 0 < others < _MOST_PARAMETERS:
        message = "another rank had ended when the models were compared"
        common = origin_of(line, _rank(line, one))
        return [Failed(type="RuntimeError", message=message, nature=Nature.PEER_LOST, peers=(other,), **common)]
    sides = tuple(
        ((rank,), Operation(op=_CONSTRUCTOR, group_words=f"a model with {size} parameters"))
        for rank, size in ((one, count), (other, others))
    )
    return [_differ(line, sides, "number")]


def _shapes(line: Line) -> list[Fact]:
    """Read which parameter has another shape than on rank 0, or that Gloo got more bytes than this rank expected.

    The latter does not tell which rank is wrong.
    """
    ranks = (line.who.rank,) if line.who.rank is not None else ()
    others: tuple[int, ...] = ()
    if (sizes := _SIZES.search(line.text)) is not None:
        others, words = (int(sizes["other"]),), f"a model whose parameter {sizes['number']} has"
        shape = tuple(map(int, re.findall(r"\d{1,18}", sizes["sizes"])))
        own = Operation(op=_CONSTRUCTOR, group_words=f"{words} this shape", shape=shape)
        other = Operation(op=_CONSTRUCTOR, group_words=f"{words} another shape")
    elif (lengths := _LENGTHS.search(line.text)) is not None:
        own = Operation(op=f"a collective of {lengths['expected']} bytes")
        other = Operation(op=f"a collective of {lengths['sent']} bytes")
    else:
        return []
    return [_differ(line, ((ranks, own), (others, other)), "shape")]


def _differ(line: Line, sides: tuple[tuple[tuple[int, ...], Operation], ...], aspect: str) -> Differ:
    common = origin_of(line)
    common.pop("who")
    return Differ(sides=sides, aspect=aspect, **common)


_READERS = {
    "onitoredBarrier": _monitored_barrier,
    "DDP expects same model": _parameters,
    "appears not to match": _shapes,
    "op.preamble.length <= op.nbytes": _shapes,
}
