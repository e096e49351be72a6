"""Reads the collective calls of a rank, from the rings of a run folder and from torch's flight recorder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import find_note, read_frame
from ddpdoctor.model.call_log import CallLog, shared_fields
from ddpdoctor.model.facts import Call, CallKind, DeviceState, DeviceTime
from ddpdoctor.model.words import dtype_name, op_name
from ddpdoctor.recorder.storage import ring_layout, ring_reading
from ddpdoctor.recorder.storage.files import read_plain
from ddpdoctor.recorder.storage.flight import (
    HOOKED,
    MOST_BYTES,
    backend_of,
    chosen,
    is_pending,
    is_untold,
    op_of,
    parse_plain_pickle,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddpdoctor.model.facts import GroupState
    from ddpdoctor.recorder.storage.ring_reading import CallSlot, RingContent, Slots

# The columns of a ``device_times`` note: group, sequence number, operation, milliseconds.
_ROWS = ([str, int, str, float], [str, int, str, int])
# From ProcessGroupNCCL.cpp and FlightRecorderHook.cpp: "recv 1<-0" has ranks within the group, "?" is any source.
_POINT_TO_POINT = re.compile(r"(send|recv) \d+(?:->|<-)(\d+|\?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """What the processes of a run wrote, by pid."""

    contents: dict[int, ring_reading.RingContent]  # the rings; if a pid was reused, the latest
    damaged: dict[int, str]  # why the ring cannot be read, for processes without any readable ring


def read_rings(folder: Path, *, kept: bool = True) -> Rings:
    """Return the rings of a run folder.

    With ``kept``, a copy that was kept before a signal replaces the ring itself.
    """
    contents: dict[int, ring_reading.RingContent] = {}
    damaged: dict[int, str] = {}
    copies = sorted((folder / "evidence").glob("*.held")) if kept else ()
    for path in (*sorted((folder / "rings").glob("*.ring")), *copies):
        try:
            content = ring_reading.read_ring_file(path)
        except (OSError, ring_reading.DamagedRingError) as error:
            pid = path.name.partition("-")[0]
            if pid.isdigit():
                why = (error.strerror or "not to be read") if isinstance(error, OSError) else str(error)
                damaged[int(pid)] = f"its record cannot be read: {why}"
            continue
        known = contents.get(content.pid)
        if known is None or known.start_ticks <= content.start_ticks:
            contents[content.pid] = content
    return Rings(contents=contents, damaged={pid: why for pid, why in damaged.items() if pid not in contents})


def read_log(slots: Slots) -> CallLog:
    """Return all calls of a ring, including those that have not ended."""
    return CallLog(
        kinds=tuple(map(_read_kind, slots.kinds)),
        which=slots.which,
        indexes=slots.numbers,
        numbers=slots.seqs,
        started_ns=slots.started_ns,
        ended_ns=slots.ended_ns,
    )


def _read_kind(slot: CallSlot) -> CallKind:
    return CallKind(
        op=slot.op, api=slot.api or slot.op, group=slot.group, dtype=slot.dtype or None, shape=slot.shape,
        tensors=slot.tensors, peer=slot.peer if slot.peer >= 0 else None, redop=slot.redop or None,
        site=read_frame(slot.site), is_async=bool(slot.flags & ring_layout.FLAG_ASYNC),
        failed=bool(slot.flags & ring_layout.FLAG_FAILED), thread_is_main=bool(slot.flags & ring_layout.FLAG_MAIN),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the flight recorders of one rank hold: the oldest pending entries, and the last timed ones."""

    entries: tuple[dict[str, Any], ...] = ()
    # How far CLOCK_REALTIME, which the entries use, is ahead of CLOCK_MONOTONIC; None if unknown.
    wall_ahead_ns: int | None = None
    timed: bool = False  # Whether torch knows when a kernel starts. If so, "scheduled" means queued.
    # Whether the default streams of its devices have nothing left to do; None if that was not asked or not known.
    idle: bool | None = None

    @property
    def untold(self) -> dict[str, Any] | None:
        """The last call of which torch does not tell whether it has completed, or None if torch tells."""
        return next(filter(is_untold, self.entries), None)


def read_flight(evidence: dict[str, Any]) -> Recorded:
    """Return the flight recorder's entries from a rank's answer; earlier versions wrote a bare list of entries."""
    body = evidence.get("flight_recorder")
    if not isinstance(body, dict):
        return Recorded(entries=tuple(chosen(body)))
    wall, at = body.get("wall_ns"), body.get("at")
    ahead = wall - at if isinstance(wall, int) and isinstance(at, int) else None
    entries = chosen(body.get("entries"))
    timed, idle = body.get("timed") == 1 or _shows_times(entries), body.get("idle")
    idle = bool(idle) if idle in (0, 1) else None
    return Recorded(entries=tuple(entries), wall_ahead_ns=ahead, timed=timed, idle=idle)


