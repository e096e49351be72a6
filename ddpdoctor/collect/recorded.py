"""Reads what a rank recorded: its calls, its steps and their times, and the notes of its recorder.

Notes, answers and watch.json come from processes that may die at any instruction: ``Decoder`` reads them leniently.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from array import array
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

from ddpdoctor.model import facts, steps
from ddpdoctor.model.codec import INTEGERS, Decoder, WrongValue
from ddpdoctor.model.consistency import NonFinite
from ddpdoctor.model.data import EpochCall, EpochSeen, LoaderSeen
from ddpdoctor.model.stacks import Frame, Stack, StackSample
from ddpdoctor.model.words import dtype_name, op_name
from ddpdoctor.recorder.storage import flight, ring_layout
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.ring_layout import DEVICE_COLUMNS, DEVICE_PHASES, is_sampled, parts_of
from ddpdoctor.recorder.storage.secrets import hide_in_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ddpdoctor.recorder.storage.ring_reading import RingContent, Slots

Kind = TypeVar("Kind")

# The keys that recorders write, by field, where they differ from the field's name.
KEYS: dict[Any, dict[str, str]] = {
    Frame: {"file": "f", "line": "l", "function": "n", "user": "u"},
    Stack: {"is_main": "main", "is_daemon": "daemon"},
    StackSample: {"time_ns": "at"},
    facts.Raised: {"time_ns": "at", "thread_is_main": "main", "in_call": "call", "from_child": "child",
                   "passed_on_as": "as", "of_ranks": "ranks", "message": "text"},
    facts.ModelSeen: {"site": "frame"},
    facts.ReducerSaid: {"site": "frame"},
    NonFinite: {"is_nan": "nan", "in_a_row": "row", "where": "frame"},
    facts.AtError: {"memory": "resident"},
    facts.StoreSought: {"of_agent": "agent", "set_at": "set"},
    steps.DataParallelSeen: {"site": "frame"},
    steps.HandReduced: {"site": "frame"},
    steps.GradientTimes: {"number": "n", "cap_bytes": "cap", "static_graph": "static", "bucket_view": "view",
                    "syncs_buffers": "buffers"},
    EpochCall: {"time_ns": "at"},
    EpochSeen: {"number": "p", "set_epoch": "e", "batches": "b", "drawn": "d", "total": "t", "xor": "x", "order": "o",
                "first": "f", "complete": "done", "batch_digests": "bp", "sample_digests": "sp", "backwards": "bw",
                "repeats": "re", "highest": "h", "split_after": "split", "begun_ns": "t0", "ended_ns": "t1"},
    LoaderSeen: {"number": "n", "dataset": "ds", "dataset_digest": "dp", "samples": "N", "batch_size": "bs",
                 "drop_last": "dl", "iterable": "it", "workers": "w", "part_of": "of"},
}  # fmt: skip
# The columns of a ``device_times`` note: group, sequence number, operation, milliseconds.
_ROWS = ([str, int, str, float], [str, int, str, int])
# From ProcessGroupNCCL.cpp and FlightRecorderHook.cpp: "recv 1<-0" has ranks within the group, "?" is any source.
_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+|\?)")
ENDS = {
    ring_layout.STEP_COLLECTIVE: steps.StepEnd.COLLECTIVE,
    ring_layout.STEP_BACKWARD: steps.StepEnd.BACKWARD,
    ring_layout.STEP_OPTIMIZER: steps.StepEnd.OPTIMIZER,
    ring_layout.STEP_REDUCED: steps.StepEnd.REDUCTION,
}
MOST_RANKS = 2**18  # our choice: more than twice the size of the largest known jobs
FETCH_CELLS = 4
DEFAULT_GROUP = "0"
_MESH, _MESH_OF_ALL = "mesh_", "mesh_default"
# Columns of a ``ring_layout.STEP`` row: number, end, group, flags, then each phase, then each phase's wait.
_NUMBER, _ENDED, _GROUP, _FLAGS, _FIRST_PHASE = range(5)
_WAITS, _INSIDE = _FIRST_PHASE + 4, _FIRST_PHASE + 8
_CPU = {
    "before": "cpu_before_us",
    "forward": "cpu_forward_us",
    "between": "cpu_between_us",
    "backward": "cpu_backward_us",
    "data": "data_cpu_us",
}
MOST_CHILDREN = 16  # ended ones of a rank: a DataLoader without persistent workers ends some each epoch
MAX_TEXT_BYTES = 64 * 2**20  # our choice: a million rows; run folders can come from strangers
_shared_frame = lru_cache(maxsize=4096)(Frame)  # thousands of ranks have equal ones


def read_record(kind: type[Kind], entry: Any, lost: list[str] | None = None, **known: Any) -> Kind:
    """Return a record from what was written, with the ``known`` fields; keys of damaged values go to ``lost``.

    Raises ``WrongValue`` if a field that has neither a default nor an empty value is damaged.
    """
    found: Kind = _RECORDS.record(kind, entry if isinstance(entry, dict) else {}, known, lost)
    return found


def read_or_none(kind: type[Kind], entry: Any) -> Kind | None:
    """Return a record, or None if the entry is empty or damaged as a whole."""
    try:
        found: Kind | None = None if entry is None else _RECORDS.of(kind)(entry)
    except WrongValue:
        return None
    return found


def read_all(kind: type[Kind], entries: Any) -> tuple[Kind, ...]:
    """Return the records in a list, without damaged ones."""
    return tuple(record for entry in dicts(entries) if (record := read_or_none(kind, entry)) is not None)


def find_note(notes: Iterable[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    """Return the first note of these kinds, or an empty one."""
    return next((note for note in notes if note.get("k") in kinds), {})


def whole_or_0(value: Any) -> int:
    """Return a number that was written, or 0 for anything else."""
    return value if isinstance(value, int) else 0


def dicts(value: Any) -> list[dict[str, Any]]:
    """Return the dicts in a list that was read as JSON, without damaged entries."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _read_frame(value: Any) -> Frame:
    """Return a frame as the recorder writes it, or a user's line as a list of three."""
    parts = value
    if isinstance(value, dict):
        parts = [value.get(key) for key in KEYS[Frame].values()]
    elif isinstance(value, list) and len(value) == 3:
        parts = [*value, 1]
    if isinstance(parts, list) and [*map(type, parts)] == [str, int, str, int] and parts[1] in INTEGERS:
        return _shared_frame(file=parts[0], line=parts[1], function=parts[2], user=bool(parts[3]))
    if not (value and isinstance(value, dict)):
        raise WrongValue("a stack frame was expected")
    return read_record(Frame, value)


