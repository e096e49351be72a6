"""Reads the steps of a rank: their times, the speed, the device's part, gradients; and what its recorder noted."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from array import array
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from operator import add
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.blocked import ended_child, lock_of
from ddpdoctor.collect.recorded import find_note, read_all, read_frame, read_or_none, read_record, whole_or_0
from ddpdoctor.model.consistency import NonFinite
from ddpdoctor.model.facts import AtError, Helper, ModelSeen, ProcessCauses, ReducerSaid, StoreSought, TensorSeen
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.steps import (
    CoreTime,
    DataParallelSeen,
    DeviceSteps,
    FetchTimes,
    GradientTimes,
    HandReduced,
    LineSeen,
    PartTotal,
    Phase,
    Speed,
    StepEnd,
    StepParts,
    StepTimes,
    Surroundings,
)
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage import ring_layout
from ddpdoctor.recorder.storage.ring_layout import DEVICE_COLUMNS, DEVICE_PHASES, is_sampled, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ddpdoctor.recorder.storage.ring_reading import RingContent

ENDS = {
    ring_layout.STEP_COLLECTIVE: StepEnd.COLLECTIVE,
    ring_layout.STEP_BACKWARD: StepEnd.BACKWARD,
    ring_layout.STEP_OPTIMIZER: StepEnd.OPTIMIZER,
    ring_layout.STEP_REDUCED: StepEnd.REDUCTION,
}
FETCH_CELLS = 4
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
# How many of a rank's last ended children we keep: a DataLoader without persistent workers ends some each epoch.
MOST_CHILDREN = 16
# Limit for unpacked rows, because run folders can come from strangers. Our choice: 64 MiB hold a million rows.
MAX_TEXT_BYTES = 64 * 2**20


def read_steps(content: RingContent) -> StepTimes | None:
    """Return the last steps that ended in the same way as the latest one, or None if there are no steps."""
    columns = content.steps
    if not columns:
        return None
    group, kind = columns[_GROUP][-1], columns[_FLAGS][-1] & ring_layout.STEP_KIND
    alike = [row == (group, kind) for row in zip(columns[_GROUP], columns[_FLAGS], strict=True)]
    chosen = columns if all(alike) else [array(column.typecode, compress(column, alike)) for column in columns]
    return StepTimes(
        ends_with=ENDS[kind],
        group=content.strings.get(group, ""),
        unknown=columns[_FLAGS].count(kind | ring_layout.STEP_WAIT_UNKNOWN),
        numbers=chosen[_NUMBER],
        ended_ns=chosen[_ENDED],
        phases_us=chosen[_FIRST_PHASE : _FIRST_PHASE + len(Phase)],
        waits_us=chosen[_FIRST_PHASE + len(Phase) : _FIRST_PHASE + 2 * len(Phase)],
    )


def read_first_step(content: RingContent) -> int | None:
    """Return when a process ended its first step, or None if it ended none.

    Of a long run the record has a sample of the steps and the last ones. Then it is inferred from the first known step
    and the pace between that and the last one.
    """
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
) -> tuple[LineSeen, ...]:
    """Return the lines at which the sampler saw a rank and its children, the most frequent first.

    ``ended`` is what the watcher kept from children that have ended: file, line, function and count.
    """
    found = []
    for seen, in_child in ((content, False), *((child, True) for child in children)):
        for one in seen.lines:
            place = read_frame(one.site)
            calls_module, phase = divmod(one.phase, ring_layout.CALLS_MODULE)
            if place is not None and calls_module in {0, 1}:
                calls = bool(calls_module)
                found.append(
                    LineSeen(frame=place, phase=Phase(phase), times=one.times, in_child=in_child, calls_module=calls)
                )
    for file, line, function, times in ended:
        frame = Frame(file=file, line=line, function=function, user=True)
        found.append(LineSeen(frame=frame, phase=Phase.BEFORE, times=times, in_child=True))
    return tuple(sorted(found, key=lambda line: (line.calls_module, -line.times)))


def read_fetches(
    children: Iterable[RingContent], ended: tuple[int, ...] = (), workers: int | None = None
) -> FetchTimes | None:
    """Return how many batches a rank's loader workers made and how long they took; ``ended`` sums up ended workers.

    ``workers`` is how many it has at a time, if known.
    """
    current = [fetch_cells(child) for child in children]
    known = len(ended) in {FETCH_CELLS - 1, FETCH_CELLS}  # older versions kept no processor time
    before = (*ended, 0)[:FETCH_CELLS] if known else (0,) * FETCH_CELLS
    batches, making_ns, pauses_ns, cpu_ns = map(sum, zip(before, *current, strict=True))
    if not batches:
        return None
    return FetchTimes(
        batches=batches, making_ms=making_ns / 1e6, pauses_ms=pauses_ns / 1e6, cpu_ms=cpu_ns / 1e6, workers=workers
    )


def fetch_cells(content: RingContent) -> tuple[int, int, int, int]:
    """Return how many batches a child has made, how long that took, its pauses, and its processor time.

    Times are nanoseconds.
    """
    cells = content.cells
    return cells["fetches"], cells["fetching_ns"], cells["fetch_pauses_ns"], cells["fetching_cpu_ns"]


def find_children(contents: Mapping[int, RingContent]) -> dict[int, list[RingContent]]:
    """Return the recorded children of each process, by its pid; a fork server's children count as its parent's."""
    owners = ((owner_of(content, contents.get), content) for content in contents.values())
    return grouped((owner, content) for owner, content in owners if owner is not None)


def errors_of_child(content: RingContent) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield the errors that ended a child's main thread, as watch.json has them, each with the pid of its rank."""
    if content.role == ring_layout.ROLE_CHILD:
        note = find_note(content.notes, "process")
        rank = note.get("rank_pid") or note.get("ppid")
        if not isinstance(rank, int):
            return
        for raised in content.notes:
            is_end = raised.get("k") == "raised" and raised.get("uncaught") and raised.get("main")
            if is_end and raised.get("type") != "KeyboardInterrupt":
                yield rank, {"who": Helper.CHILD.value, "name": str(content.pid), "error": raised}


