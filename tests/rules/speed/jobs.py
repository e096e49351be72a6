"""Jobs whose steps are known, for the rules of speed: 60 steps of 100 ms on two ranks, in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpdoctor.model.facts import Job, Life, Rank
from ddpdoctor.model.stacks import Frame
from ddpdoctor.model.steps import CoreTime, LineSeen, PartTotal, Phase, Speed, StepEnd, StepParts, Surroundings
from ddpdoctor.rules.speed.state import SpeedState, build_speed_state

STEPS = 60
HEALTHY = {
    "data": 1.0, "host": 1.0, "buffers": 0.5, "forward": 32.0, "loss": 0.5, "backward": 62.0, "exposed": 2.0,
    "calls": 0.0, "optimizer": 1.0, "own": 0.0, "gc": 0.0,
}  # fmt: skip
Value = float | Callable[[int], float]
"""A constant, or a function of the step's number."""


def frame(line: int, function: str = "main") -> Frame:
    return Frame(file="/home/me/train.py", line=line, function=function, user=True)


def seen(line: int, times: int = 100, phase: Phase = Phase.BEFORE, **more: Any) -> LineSeen:
    return LineSeen(frame=frame(line), phase=phase, times=times, in_child=False, **more)


def rank(  # noqa: PLR0917 - a job is written in one line
    number: int, parts_ms: Mapping[str, Value] = {}, steps: int = STEPS, reductions: int = 1, numel: Value = 64,
    cpu_ms: Mapping[str, float] = {}, threads: int = 1, queued_ms: float = 0.0, bits: int = 0,
    is_even: Sequence[int] | None = None, speed: Mapping[str, Any] = {}, **more: Any,
) -> Rank:  # fmt: skip
    """Return a rank; ``parts_ms`` replaces parts of the healthy step."""
    numbers = range(1, steps + 1)
    parts = {part: [_at(value, n) for n in numbers] for part, value in {**HEALTHY, **parts_ms}.items()}
    parts["wall"] = [sum(row) for row in zip(*(column for part, column in parts.items() if part != "gc"), strict=True)]
    kept = StepParts(
        numbers=numbers,
        parts_ms=parts,
        is_even=[1] * steps if is_even is None else is_even,
        is_split=[1] * steps,
        cpu_ms={name: [cpu_ms.get(name, 0.0)] * steps for name in ("before", "forward", "between", "backward", "data")},
        reductions=[reductions] * steps,
        backwards=[reductions] * steps,
        input_rows=[8] * steps,
        input_numel=[int(_at(numel, n)) for n in numbers],
    )
    given = {"core_time": CoreTime(elapsed_ms=1e4, on_core_ms=100.0, queued_ms=queued_ms), **speed}
    own = Speed(
        ends_with=StepEnd.OPTIMIZER, group="", count=steps, sample_bits=bits, kept=kept,
        totals={"wall": PartTotal(sum_ms=sum(parts["wall"]), bins=())},
        surroundings=Surroundings(threads=threads, cores=2), **given,
    )  # fmt: skip
    return Rank(
        rank=number, local_rank=number, host="a", pid=None, attempt=0, life=Life.EXITED, speed=own, steps=steps, **more
    )


def _at(value: Value, number: int) -> float:
    return value(number) if callable(value) else value


def state(*ranks: Rank) -> SpeedState:
    """Return what the rules are asked about; fail if there is nothing to ask about."""
    found = build_speed_state(job(*ranks))
    assert isinstance(found, SpeedState), found
    return found


def job(*ranks: Rank) -> Job:
    return Job(
        now_ns=0, hang_timeout_s=60, ranks=ranks, world_size=len(ranks), nnodes=1, local_ranks_expected=len(ranks),
        ended=True, speed_asked=True,
    )  # fmt: skip


def every(period: int, usual: float, long: float) -> Callable[[int], float]:
    """Return a part that takes longer in each ``period``-th step."""
    return lambda number: long if number % period == 0 else usual