_RECORDS = Decoder(KEYS, {Frame: _read_frame})


def read_errors(notes: list[dict[str, Any]]) -> tuple[facts.Raised, ...]:
    """Return each exception once: it is noted when its call fails, and again when it ends the process."""
    found: list[facts.Raised] = []
    for note in notes:
        if note.get("k") != "raised":
            continue
        raised = read_error(note)
        if found and not found[-1].uncaught and (found[-1].type, found[-1].message) == (raised.type, raised.message):
            found.pop()
        found.append(raised)
    return tuple(found)


def read_error(note: dict[str, Any]) -> facts.Raised:
    """Return an exception from its note."""
    # An error's text. If a child passed the error on, that is the last line of the child's traceback.
    text = hide_in_text(str(note.get("text")))  # earlier recorders did not hide secrets
    lines = [line for line in text.splitlines() if line.strip()]
    return read_record(
        facts.Raised,
        note,
        message=lines[-1].removeprefix(f"{note.get('type')}: ") if note.get("child") and lines else text,
    )


def read_samples(answer: dict[str, Any]) -> tuple[StackSample, ...]:
    """Return the stack samples of an answer."""
    return tuple(read_record(StackSample, sample, by="sampler") for sample in dicts(answer.get("looks")))


def read_groups(entries: Any) -> tuple[facts.GroupState, ...]:
    """Return the process groups that a rank reported, without damaged entries."""
    found = []
    for entry in dicts(entries):
        ranks, desc = entry.get("ranks"), entry.get("desc")
        if isinstance(ranks, list) and set(map(type, ranks)) <= {int}:
            ranks = tuple(number for number in ranks if number in INTEGERS)
        # A tuple comes from ``parse_group_json``, checked.
        if "name" in entry and isinstance(entry.get("enqueued"), int) and isinstance(ranks, tuple):
            # torch's device mesh writes the dimension into the description.
            is_mesh = isinstance(desc, str) and desc.startswith(_MESH) and desc != _MESH_OF_ALL
            mesh_dim = str(desc).removeprefix(_MESH) if is_mesh else ""
            timeout_s = read_seconds(entry.get("timeout_s"))
            found.append(read_record(facts.GroupState, entry, ranks=ranks, mesh_dim=mesh_dim, timeout_s=timeout_s))
    return tuple(found)


def read_seconds(value: Any) -> float | None:
    """Return a duration that a recorder wrote, or None if the value is not a positive number."""
    return float(value) if type(value) in {int, float} and 0 < value < math.inf else None


def believed(world_size: int | None) -> int | None:
    """Return the world size, or None if only a damaged file can hold one so large: rules loop over all ranks."""
    return world_size if world_size is not None and world_size <= MOST_RANKS else None


def read_lacks(entries: Iterable[dict[str, Any]]) -> tuple[str, ...]:
    """Return the recorder hooks that found no place in torch, from a ring's notes or an agent's log."""
    noted = [entry.get("lacks") for entry in entries if entry.get("k") == "hooks"]
    return tuple(sorted({str(hook) for hooks in noted if isinstance(hooks, list) for hook in hooks}))