def owner_of(content: RingContent, find: Callable[[int], RingContent | None]) -> int | None:
    """Return the pid of the process that a child works for, or None for a rank.

    A fork server starts children for the process that started it. ``find`` returns the ring of a pid.
    """
    parent = parent_of(content)
    between = find(parent) if parent is not None else None
    return (parent_of(between) or parent) if between is not None else parent


def parent_of(content: RingContent) -> int | None:
    """Return the pid of the process that started a child, or None for a rank."""
    parent = find_note(content.notes, "process").get("ppid")
    return parent if content.role == ring_layout.ROLE_CHILD and isinstance(parent, int) else None


"""Columns of ``ring_layout.STEP``: number, end, group, flags, the four phases, the four waits, ``STEP_INSIDE``."""


def read_speed(content: RingContent) -> Speed | None:
    """Return the speed of a rank, or None if no steps were recorded, or an older version recorded them."""
    columns = content.steps
    if not columns or len(columns) < _INSIDE + len(ring_layout.STEP_INSIDE):
        return None
    key = columns[_GROUP][-1], columns[_FLAGS][-1] & ring_layout.STEP_KIND
    totals = {
        part: PartTotal(sum_ms=row[0] / 1e3, bins=row[1:])
        for part, row in zip(ring_layout.PARTS, content.totals, strict=False)
    }
    cells, notes = content.cells, content.notes
    core_time = CoreTime(
        elapsed_ms=cells["trained_ns"] / 1e6,
        on_core_ms=cells["main_cpu_ns"] / 1e6,
        queued_ms=cells["run_delay_ns"] / 1e6,
        others_queued_ms=cells["others_delay_ns"] / 1e6,
    )
    return Speed(
        ends_with=ENDS[key[1]],
        group=content.strings.get(key[0], ""),
        count=cells["steps_recorded"],
        sample_bits=cells["sample_bits"],
        kept=_read_parts(content.kept, key, cells["sample_bits"]),
        totals=totals,
        core_time=core_time if cells["trained_ns"] else None,
        surroundings=read_or_none(Surroundings, find_note(notes, "surroundings")),
        data_parallel=read_all(DataParallelSeen, [note for note in notes if note["k"] == "data_parallel"]),
        hand_reduced=read_or_none(HandReduced, find_note(notes, "hand_reduced")),
        # The last note counts: it is written again from time to time.
        collected_at=read_frame(find_note(reversed(notes), "collected").get("frame")),
        device=read_device_steps(notes),
    )


