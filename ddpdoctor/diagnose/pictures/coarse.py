"""The whole run of one rank in few spans: its steps, and what came before and after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddpdoctor.diagnose.pictures.detail import checkpoint_spans
from ddpdoctor.model.sides import grouped
from ddpdoctor.model.steps import step_totals
from ddpdoctor.model.timeline import Span, SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpdoctor.diagnose.pictures.clock import TimelineClock
    from ddpdoctor.model.facts import Rank


class StepRange(NamedTuple):
    """Consecutive steps. Times are nanoseconds."""

    first: int
    last: int
    start_ns: int
    end_ns: int


def coarse_spans(rank: Rank, clock: TimelineClock, tail: Span | None, most: int) -> tuple[Span, ...]:
    """Return the steps of a rank, merged to at most ``most`` spans, with the last save, and what came before and after.

    ``tail`` is what the rank did in the end.
    """
    parts = merge_parts(_parts(_known_steps(rank)), most)
    end_ms = tail.start_ms if tail is not None else clock.until_ms
    last = (*checkpoint_spans(rank, clock), *(() if tail is None else (tail,)))
    began_ms = clock.ms(rank.started_ns or clock.began_ns)
    if not parts:
        return (*_host(began_ms, end_ms, "script"), *last)
    first = parts[0].first
    before = _host(began_ms, clock.ms(parts[0].start_ns), f"before step {first}")
    after = _host(clock.ms(parts[-1].end_ns), end_ms, f"after step {parts[-1].last}")
    steps = (_step_span(part, clock) for part in parts)
    return (*before, *steps, *after, *last)


def _host(start_ms: float, end_ms: float, label: str) -> tuple[Span, ...]:
    return (Span(kind=SpanKind.HOST, start_ms=start_ms, end_ms=end_ms, label=label),) if end_ms > start_ms else ()


def _step_span(part: StepRange, clock: TimelineClock) -> Span:
    one = part.first == part.last
    return Span(
        kind=SpanKind.STEP,
        start_ms=clock.ms(part.start_ns),
        end_ms=clock.ms(part.end_ns),
        label="step" if one else f"steps {part.first}-{part.last}",
        number=part.first if one else None,
    )


def _known_steps(rank: Rank) -> list[StepRange]:
    """Return the recorded steps by number: the evenly kept and the longest of the run, and the last ones."""
    found: dict[int, StepRange] = {}
    kept = rank.speed.kept if rank.speed is not None else None
    if kept is not None:
        for number, end_ns, wall_ms in zip(kept.numbers, kept.ended_ns, kept.parts_ms.get("wall", ()), strict=False):
            found[number] = StepRange(number, number, end_ns - int(wall_ms * 1e6), end_ns)
    times = rank.step_times
    if times is not None:
        for number, end_ns, total_us in zip(times.numbers, times.ended_ns, step_totals(times), strict=False):
            found[number] = StepRange(number, number, end_ns - total_us * 1000, end_ns)
    return sorted(one for one in found.values() if one.end_ns > one.start_ns)


def _parts(steps: Iterable[StepRange]) -> list[StepRange]:
    """Return the steps without overlaps, and one part for all steps between two known ones."""
    parts: list[StepRange] = []
    for step in steps:
        _, last, _, busy_ns = parts[-1] if parts else (0, step.first - 1, 0, step.start_ns)
        if step.end_ns <= busy_ns:  # numbers of another count, or a damaged record
            continue
        start_ns = max(step.start_ns, busy_ns)
        if step.first > last + 1 and start_ns > busy_ns:
            parts.append(StepRange(last + 1, step.first - 1, busy_ns, start_ns))
        parts.append(StepRange(step.first, step.last, start_ns, step.end_ns))
    return parts


def merge_parts(parts: Sequence[StepRange], most: int) -> list[StepRange]:
    """Merge parts that end in the same slice of time. One that is longer than a slice stays alone.

    There are half as many slices as ``most``, the largest number of merged parts.
    """
    if len(parts) <= most:
        return list(parts)
    start_ns, count = parts[0].start_ns, max(1, most // 2)
    length_ns = max(1, parts[-1].end_ns - start_ns)

    def slice_of(part: StepRange) -> tuple[int, bool]:
        is_long = (part.end_ns - part.start_ns) * count > length_ns
        return min(count - 1, (part.end_ns - start_ns) * count // length_ns), is_long

    slices = grouped((slice_of(part), part) for part in parts)
    return [StepRange(those[0].first, those[-1].last, those[0].start_ns, those[-1].end_ns) for those in slices.values()]