def read_log(slots: Slots) -> facts.CallLog:
    """Return all calls of a ring, including those that have not ended."""
    kinds = tuple(
        facts.CallKind(
            op=slot.op, api=slot.api or slot.op, group=slot.group, dtype=slot.dtype or None, shape=slot.shape,
            tensors=slot.tensors, peer=slot.peer if slot.peer >= 0 else None, redop=slot.redop or None,
            site=read_or_none(Frame, slot.site), is_async=bool(slot.flags & ring_layout.FLAG_ASYNC),
            failed=bool(slot.flags & ring_layout.FLAG_FAILED), thread_is_main=bool(slot.flags & ring_layout.FLAG_MAIN),
        )
        for slot in slots.kinds
    )  # fmt: skip
    return facts.CallLog(kinds, (slots.which, slots.numbers, slots.seqs, slots.started_ns, slots.ended_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the flight recorders of one rank hold: the oldest pending entries, and the last timed ones."""

    entries: tuple[dict[str, Any], ...] = ()
    wall_ahead_ns: int | None = None  # CLOCK_REALTIME, which entries use, minus CLOCK_MONOTONIC
    timed: bool = False  # Whether torch knows when a kernel starts. If so, "scheduled" means queued.
    idle: bool | None = None  # nothing is left to do on the default streams of its devices

    @property
    def untold(self) -> dict[str, Any] | None:
        """The last call of which torch does not tell whether it has completed, or None if torch tells."""
        return next(filter(flight.is_untold, self.entries), None)


def read_flight(evidence: dict[str, Any]) -> Recorded:
    """Return the flight recorder's entries from a rank's answer; earlier versions wrote a bare list of entries."""
    body = evidence.get("flight_recorder")
    if not isinstance(body, dict):
        return Recorded(entries=tuple(flight.chosen(body)))
    wall, at = body.get("wall_ns"), body.get("at")
    ahead = wall - at if isinstance(wall, int) and isinstance(at, int) else None
    entries = flight.chosen(body.get("entries"))
    timed, idle = body.get("timed") == 1 or _shows_times(entries), body.get("idle")
    idle = bool(idle) if idle in (0, 1) else None
    return Recorded(entries=tuple(entries), wall_ahead_ns=ahead, timed=timed, idle=idle)


def read_dump(folder: Path, content: RingContent) -> Recorded | None:
    """Return what torch dumped when it aborted a process, or None without a readable dump."""
    for path in sorted((folder / "evidence").glob(f"{content.pid}-{content.start_ticks}.flight*")):
        try:
            body = flight.parse_plain_pickle(read_plain(path, flight.MOST_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(body, dict):
            ahead_ns = content.cells["started_wall_ns"] - content.cells["started_ns"]
            entries = flight.chosen(body.get("entries"))
            return Recorded(entries=tuple(entries), wall_ahead_ns=ahead_ns, timed=_shows_times(entries))
    return None


def _shows_times(entries: Sequence[dict[str, Any]]) -> bool:
    """Return whether torch timed kernels: under DETAIL it does that by default."""
    return any(entry["state"] == "started" or "duration_ms" in entry for entry in entries)


def pending_on_device(
    recorded: Recorded, log: facts.CallLog, groups: Sequence[facts.GroupState]
) -> tuple[facts.Call, ...]:
    """Return the oldest operation of each group, and of each pair of ranks, that has not completed on the device.

    The oldest comes first and has the highest index, because it holds the rank up. Calls that C++ made have no site.
    If torch does not report what has completed, the last call counts as long as its device has work.
    """
    pending = [entry for entry in recorded.entries if flight.is_pending(entry)]
    untold = recorded.untold if recorded.idle is False else None
    if untold is not None and all(entry["time_created_ns"] < untold["time_created_ns"] for entry in pending):
        pending.append(untold)
    last = max(log.indexes, default=0)
    return tuple(_as_call(entry, recorded, log, groups, last + len(pending) - at) for at, entry in enumerate(pending))


def device_times(recorded: Recorded, notes: Sequence[dict[str, Any]] = ()) -> tuple[facts.DeviceTime, ...]:
    """Return how long the last completed collectives ran, else by the note before groups are destroyed."""
    rows = [
        (entry["process_group"][0], entry["collective_seq_id"], _op(entry), entry["duration_ms"])
        for entry in recorded.entries
        if entry["state"] == "completed" and 0 <= entry.get("duration_ms", -1) < 1e12
    ]
    if not rows:
        noted = find_note(reversed(notes), "device_times").get("rows") or ()
        sound = (row for row in noted if isinstance(row, list) and [*map(type, row)] in _ROWS and 0 <= row[3] < 1e12)
        rows = [(group, seq, op_name(op), ran_ms) for group, seq, op, ran_ms in sound]
    return tuple(facts.DeviceTime(group=group, seq=seq, op=op, ran_ms=float(ran_ms)) for group, seq, op, ran_ms in rows)


def _as_call(
    entry: dict[str, Any], recorded: Recorded, log: facts.CallLog, groups: Sequence[facts.GroupState], index: int
) -> facts.Call:
    group, ahead_ns = entry["process_group"][0], recorded.wall_ahead_ns
    created_ns = None if ahead_ns is None else entry["time_created_ns"] - ahead_ns
    # The global rank of the peer, or None for any source or if the group's ranks are unknown
    match = _POINT_TO_POINT.fullmatch(flight.op_of(entry))
    place = int(match[2]) if match is not None and match[2].isdigit() else None
    ranks = next((state.ranks for state in groups if state.name == group), ())
    peer = ranks[place] if place is not None and place < len(ranks) else None
    known = _known_call(entry, log, peer, created_ns)
    if known:
        shared = known.shared()
    else:  # C++ made it: what the entry says about its kind, with dtype and shape of the first input
        sizes: Any = entry.get("input_sizes")
        dtypes: Any = entry.get("input_dtypes")
        has_inputs = bool(isinstance(sizes, list) and isinstance(dtypes, list) and sizes and dtypes)
        first = sizes[0] if has_inputs else None
        shape = tuple(first) if isinstance(first, list) and set(map(type, first)) <= {int} else None
        dtype = f"torch.{dtype_name(str(dtypes[0]))}" if has_inputs else None
        shared = {"op": _op(entry), "api": "", "dtype": dtype, "shape": shape, "peer": None, "redop": None,
                  "tensors": len(sizes) if has_inputs else 0, "site": None}  # fmt: skip
    shared |= {"op": _op(entry), "peer": peer} if entry["is_p2p"] else {}
    is_scheduled = entry["state"] == "scheduled" and recorded.timed
    state = facts.DeviceState.SCHEDULED if is_scheduled else facts.DeviceState.UNKNOWN
    if entry["state"] == "started":
        state = facts.DeviceState.STARTED
    elif flight.backend_of(entry) in flight.HOOKED:
        state = facts.DeviceState.UNTOLD if flight.is_untold(entry) else facts.DeviceState.UNTIMED
    return facts.Call(
        **{**shared, "group": group, "is_async": False, "failed": False, "thread_is_main": True},
        index=index,
        seq=None if entry["is_p2p"] else entry["collective_seq_id"],
        started_ns=created_ns if created_ns is not None else known.started_ns if known else 0,
        ended_ns=None,
        device_state=state,
        native=known is None,
    )


def _op(entry: dict[str, Any]) -> str:
    name = flight.op_of(entry)
    match = _POINT_TO_POINT.fullmatch(name)
    return match[1] if match else op_name(name)


def _known_call(
    entry: dict[str, Any], log: facts.CallLog, peer: int | None, created_ns: int | None
) -> facts.Call | None:
    """Return the call that made an entry (of a send the last with this peer before it), or None if C++ did."""
    op, group, number = _op(entry), entry["process_group"][0], entry.get("collective_seq_id")
    single = op.removesuffix("_single") if flight.backend_of(entry) in flight.HOOKED else None
    kinds = set()
    for place, kind in enumerate(log.kinds):
        if entry["is_p2p"]:
            made_it = (kind.op in (op, f"i{op}") and kind.peer == peer) or kind.op == "batch_isend_irecv"
        else:  # a hook keeps its own count, which may differ from the group's
            made_it = kind.numbered and single in {None, kind.op.removesuffix("_single")}
        if made_it and kind.group == group:
            kinds.add(place)
    for at in range(len(log) - 1, -1, -1) if kinds else ():
        if log.which[at] in kinds and (
            (created_ns is None or log.started_ns[at] <= created_ns) if entry["is_p2p"] else log.numbers[at] == number
        ):
            return log[at]
    return None


def device_facts(
    folder: Path, content: RingContent, evidence: dict[str, Any], log: facts.CallLog, *, is_over: bool
) -> dict[str, Any]:
    """Return fields of a ``Rank``: its groups, and the calls that have not ended on the host or on the device."""
    # The rank last reported its groups in its evidence or at a failed call. Evidence of a slow start is out of date if
    # the job fails later: then the calls count instead.
    # By group, the highest number among ended calls and the starts of phases
    highest: dict[str, int] = {}
    open_calls = log.open()
    for kind, at in log.last.items():
        name = kind.group or DEFAULT_GROUP
        number = log.numbers[at] - (1 if kind.numbered and not log.ended_ns[at] else 0)
        if log.numbers[at] > 0 and kind.op != "work_wait":
            highest[name] = max(highest.get(name, 0), number)
    raised = (note for note in reversed(content.notes) if note.get("k") == "raised")
    reported = [found for entry in (evidence, *raised) if (found := read_groups(entry.get("groups")))]
    members = {group.name: group.ranks for groups in reported[:1] for group in groups}
    inferred = tuple(
        facts.GroupState(name=name, ranks=members.get(name, ()), backend="", enqueued=number)
        for name, number in sorted(highest.items())
    )
    fresh = (groups for groups in reported if all(highest.get(group.name, 0) <= group.enqueued + 1 for group in groups))
    groups = next(fresh, inferred)
    # torch's dump is newer than the answer of a process that has ended.
    dumped = read_dump(folder, content) if is_over or not evidence else None
    recorded = dumped or read_flight(evidence)
    on_nccl = "nccl" in str(find_note(reversed(content.notes), "initialized").get("backend")).lower()
    unread = dumped is None and evidence.get("flight_recorder") is None and not is_over
    return {
        "groups": groups,
        "device_unread": (on_nccl and unread) or (recorded.untold is not None and recorded.idle is None),
        "device_idle": recorded.idle,
        "open_calls": (*open_calls, *pending_on_device(recorded, log, groups)),
        "device_times": device_times(recorded, content.notes),
    }


def read_steps(content: RingContent) -> steps.StepTimes | None:
    """Return the last steps that ended in the same way as the latest one, or None without steps."""
    columns = content.steps
    if not columns:
        return None
    group, kind = columns[_GROUP][-1], columns[_FLAGS][-1] & ring_layout.STEP_KIND
    alike = [row == (group, kind) for row in zip(columns[_GROUP], columns[_FLAGS], strict=True)]
    kept = columns if all(alike) else [array(column.typecode, compress(column, alike)) for column in columns]
    return steps.StepTimes(
        ends_with=ENDS[kind],
        group=content.strings.get(group, ""),
        unknown=columns[_FLAGS].count(kind | ring_layout.STEP_WAIT_UNKNOWN),
        numbers=kept[_NUMBER],
        ended_ns=kept[_ENDED],
        phases_us=kept[_FIRST_PHASE:_WAITS],
        waits_us=kept[_WAITS:_INSIDE],
    )


def read_first_step(content: RingContent) -> int | None:
    """Return when a process ended its first step, or None: in a long run inferred from the pace of the known steps."""
    known: list[tuple[int, int]] = sorted(
        (number, ended_ns)
        for columns in (content.kept, content.steps)
        for number, ended_ns in zip(*columns[: _ENDED + 1], strict=True)
    )
    if not known:
        return None
    (first, first_ns), (last, last_ns) = known[0], known[-1]
    pace_ns = (last_ns - first_ns) / (last - first) if last > first else 0
    inferred_ns = first_ns - round((first - 1) * pace_ns)
    return max(content.cells["started_ns"], inferred_ns)


def read_lines(
    content: RingContent, children: Iterable[RingContent], ended: Iterable[tuple[str, int, str, int]] = ()
) -> tuple[steps.LineSeen, ...]:
    """Return where a rank and its children were sampled, the most frequent first; ``ended``: kept by the watcher."""
    found = []
    for seen, in_child in ((content, False), *((child, True) for child in children)):
        for sampled in seen.lines:
            place = read_or_none(Frame, sampled.site)
            calls_module, phase = divmod(sampled.phase, ring_layout.CALLS_MODULE)
            if place is not None and calls_module in {0, 1}:
                line = steps.LineSeen(frame=place, phase=steps.Phase(phase), times=sampled.times, in_child=in_child)
                found.append(replace(line, calls_module=bool(calls_module)))
    for file, number, function, times in ended:
        frame = Frame(file=file, line=number, function=function, user=True)
        found.append(steps.LineSeen(frame=frame, phase=steps.Phase.BEFORE, times=times, in_child=True))
    return tuple(sorted(found, key=lambda line: (line.calls_module, -line.times)))


def read_fetches(
    children: Iterable[RingContent], ended: tuple[int, ...] = (), workers: int | None = None
) -> steps.FetchTimes | None:
    """Return what loader workers made and how long it took; ``ended`` sums up those that have ended."""
    current = [fetch_cells(child) for child in children]
    known = len(ended) in {FETCH_CELLS - 1, FETCH_CELLS}  # older versions kept no processor time
    before = (*ended, 0)[:FETCH_CELLS] if known else (0,) * FETCH_CELLS
    batches, making_ns, pauses_ns, cpu_ns = map(sum, zip(before, *current, strict=True))
    if not batches:
        return None
    return steps.FetchTimes(
        batches=batches, making_ms=making_ns / 1e6, pauses_ms=pauses_ns / 1e6, cpu_ms=cpu_ns / 1e6, workers=workers
    )


def fetch_cells(content: RingContent) -> tuple[int, int, int, int]:
    """Return how many batches a child has made, how long that took, its pauses, its processor time, all in ns."""
    cells = content.cells
    return cells["fetches"], cells["fetching_ns"], cells["fetch_pauses_ns"], cells["fetching_cpu_ns"]


def find_children(contents: Mapping[int, RingContent]) -> dict[int, list[RingContent]]:
    """Return the recorded children of each process, by its pid; a fork server's children count as its parent's."""
    found: dict[int, list[RingContent]] = {}
    for content in contents.values():
        owner = owner_of(content, contents.get)
        if owner is not None:
            found.setdefault(owner, []).append(content)
    return found


def errors_of_child(content: RingContent) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield the errors that ended a child's main thread, as watch.json has them, each with the pid of its rank."""
    note = find_note(content.notes, "process") if content.role == ring_layout.ROLE_CHILD else {}
    rank = note.get("rank_pid") or note.get("ppid")
    if not isinstance(rank, int):
        return
    for raised in content.notes:
        is_end = raised.get("k") == "raised" and raised.get("uncaught") and raised.get("main")
        if is_end and raised.get("type") != "KeyboardInterrupt":
            yield rank, {"who": facts.Helper.CHILD.value, "name": str(content.pid), "error": raised}


def owner_of(content: RingContent, find: Callable[[int], RingContent | None]) -> int | None:
    """Return the pid that a child works for (a fork server's is its starter's), or None; ``find`` returns a ring."""
    parent = parent_of(content)
    between = find(parent) if parent is not None else None
    return (parent_of(between) or parent) if between is not None else parent


def parent_of(content: RingContent) -> int | None:
    """Return the pid of the process that started a child, or None for a rank."""
    parent = find_note(content.notes, "process").get("ppid")
    return parent if content.role == ring_layout.ROLE_CHILD and isinstance(parent, int) else None


def read_speed(content: RingContent) -> steps.Speed | None:
    """Return the speed of a rank, or None if no steps were recorded, or an older version recorded them."""
    columns = content.steps
    if not columns or len(columns) < _INSIDE + len(ring_layout.STEP_INSIDE):
        return None
    key = columns[_GROUP][-1], columns[_FLAGS][-1] & ring_layout.STEP_KIND
    totals = {
        part: steps.PartTotal(sum_ms=row[0] / 1e3, bins=row[1:])
        for part, row in zip(ring_layout.PARTS, content.totals, strict=False)
    }
    cells, notes = content.cells, content.notes
    # The steps that ended in the same group, by the same event
    rows = [row for row in zip(*content.kept, strict=True) if (row[_GROUP], row[_FLAGS] & ring_layout.STEP_KIND) == key]
    split = [parts_of(row[_FIRST_PHASE:_WAITS], row[_WAITS:_INSIDE], row[_INSIDE:], row[_FLAGS]) for row in rows]
    parts = {part: array("f", (row[i] / 1e3 for row in split)) for i, part in enumerate(ring_layout.PARTS)}
    unsplit = parts.pop("unsplit")
    parts["backward"] = array("f", map(add, parts["backward"], unsplit))
    inside = {name: array("I", (row[_INSIDE + i] for row in rows)) for i, name in enumerate(ring_layout.STEP_INSIDE)}
    kept = steps.StepParts(
        numbers=array("Q", (row[0] for row in rows)), parts_ms=parts,
        is_even=bytes(is_sampled(row[0], cells["sample_bits"]) for row in rows),
        is_split=bytes(not row[_FLAGS] & ring_layout.STEP_WAIT_UNKNOWN for row in rows),
        cpu_ms={name: array("f", (value / 1e3 for value in inside[column])) for name, column in _CPU.items()},
        reductions=inside["reductions"], backwards=inside["backwards"], input_rows=inside["input_rows"],
        input_numel=inside["input_numel"], ended_ns=array("Q", (row[_ENDED] for row in rows)),
    )  # fmt: skip
    names = ("trained_ns", "main_cpu_ns", "run_delay_ns", "others_delay_ns")
    elapsed_ms, cpu_ms, queued_ms, others_ms = (cells[name] / 1e6 for name in names)
    core_time = steps.CoreTime(
        elapsed_ms=elapsed_ms, on_core_ms=cpu_ms, queued_ms=queued_ms, others_queued_ms=others_ms
    )
    return steps.Speed(
        ends_with=ENDS[key[1]],
        group=content.strings.get(key[0], ""),
        count=cells["steps_recorded"],
        sample_bits=cells["sample_bits"],
        kept=kept,
        totals=totals,
        core_time=core_time if elapsed_ms else None,
        surroundings=read_or_none(steps.Surroundings, find_note(notes, "surroundings")),
        data_parallel=read_all(steps.DataParallelSeen, [note for note in notes if note["k"] == "data_parallel"]),
        hand_reduced=read_or_none(steps.HandReduced, find_note(notes, "hand_reduced")),
        # The last note counts: it is written again from time to time.
        collected_at=read_or_none(Frame, find_note(reversed(notes), "collected").get("frame")),
        device=read_device_steps(notes),
    )


def read_device_steps(notes: Sequence[dict[str, Any]]) -> steps.DeviceSteps | None:
    """Return the steps, or None if none was measured. The last note counts."""
    columns = unpack_columns(str(find_note(reversed(notes), "device_steps").get("columns", "")))
    rows = [row for row in _lists(columns.get("rows")) if len(row) == len(DEVICE_COLUMNS)]
    if not rows:
        return None
    by_name = dict(zip(DEVICE_COLUMNS, zip(*rows, strict=True), strict=True))
    return steps.DeviceSteps(
        numbers=by_name["number"], device_ms={phase: _ms(by_name[f"gpu_{phase}_us"]) for phase in DEVICE_PHASES},
        host_ms={phase: _ms(by_name[f"host_{phase}_us"]) for phase in DEVICE_PHASES}, data_ms=_ms(by_name["data_us"]),
        data_cpu_ms=_ms(by_name["data_cpu_us"]), gc_ms=_ms(by_name["gc_us"]), input_rows=by_name["rows"],
        input_numel=by_name["numel"], reductions=by_name["reductions"], backwards=by_name["backwards"],
        behind=by_name["behind"],
        exposed_ms={row[0]: row[1] / 1e3 for row in _lists(columns.get("reduced")) if len(row) == 2},
    )  # fmt: skip


def _lists(value: Any) -> list[list[int]]:
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and all(isinstance(cell, int) for cell in row)]


def _ms(column_us: Sequence[int]) -> tuple[float, ...]:
    return tuple(us / 1e3 for us in column_us)


def read_gradient_times(notes: list[dict[str, Any]]) -> tuple[steps.GradientTimes, ...]:
    """Return what was read of each DDP model, in the order of their first reductions. A model's last note counts."""
    last = {whole_or_0(note.get("n")): note for note in notes if note.get("k") == "gradient_times"}
    found = []
    for _, note in sorted(last.items()):
        columns = unpack_columns(str(note.get("columns", "")))
        columns = {name: column for name, column in columns.items() if isinstance(column, list)}
        sizes, ready, buckets = (
            tuple(n for n in columns.get(name, ()) if isinstance(n, int)) for name in ("sizes", "ready", "buckets")
        )
        if sizes and len(sizes) == len(ready):  # else it is damaged
            end_ms, exposed_ms = (whole_or_0(note.get(name)) / 1e3 for name in ("compute_us", "exposed_us"))
            ready_ms = tuple(us / 1e3 if us >= 0 else None for us in ready)
            known: dict[str, Any] = {"compute_end_ms": end_ms, "exposed_ms": exposed_ms, "ready_ms": ready_ms}
            found.append(read_record(steps.GradientTimes, note, sizes_bytes=sizes, bucket_bytes=buckets, **known))
    return tuple(found)


def read_models(notes: list[dict[str, Any]]) -> tuple[facts.ModelSeen, ...]:
    """Return the models in the order of their construction. Equal models have their rows in one note only."""
    wrapped = [note for note in notes if note.get("k") == "ddp" and note.get("digest")]
    packed = {str(note["digest"]): str(note["rows"]) for note in wrapped if note.get("rows")}
    return tuple(
        read_record(facts.ModelSeen, note, tensors=unpack(packed.get(str(note["digest"]), ""))) for note in wrapped
    )


def read_parameters(notes: list[dict[str, Any]]) -> tuple[facts.TensorSeen, ...]:
    """Return the parameters that optimizers train without DDP."""
    packed = [str(note["rows"]) for note in notes if note.get("k") == "named" and note.get("rows")]
    return tuple(tensor for rows in packed for tensor in unpack(rows))


@lru_cache(maxsize=64)
def unpack(packed: str) -> tuple[facts.TensorSeen, ...]:
    """Return the rows of a model, or () if they are missing or damaged; ranks with equal models share the cache."""
    try:
        rows = [(*row, None if row[2] is None else tuple(map(int, row[2]))) for row in _unpacked(packed)]
        return tuple(
            facts.TensorSeen(
                name=str(name), shape=shape, dtype=str(dtype), requires_grad=bool(requires_grad), is_buffer=kind == "b"
            )
            for kind, name, _, dtype, requires_grad, shape in rows
        )
    except (ValueError, TypeError):
        return ()


def unpack_columns(packed: str) -> dict[str, Any]:
    """Return the packed part of a note, or {} if it is damaged."""
    columns = _unpacked(packed)
    return columns if isinstance(columns, dict) else {}


def _unpacked(packed: str) -> Any:
    try:
        return json.loads(zlib.decompressobj().decompress(base64.b64decode(packed, validate=True), MAX_TEXT_BYTES))
    except (binascii.Error, zlib.error, ValueError):
        return []


def read_loaders(notes: Iterable[dict[str, Any]], evidence: dict[str, Any]) -> tuple[LoaderSeen, ...] | None:
    """Return the loaders in the order of first use, or None; later notes and the evidence replace earlier ones."""
    loaders: dict[int, dict[str, Any]] = {}
    passes: dict[int, dict[int, dict[str, Any]]] = {}
    strays: dict[int, dict[str, Any]] = {}
    for note in (*notes, *dicts(evidence.get("loaders"))):
        if note.get("k") == "loader":
            loaders[whole_or_0(note.get("n"))] = note
        elif note.get("k") == "pass":
            passes.setdefault(whole_or_0(note.get("l")), {})[whole_or_0(note.get("p"))] = note
        elif note.get("k") == "epoch_call":
            strays[whole_or_0(note.get("n"))] = note
    if not loaders:
        return None
    calls = [note for _, note in sorted(strays.items()) if not note.get("used")]
    found = []
    for number, note in sorted(loaders.items()):
        of_loader = sorted(passes.get(number, {}).items())
        ordered = [entry for _, entry in of_loader]
        epochs = tuple(read_record(EpochSeen, entry, trained=whole_or_0(entry.get("bw")) > 0) for entry in ordered)
        loader = read_record(
            LoaderSeen, note, indices_seen=not note.get("it") and any(epoch.drawn for epoch in epochs), epochs=epochs,
            passes=of_loader[-1][0] if of_loader else 0,
            trained_batches=max((whole_or_0(entry.get("tb")) for entry in ordered), default=0),
            in_join=any(bool(entry.get("j")) for entry in ordered),
            stray_calls=read_all(EpochCall, [call for call in calls if call.get("N") == note.get("N") is not None]),
        )  # fmt: skip
        found.append(replace(loader, samples=None) if any(entry.get("w") for entry in ordered) else loader)
    return tuple(found)


def read_nonfinite(notes: list[dict[str, Any]]) -> tuple[NonFinite, ...] | None:
    """Return the findings in order, each by its last note, or None if gradients were not checked."""
    found = {note["id"]: note for note in notes if note.get("k") == "nonfinite" and isinstance(note.get("id"), int)}
    if not found and not any(note.get("k") == "gradients" for note in notes):
        return None
    return read_all(NonFinite, list(found.values()))


def read_process_causes(
    seen: facts.ProcessCauses | None, notes: list[dict[str, Any]], evidence: dict[str, Any]
) -> facts.ProcessCauses | None:
    """Return all known causes for one rank, or None if there are none; ``seen`` is what the watcher saw."""
    ends = [note for note in notes if note.get("k") == "child_end" and isinstance(note.get("code"), int)]
    reaped = [ended_child(int(note["pid"]), note["code"], reaped=True) for note in ends]
    noted = next((n.get("memory") for n in reversed(notes) if n.get("k") == "raised" and n.get("memory")), None)
    at_error = read_or_none(facts.AtError, noted)
    path = lock_of(evidence)[0]
    sought = evidence.get("store")  # the store that it is connecting to, as its recorder says
    store = None
    if isinstance(sought, dict) and isinstance(sought.get("port"), int) and isinstance(sought.get("rank"), int):
        store = read_record(facts.StoreSought, sought, given=sought.get("given") or None)
    if seen is None and not reaped and at_error is None and not path and store is None:
        return None
    seen = seen or facts.ProcessCauses()
    ended = {child.pid: child for child in (*seen.lost_children, *reaped)}
    return replace(
        seen, lost_children=tuple(ended.values())[-MOST_CHILDREN:], lock_path=path, store=store, at_error=at_error
    )


def lock_of(evidence: dict[str, Any]) -> tuple[str | None, facts.LockKind]:
    """Return the lock file that a rank polls for, and its kind; earlier recorders reported only the path."""
    lock = evidence.get("lock")
    if isinstance(lock, dict) and isinstance(lock.get("path"), str):
        known = {kind.value: kind for kind in facts.LockKind}
        return lock["path"], known.get(str(lock.get("kind")), facts.LockKind.KERNEL)
    path = evidence.get("lock_path")
    return (str(path) if path else None), facts.LockKind.KERNEL


def ended_child(pid: int, code: int | None, *, name: str = "", reaped: bool = False) -> facts.LostChild:
    """Return a child that has ended; ``code`` is its exit status, or a signal's number below zero."""
    how = facts.signal_name(-code) if code is not None and code < 0 else None
    return facts.LostChild(pid=pid, name=name, exit_code=None if how else code, signal=how, reaped=reaped)
