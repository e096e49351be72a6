"""Reads the training steps in a ring, and the lines at which the sampler saw the main thread."""

from __future__ import annotations

from array import array
from itertools import compress
from typing import TYPE_CHECKING, Any

from ddpdoctor.collect.recorded import read_frame
from ddpdoctor.collect.run.sources import process_note
from ddpdoctor.model.facts import Helper
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.steps import FetchTimes, LineSeen, Phase, StepEnd, StepTimes
from ddpdoctor.model.words import grouped
from ddpdoctor.recorder.storage import ring_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpdoctor.recorder.storage.ring_reading import RingContent

ENDS = {
    ring_layout.STEP_COLLECTIVE: StepEnd.COLLECTIVE,
    ring_layout.STEP_BACKWARD: StepEnd.BACKWARD,
    ring_layout.STEP_OPTIMIZER: StepEnd.OPTIMIZER,
    ring_layout.STEP_REDUCED: StepEnd.REDUCTION,
}
FETCH_CELLS = 4
_NUMBER, _ENDED, _GROUP, _FLAGS, _FIRST_PHASE = range(5)
"""Columns of a ``ring_layout.STEP`` row: number, end, group, flags, then each phase, then each phase's wait."""


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
    found = [*_lines(content, in_child=False)]
    for child in children:
        found += _lines(child, in_child=True)
    for file, line, function, times in ended:
        frame = Frame(file=file, line=line, function=function, user=True)
        found.append(LineSeen(frame=frame, phase=Phase.BEFORE, times=times, in_child=True))
    return tuple(sorted(found, key=lambda line: (line.calls_module, -line.times)))


def _lines(content: RingContent, *, in_child: bool) -> Iterable[LineSeen]:
    for line in content.lines:
        frame = read_frame(line.site)
        calls_module, phase = divmod(line.phase, ring_layout.CALLS_MODULE)
        if frame is not None and calls_module in {0, 1}:
            yield LineSeen(
                frame=frame, phase=Phase(phase), times=line.times, in_child=in_child, calls_module=bool(calls_module)
            )


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
        batches=batches,
        making_ms=making_ns / 1e6,
        pauses_ms=pauses_ns / 1e6,
        cpu_ms=cpu_ns / 1e6,
        workers=workers,
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
        note = process_note(content)
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
    parent = process_note(content).get("ppid")
    return parent if content.role == ring_layout.ROLE_CHILD and isinstance(parent, int) else None