def _read_parts(columns: Sequence[Sequence[int]], key: tuple[int, int], bits: int) -> StepParts:
    """Return the steps that ended in the same group, by the same event."""
    rows = [row for row in zip(*columns, strict=True) if (row[_GROUP], row[_FLAGS] & ring_layout.STEP_KIND) == key]
    split = [parts_of(row[_FIRST_PHASE:_WAITS], row[_WAITS:_INSIDE], row[_INSIDE:], row[_FLAGS]) for row in rows]
    parts = {part: array("f", (row[i] / 1e3 for row in split)) for i, part in enumerate(ring_layout.PARTS)}
    unsplit = parts.pop("unsplit")
    parts["backward"] = array("f", map(add, parts["backward"], unsplit))
    inside = {name: array("I", (row[_INSIDE + i] for row in rows)) for i, name in enumerate(ring_layout.STEP_INSIDE)}
    return StepParts(
        numbers=array("Q", (row[0] for row in rows)), parts_ms=parts,
        is_even=bytes(is_sampled(row[0], bits) for row in rows),
        is_split=bytes(not row[_FLAGS] & ring_layout.STEP_WAIT_UNKNOWN for row in rows),
        cpu_ms={name: array("f", (value / 1e3 for value in inside[key])) for name, key in _CPU.items()},
        reductions=inside["reductions"], backwards=inside["backwards"], input_rows=inside["input_rows"],
        input_numel=inside["input_numel"], ended_ns=array("Q", (row[_ENDED] for row in rows)),
    )  # fmt: skip


def read_device_steps(notes: Sequence[dict[str, Any]]) -> DeviceSteps | None:
    """Return the steps, or None if none was measured. The last note counts."""
    columns = unpack_columns(str(find_note(reversed(notes), "device_steps").get("columns", "")))
    rows = [row for row in _lists(columns.get("rows")) if len(row) == len(DEVICE_COLUMNS)]
    if not rows:
        return None
    by_name = dict(zip(DEVICE_COLUMNS, zip(*rows, strict=True), strict=True))
    return DeviceSteps(
        numbers=by_name["number"], device_ms={phase: _ms(by_name[f"gpu_{phase}_us"]) for phase in DEVICE_PHASES},
        host_ms={phase: _ms(by_name[f"host_{phase}_us"]) for phase in DEVICE_PHASES}, data_ms=_ms(by_name["data_us"]),
        data_cpu_ms=_ms(by_name["data_cpu_us"]), gc_ms=_ms(by_name["gc_us"]), input_rows=by_name["rows"],
        input_numel=by_name["numel"], reductions=by_name["reductions"], backwards=by_name["backwards"],
        behind=by_name["behind"],
        exposed_ms={row[0]: row[1] / 1e3 for row in _lists(columns.get("reduced")) if len(row) == 2},
    )  # fmt: skip


def _lists(value: Any) -> list[list[int]]:
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and all(isinstance(one, int) for one in row)]


def _ms(column_us: Sequence[int]) -> tuple[float, ...]:
    return tuple(us / 1e3 for us in column_us)


