"""Reads dumps of torch's flight recorder: pickles of FR 2.1 to 2.10, and JSON; of NCCL, nccl2, Gloo and TorchComms.

The layout is that of FlightRecorderDetail.hpp in torch 2.4 to 2.15. Dumps are untrusted: the unpickler
resolves no names, so nothing in a dump can be called, and its memory is limited.
"""

from __future__ import annotations

import io
import json
import marshal
import pickle
import re
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter, lt
from typing import TYPE_CHECKING, Any, NoReturn, cast

from ddpdoctor.logs.lines import DocumentFormat, Found
from ddpdoctor.logs.stacks import foreign_frame
from ddpdoctor.model.log_facts import MOST_RANKS, FlightCall, FlightDump, FlightGroup, FlightTransfer, Spot
from ddpdoctor.model.reading import no_collection
from ddpdoctor.model.words import dtype_name, op_name
from ddpdoctor.recorder.storage.flight import parse_cut_pickle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpdoctor.logs.lines import Document
    from ddpdoctor.model.stacks import Frame

_Entry = dict[str, Any]

# From ProcessGroupNCCL.cpp: "recv 1<-0" has ranks within the group, "?" is any source. TorchComms names no ranks.
_TRANSFER = re.compile(r"(send|recv)(?: (\d+)(?:->|<-)(\d+|\?))?")
_ENDS = ("coalesced", "_coalesced")  # entries that end a batch, and whose state is that of the batch's other entries
# Backends whose entries are only marked as retired when they have ended.
_NEVER_COMPLETED = frozenset({"gloo", "nccl2", "nccl-lazy", "c10d"})
# With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch compares fingerprints of this size in groups of its own.
_HELPER_NUMELS = frozenset({1, 3, 7})
_MOST_NUMBER = 2**63
_MOST_FRAMES = 100
_MOST_TIMES = 256  # our choice: of so many calls at the end of each group a picture needs the times
_DEFAULT = "default_pg"

# What an entry must have. Recorders before 2.7 lack some of it.
_TYPES: dict[str, frozenset[type]] = {
    "process_group": frozenset({tuple, list}), "profiling_name": frozenset({str}), "state": frozenset({str}),
    "collective_seq_id": frozenset({int}), "record_id": frozenset({int}), "time_created_ns": frozenset({int}),
    "input_sizes": frozenset({list, tuple}), "output_sizes": frozenset({list, tuple}),
    "input_dtypes": frozenset({list, tuple}),
}  # fmt: skip
_DEFAULTS = {"collective_seq_id": 0, "record_id": 0, "time_created_ns": 0, "input_sizes": [], "output_sizes": [],
             "input_dtypes": []}  # fmt: skip
_pick = itemgetter(*_TYPES)
_pick_call = itemgetter("profiling_name", "input_sizes", "output_sizes", "input_dtypes")


@dataclass(slots=True)
class _Gathered:
    name: str
    desc: str
    collectives: list[_Entry] = field(default_factory=list)
    transfers: list[_Entry] = field(default_factory=list)