def read_dump(folder: Path, content: RingContent) -> Recorded | None:
    """Return what torch dumped when it aborted a process, or None if there is no readable dump."""
    for path in sorted((folder / "evidence").glob(f"{content.pid}-{content.start_ticks}.flight*")):
        try:
            body = parse_plain_pickle(read_plain(path, MOST_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(body, dict):
            ahead_ns = content.cells["started_wall_ns"] - content.cells["started_ns"]
            entries = chosen(body.get("entries"))
            return Recorded(entries=tuple(entries), wall_ahead_ns=ahead_ns, timed=_shows_times(entries))
    return None


def _shows_times(entries: Sequence[dict[str, Any]]) -> bool:
    """Return whether torch timed kernels: under DETAIL it does that without being asked."""
    return any(entry["state"] == "started" or "duration_ms" in entry for entry in entries)


def pending_on_device(recorded: Recorded, log: CallLog, groups: Sequence[GroupState]) -> tuple[Call, ...]:
    """Return the oldest operation of each group, and of each pair of ranks, that has not completed on the device.

    The oldest comes first and has the highest index, because it holds the rank up. If the recorder saw the call,
    the result has its call site, dtype and shape. Calls that C++ made, such as those of DDP's reducer, have no site.
    Where torch does not tell what has completed, the last call counts as long as its device has work.
    """
    pending = [entry for entry in recorded.entries if is_pending(entry)]
    untold = recorded.untold if recorded.idle is False else None
    if untold is not None and all(entry["time_created_ns"] < untold["time_created_ns"] for entry in pending):
        pending.append(untold)
    last = max(log.indexes, default=0)
    return tuple(_as_call(entry, recorded, log, groups, last + len(pending) - at) for at, entry in enumerate(pending))


def device_times(recorded: Recorded) -> tuple[DeviceTime, ...]:
    """Return how long the last completed collectives ran on the device."""
    return tuple(
        DeviceTime(
            group=entry["process_group"][0], seq=entry["collective_seq_id"], op=_op(entry),
            ran_ms=float(entry["duration_ms"]),
        )
        for entry in recorded.entries
        if entry["state"] == "completed" and 0 <= entry.get("duration_ms", -1) < 1e12
    )  # fmt: skip


def noted_times(notes: Sequence[dict[str, Any]]) -> tuple[DeviceTime, ...]:
    """Return how long the last collectives ran, from the note that a rank writes before it destroys its groups."""
    rows = find_note(reversed(notes), "device_times").get("rows")
    sound = [row for row in rows or () if isinstance(row, list) and [*map(type, row)] in _ROWS and 0 <= row[3] < 1e12]
    return tuple(
        DeviceTime(group=group, seq=seq, op=op_name(op), ran_ms=float(ran_ms)) for group, seq, op, ran_ms in sound
    )


def _as_call(entry: dict[str, Any], recorded: Recorded, log: CallLog, groups: Sequence[GroupState], index: int) -> Call:
    group, ahead_ns = entry["process_group"][0], recorded.wall_ahead_ns
    created_ns = None if ahead_ns is None else entry["time_created_ns"] - ahead_ns
    # The global rank of the peer, or None for any source or if the group's ranks are unknown
    match = _POINT_TO_POINT.fullmatch(op_of(entry))
    place = int(match[2]) if match is not None and match[2].isdigit() else None
    ranks = next((state.ranks for state in groups if state.name == group), ())
    peer = ranks[place] if place is not None and place < len(ranks) else None
    known = _known_call(entry, log, peer, created_ns)
    if known:
        shared = shared_fields(known)
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
    state = DeviceState.SCHEDULED if is_scheduled else DeviceState.UNKNOWN
    if entry["state"] == "started":
        state = DeviceState.STARTED
    elif backend_of(entry) in HOOKED:
        state = DeviceState.UNTOLD if is_untold(entry) else DeviceState.UNTIMED
    return Call(
        **{**shared, "group": group, "is_async": False, "failed": False, "thread_is_main": True},
        index=index,
        seq=None if entry["is_p2p"] else entry["collective_seq_id"],
        started_ns=created_ns if created_ns is not None else known.started_ns if known else 0,
        ended_ns=None,
        device_state=state,
        native=known is None,
    )


def _op(entry: dict[str, Any]) -> str:
    name = op_of(entry)
    match = _POINT_TO_POINT.fullmatch(name)
    return match[1] if match else op_name(name)


def _known_call(entry: dict[str, Any], log: CallLog, peer: int | None, created_ns: int | None) -> Call | None:
    """Return the recorded call that made an entry, or None if C++ made it.

    For a send or receive, that is the last one with this peer that began before the entry was made.
    """
    op, group, number = _op(entry), entry["process_group"][0], entry.get("collective_seq_id")
    single = op.removesuffix("_single") if backend_of(entry) in HOOKED else None
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