def read_gradient_times(notes: list[dict[str, Any]]) -> tuple[GradientTimes, ...]:
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
            found.append(
                read_record(
                    GradientTimes,
                    note,
                    sizes_bytes=sizes,
                    ready_ms=tuple(us / 1e3 if us >= 0 else None for us in ready),
                    bucket_bytes=buckets,
                    compute_end_ms=whole_or_0(note.get("compute_us")) / 1e3,
                    exposed_ms=whole_or_0(note.get("exposed_us")) / 1e3,
                )
            )
    return tuple(found)


def read_models(notes: list[dict[str, Any]]) -> tuple[ModelSeen, ...]:
    """Return the models in the order of their construction. Equal models have their rows in one note only."""
    wrapped = [note for note in notes if note.get("k") == "ddp" and note.get("digest")]
    packed = {str(note["digest"]): str(note["rows"]) for note in wrapped if note.get("rows")}
    return tuple(read_record(ModelSeen, note, tensors=unpack(packed.get(str(note["digest"]), ""))) for note in wrapped)


def read_parameters(notes: list[dict[str, Any]]) -> tuple[TensorSeen, ...]:
    """Return the parameters that optimizers train without DDP."""
    packed = [str(note["rows"]) for note in notes if note.get("k") == "named" and note.get("rows")]
    return tuple(tensor for rows in packed for tensor in unpack(rows))


@lru_cache(maxsize=64)
def unpack(packed: str) -> tuple[TensorSeen, ...]:
    """Return the rows of a model, or () if they are missing or damaged; ranks with equal models share the cache."""
    try:
        return tuple(
            TensorSeen(
                name=str(name),
                shape=None if shape is None else tuple(map(int, shape)),
                dtype=str(dtype),
                requires_grad=bool(requires_grad),
                is_buffer=kind == "b",
            )
            for kind, name, shape, dtype, requires_grad in _unpacked(packed)
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


def read_unfinished(notes: list[dict[str, Any]]) -> ReducerSaid | None:
    """Return what the last backward left out, for the first model whose last note still says so."""
    last: dict[tuple[str, Any], ReducerSaid | None] = {}
    for note in notes:
        if note.get("k") == "unfinished":
            last[str(note.get("group")), note.get("model")] = read_or_none(ReducerSaid, note)
    return next((said for said in last.values() if said is not None), None)


def read_nonfinite(notes: list[dict[str, Any]]) -> tuple[NonFinite, ...] | None:
    """Return the findings in the order in which they were made, or None if gradients were not checked.

    The recorder notes a finding again when it learns more about it, so the last note of each counts.
    """
    found = {note["id"]: note for note in notes if note.get("k") == "nonfinite" and isinstance(note.get("id"), int)}
    if not found and not any(note.get("k") == "gradients" for note in notes):
        return None
    return read_all(NonFinite, list(found.values()))


def read_process_causes(
    seen: ProcessCauses | None, notes: list[dict[str, Any]], evidence: dict[str, Any]
) -> ProcessCauses | None:  # fmt: skip
    """Return all known causes for one rank, or None if there are none; ``seen`` is what the watcher saw."""
    ends = [note for note in notes if note.get("k") == "child_end" and isinstance(note.get("code"), int)]
    reaped = [ended_child(int(note["pid"]), note["code"], reaped=True) for note in ends]
    noted = next((n.get("memory") for n in reversed(notes) if n.get("k") == "raised" and n.get("memory")), None)
    at_error = read_or_none(AtError, noted)
    path = lock_of(evidence)[0]
    sought = evidence.get("store")  # the store that it is connecting to, as its recorder says
    store = None
    if isinstance(sought, dict) and isinstance(sought.get("port"), int) and isinstance(sought.get("rank"), int):
        store = read_record(StoreSought, sought, given=sought.get("given") or None)
    if seen is None and not reaped and at_error is None and not path and store is None:
        return None
    seen = seen or ProcessCauses()
    ended = {child.pid: child for child in (*seen.lost_children, *reaped)}
    return replace(
        seen, lost_children=tuple(ended.values())[-MOST_CHILDREN:], lock_path=path, store=store, at_error=at_error
    )