def build_dump(body: _Entry, rank: int | None, source: str, problem: str) -> FlightDump | None:
    """Return the calls of a dump, or None if it has none of a dump's keys. ``rank`` is the one in the file's name."""
    if not body.keys() & {"entries", "pg_config"}:
        return None
    config = _config(body.get("pg_config"))
    entries = _sound(_list(body.get("entries")))
    one_counter = _is_torchcomms(body, entries)
    gathered = _gather(entries)
    groups = [_build_group(group, config.get(group.name), one_counter=one_counter) for group in gathered]
    several = len(gathered) > 1
    kept = [group for group, those in zip(groups, gathered, strict=True) if not (several and _is_helper(those))]
    idle = [
        FlightGroup(
            name, desc, members, (), array("I"), array("q"), 0, knows_ends=True, timed_out=False, limit_s=None,
            pending_ns=None, pending_frames=(), pending_in_backward=False, last_frames=(), transfers=(), made={},
        )
        for name, (desc, members) in config.items() if members and name not in {group.name for group in gathered}
    ]  # fmt: skip
    times = [entry["time_created_ns"] for entry in (entries[:1] + entries[-1:])]
    if rank is None:  # "send 0->1" begins with the own rank in the group
        ends = (
            (members, found[2])
            for group in gathered
            if (members := config.get(group.name, ("", None))[1])
            for entry in group.transfers
            if (found := _TRANSFER.fullmatch(_op(entry))) and found[2] and len(found[2]) < 8
        )
        rank = next((members[int(place)] for members, place in ends if int(place) < len(members)), None)
    # The size of the default group; without it, the ranks that all groups need
    default = [members for name, (desc, members) in config.items() if members and (desc == _DEFAULT or name == "0")]
    every = default or [members for _, members in config.values() if members]
    return FlightDump(
        rank=rank, spot=Spot(source=source), version=str(body.get("version", ""))[:16], groups=(*kept, *idle),
        world_size=max((max(len(members), max(members) + 1) for members in every), default=None),
        wrapped=bool(entries) and entries[0]["record_id"] > 0, one_counter=one_counter,
        first_ns=min(times, default=None), last_ns=max(times, default=None),
        has_frames=any(entry.get("frames") for entry in entries[-1:]), damaged=problem,
    )  # fmt: skip


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _sound(plain: list[Any]) -> list[_Entry]:
    """Return the entries that have what the columns need, oldest first."""
    entries = [entry for entry in plain if isinstance(entry, dict)]
    try:
        rows = list(map(_pick, entries))
    except KeyError:
        entries = [{**_DEFAULTS, **entry} for entry in entries if entry.keys() >= {"process_group", "profiling_name"}]
        rows = [tuple(map(entry.get, _TYPES)) for entry in entries]
    columns = list(zip(*rows, strict=True))
    typed = all(set(map(type, column)) <= types for column, types in zip(columns, _TYPES.values(), strict=False))
    if not typed or any(max(column) >= _MOST_NUMBER or min(column) < -1 for column in columns[3:6]):
        entries = [
            entry
            for entry, row in zip(entries, rows, strict=True)
            if all(type(value) in types for value, types in zip(row, _TYPES.values(), strict=True))
            and all(-1 <= number < _MOST_NUMBER for number in row[3:6])
        ]
    # A group is its name and perhaps a description.
    groups = ((entry, entry["process_group"]) for entry in entries)
    entries = [entry for entry, group in groups if group and isinstance(group[0], str) and isinstance(group[-1], str)]
    return sorted(entries, key=itemgetter("record_id"))  # as they stand in almost every dump, which is quick


def _column(entries: Sequence[_Entry], name: str) -> list[Any]:
    return [entry[name] for entry in entries]


def _config(plain: object) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Return description and members of each group. Members stand in a list or a text; Gloo's is empty: unknown."""
    found: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for name, pg in (plain if isinstance(plain, dict) else {}).items():
        if isinstance(pg, dict) and isinstance(name, str):
            members = pg.get("ranks")
            if isinstance(members, str) and len(members) < 16 * MOST_RANKS:
                members = [int(number) for number in re.findall(r"\d{1,9}", members)]
            ranks = [rank for rank in _list(members) if type(rank) is int and 0 <= rank < MOST_RANKS]
            is_sound = bool(ranks) and len(set(ranks)) == len(ranks)
            found[name] = str(pg.get("desc", "")), tuple(ranks) if is_sound else None
    return found


def _is_torchcomms(body: _Entry, entries: Sequence[_Entry]) -> bool:
    """Return whether TorchComms wrote it: its lists of ranks have no blanks, and its pg_status says nothing."""
    config = body.get("pg_config")
    texts = [pg.get("ranks") for pg in (config.values() if isinstance(config, dict) else ()) if isinstance(pg, dict)]
    plain = [text for text in texts if isinstance(text, str) and "," in text]
    unnamed = any(name.rpartition(":")[2] in ("send", "recv") for name in set(_column(entries, "profiling_name")))
    dense = bool(plain) and not any(", " in text for text in plain)
    return (dense or unnamed) and not body.get("pg_status") and not any(entry.get("is_p2p") for entry in entries)


def _gather(entries: Iterable[_Entry]) -> list[_Gathered]:
    found: dict[str, _Gathered] = {}
    is_transfer: dict[str, bool] = {}
    for entry in entries:
        group = entry["process_group"]
        those = found.get(group[0])
        if those is None:
            those = found[group[0]] = _Gathered(group[0], group[1] if len(group) > 1 else "")
        name = entry["profiling_name"]
        transfer = is_transfer.get(name)
        if transfer is None:
            transfer = is_transfer[name] = _TRANSFER.fullmatch(_op(entry)) is not None
        (those.transfers if transfer or entry.get("is_p2p") else those.collectives).append(entry)
    return list(found.values())


def _op(entry: _Entry) -> str:
    return cast("str", entry["profiling_name"]).rpartition(":")[2]


def _is_helper(group: _Gathered) -> bool:
    """Return whether torch compared fingerprints in it, under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    if not group.collectives or group.desc:
        return False
    gathers = (collective for collective in group.collectives if op_name(_op(collective)).startswith("all_gather"))
    sizes = [set(_numels(gather.get("input_sizes"))) for gather in gathers if _dtype(gather) == "int64"]
    return len(sizes) == len(group.collectives) and all(size <= _HELPER_NUMELS for size in sizes)


def _build_group(
    group: _Gathered, config: tuple[str, tuple[int, ...] | None] | None, *, one_counter: bool
) -> FlightGroup:
    entries = group.collectives
    numbers = [*range(1, len(entries) + 1)] if one_counter else _column(entries, "collective_seq_id")
    if all(map(lt, numbers, numbers[1:])):  # they rise
        # The different calls, and which of them each entry is: equal entries are found by their bytes.
        known: dict[bytes, int] = {}
        which = array("I", [known.setdefault(marshal.dumps(_pick_call(entry), 2), len(known)) for entry in entries])
        different = {number: entry for entry, number in zip(reversed(entries), reversed(which), strict=True)}
        calls: tuple[tuple[FlightCall, ...], ...] = tuple((_flight_call(different[at]),) for at in range(len(known)))
        ends = firsts = entries
    else:
        blocks = _blocks(entries)
        # The different blocks, and which of them each number is. The order within a block is free.
        ids: dict[tuple[FlightCall, ...], int] = {}
        which = array("I")
        for block in blocks:
            parts = [entry for entry in block if _op(entry) != _ENDS[0]] or block
            which.append(ids.setdefault(tuple(sorted(map(_flight_call, parts))), len(ids)))
        calls = tuple(ids)
        firsts, ends = [block[0] for block in blocks], [block[-1] for block in blocks]
        numbers = _column(firsts, "collective_seq_id")
    done, knows_ends, timed_out = _progress(ends)
    pending = firsts[done] if done < len(firsts) else None
    pending_transfers, made = _transfers(group.transfers)
    limit_ms = pending.get("timeout_ms") if pending is not None else None
    ended_ns = [end.get("time_discovered_completed_ns") for end in ends[-_MOST_TIMES:]]
    limit_s = limit_ms / 1000 if isinstance(limit_ms, int | float) and 0 < limit_ms < 1e12 else None
    by_autograd = pending is not None and str(pending.get("thread_name", "")).startswith("pt_autograd")
    desc, members = config or ("", None)
    return FlightGroup(
        name=group.name, desc=group.desc or desc, members=members, calls=calls, which=which, seq=array("q", numbers),
        done=done, knows_ends=knows_ends, timed_out=timed_out, limit_s=limit_s,
        pending_ns=pending["time_created_ns"] if pending is not None else None, pending_frames=_frames(pending),
        pending_in_backward=by_autograd and pending is not None and not pending.get("frames"),
        last_frames=_frames(entries[-1] if entries else None), transfers=pending_transfers, made=made,
        last_made_ns=array("q", _column(firsts[-_MOST_TIMES:], "time_created_ns")),
        last_ended_ns=array("q", [ns if type(ns) is int and 0 < ns < _MOST_NUMBER else 0 for ns in ended_ns]),
    )  # fmt: skip


def _blocks(entries: Sequence[_Entry]) -> list[list[_Entry]]:
    """Return the entries of each number. A number that falls back, as that of another group would, is dropped."""
    blocks: list[list[_Entry]] = []
    last = -1
    for entry in entries:
        number = entry["collective_seq_id"]
        if number > last:
            blocks.append([entry])
            last = number
        elif number == last:
            blocks[-1].append(entry)
    return blocks


def _flight_call(entry: _Entry) -> FlightCall:
    sizes, numels_out = entry.get("input_sizes"), _numels(entry.get("output_sizes"))
    shape = next(iter(_shapes(sizes)), ())
    return FlightCall(op_name(_op(entry)), _numels(sizes), numels_out, shape, _dtype(entry))


def _shapes(sizes: object) -> list[tuple[int, ...]]:
    shapes = [size for size in _list(sizes) if isinstance(size, list | tuple)]
    return [tuple(size if type(size) is int else -1 for size in shape) for shape in shapes]


def _numels(sizes: object) -> tuple[int, ...]:
    return tuple(prod(shape) for shape in _shapes(sizes))


def _dtype(entry: _Entry) -> str:
    names = _list(entry.get("input_dtypes")) or _list(entry.get("output_dtypes"))
    return dtype_name(str(names[0])[:32]) if names else ""


def _progress(entries: Sequence[_Entry]) -> tuple[int, bool, bool]:
    """Return how many calls have completed, whether the backend says so, and whether the next one timed out.

    The collectives of one group complete in order on a device, so all before a completed one have completed too.
    "Retired, not completed" means that the watchdog gave up on it, unless the backend marks every end that way.
    """
    states = _column(entries, "state")
    after = next((at + 1 for at in range(len(states) - 1, -1, -1) if states[at] == "completed"), 0)
    rest = entries[after:]
    if not rest:
        return after, True, False
    retired = [bool(entry.get("retired")) for entry in rest]
    if not _marks_only(entries):
        return after, True, retired[0]
    if all(retired):
        return len(entries) - 1, False, False
    return retired.index(False), True, False


def _marks_only(entries: Sequence[_Entry]) -> bool:
    """Return whether the backend marks the end of a call as retired only, and never as completed."""
    if not entries or entries[0]["profiling_name"].partition(":")[0] in _NEVER_COMPLETED:
        return not any(entry["state"] == "completed" for entry in entries)
    return len(entries) > 1 and all(entry["state"] == "scheduled" and entry.get("retired") for entry in entries)


def _transfers(entries: Sequence[_Entry]) -> tuple[tuple[FlightTransfer, ...], dict[tuple[str, int | None], int]]:
    """Return the sends and receives that have not completed, and how many there are of each kind and peer."""
    ended = {_block_of(entry): entry for entry in entries if _op(entry) == _ENDS[0]}
    marks_only = _marks_only(entries)
    made: dict[tuple[str, int | None], int] = {}
    pending: list[FlightTransfer] = []
    for entry in entries:
        found = _TRANSFER.fullmatch(_op(entry))
        if found is None:
            continue
        peer = int(found[3]) if found[3] and found[3].isdigit() and len(found[3]) < 8 else None
        key = found[1], peer
        made[key] = made.get(key, 0) + 1
        end = ended.get(_block_of(entry), entry)
        if end["state"] != "completed" and not (marks_only and end.get("retired")):
            numels = _numels(entry.get("input_sizes")) or _numels(entry.get("output_sizes"))
            numel, made_ns = numels[0] if numels else None, entry["time_created_ns"]
            pending.append(FlightTransfer(found[1], peer, made[key], numel, made_ns, _frames(entry)))
        else:
            # One stream serves a pair of ranks: what came before a completed transfer has completed too.
            pending = [transfer for transfer in pending if (transfer.op, transfer.peer) != key]
    return tuple(pending), made


def _block_of(entry: _Entry) -> tuple[object, object]:
    number = entry.get("p2p_seq_id")
    return number if isinstance(number, int) else 0, entry["collective_seq_id"]


def _frames(entry: _Entry | None) -> tuple[Frame, ...]:
    """Return the stack of an entry, outermost first. torch writes the innermost frame first."""
    found = [
        foreign_frame(str(frame.get("filename", "")), frame["line"], str(frame.get("name", "")))
        for frame in _list(entry.get("frames") if entry is not None else None)[:_MOST_FRAMES]
        if isinstance(frame, dict) and type(frame.get("line")) is int
    ]
    return tuple(reversed(found))


# Our choice: the most that unpickling one dump may add to the memory of the process. 2,000 entries take 10 MiB.
MOST_MEMORY = 2**30
_KEYS = (b"pg_config", b"entries", b"process_group", b"nccl_comm_state")
_PROTOCOLS = (b"\2", b"\3", b"\4", b"\5")  # of pickle
# torch appends the global rank to the prefix that a user may set: "/scratch/fr_12".
_LAST_NUMBER = re.compile(r"(\d+)(?:\.\w+)*$")


def _read_pickle(document: Document) -> Found:
    """Return the calls in the dump. If the file is truncated, return those before the cut."""
    problem = "cut off" if document.cut else ""
    with no_collection():
        try:
            with _memory_limit():
                # With peek() the unpickler reads ahead; with read() alone it asks for each opcode.
                stream = io.BufferedReader(io.BytesIO(document.body), len(document.body))
                body = _PlainUnpickler(stream).load()
        except Exception as error:  # noqa: BLE001 - any opcode of a hostile pickle may raise anything
            if isinstance(error, _NamesError):
                return Found(problem="it names Python objects, which real dumps never do: unpickling stopped there")
            problem = "cut off" if isinstance(error, EOFError | pickle.UnpicklingError) else "damaged"
            try:
                body = parse_cut_pickle(document.body)
            except ValueError as reason:
                return Found(problem=f"{problem}: {reason}")
        return _found(body, document, problem)


# The pickles that torch writes when a collective times out, or when its pipe is written to.
FLIGHT_PICKLE = DocumentFormat(
    "flight recorder dump",
    lambda head: (
        head[:1] == b"\x80" and head[1:2] in _PROTOCOLS and b"version" in head and any(k in head for k in _KEYS)
    ),
    _read_pickle,
)


def _read_json(document: Document) -> Found:
    try:
        body = json.loads(document.body)
    except (ValueError, RecursionError):
        return Found(problem="cut off" if document.cut or not document.body.rstrip().endswith(b"}") else "damaged")
    return _found(body, document, "")


# The JSON of ``/handler/fr_trace_json``, ``dump_nccl_trace_json`` and ``_dump_fr_trace_json``.
FLIGHT_JSON = DocumentFormat(
    "flight recorder dump",
    lambda head: head.lstrip()[:1] == b"{" and b'"version"' in head and any(b'"' + key + b'"' in head for key in _KEYS),
    _read_json,
)


def _found(body: object, document: Document, problem: str) -> Found:
    rank = document.who.rank
    if rank is None:
        number = _LAST_NUMBER.search(document.source.rpartition("/")[2])
        rank = int(number[1]) if number and len(number[1]) < 8 and int(number[1]) < MOST_RANKS else None
    dump = build_dump(body, rank, document.source, problem) if isinstance(body, dict) else None
    return Found(dumps=[dump] if dump else [], problem=problem or ("" if dump else "not a flight recorder dump"))


class _NamesError(pickle.UnpicklingError):
    pass


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values only: a pickle that names a function or class is refused before anything is looked up."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _NamesError(f"{module}.{name}")


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the memory of the process: one opcode can ask the unpickler for 64 GiB."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as pages:  # noqa: PTH123 - it is read for each of thousands of dumps
            used = int(pages.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + MOST_MEMORY
        if soft == resource.RLIM_INFINITY or limit < soft:
            resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
