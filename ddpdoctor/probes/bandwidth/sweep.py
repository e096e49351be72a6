"""The bench itself: checks and measures every size, from small to large, within the budget."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ddpdoctor.model.bandwidth import LeftOut
from ddpdoctor.model.words import format_size
from ddpdoctor.probes.bandwidth.arrival import BarrierWaits
from ddpdoctor.probes.bandwidth.budget import Forecast, Step, TimeSlot, share_out
from ddpdoctor.probes.bandwidth.buffers import make_sets
from ddpdoctor.probes.bandwidth.cases import is_in_place, list_cases, list_impossible
from ddpdoctor.probes.bandwidth.correctness import check
from ddpdoctor.probes.bandwidth.memory import find_free_memory, needed_bytes
from ddpdoctor.probes.bandwidth.timing import Effort, measure, most_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpdoctor.model.bandwidth import BenchSettings, Case
    from ddpdoctor.probes.bandwidth.buffers import Buffers
    from ddpdoctor.probes.bandwidth.correctness import Checked
    from ddpdoctor.probes.bandwidth.group import RankGroup
    from ddpdoctor.probes.bandwidth.log import ResultLog

    Progress = Callable[[str, float, float | None], None]


SLOWEST_GB_S = 0.01
"""Our choice: the slowest speed that a first call is given time for, about a 100 Mbit/s network."""


def run_sweep(
    group: RankGroup, settings: BenchSettings, hosts: Sequence[str], log: ResultLog, progress: Progress
) -> None:
    """Check and measure all cases within ``settings.budget_s``. Results go to ``log`` at once, on every rank.

    ``hosts`` is indexed by global rank, and the group is all ranks. Cases without enough time or memory are listed in
    ``log.left_out``. torch's errors propagate.
    """
    log.left_out.extend(list_impossible(settings, group.size))
    _note_places(settings, log)
    sweep = _Sweep(group, settings, hosts, log, progress)
    steps = list_steps(list_cases(settings, group.size))
    while steps:
        steps = sweep.take(steps)


def list_steps(cases: Sequence[Case]) -> list[Step]:
    """Group the modes of each collective, dtype and size into one step."""
    groups = groupby(cases, key=lambda case: (case.collective, case.dtype, case.size_bytes))
    return [Step(cases=tuple(members)) for _, members in groups]


def _note_places(settings: BenchSettings, log: ResultLog) -> None:
    """Note the collectives that --in-place does not apply to."""
    other = [one.value for one in settings.collectives if not is_in_place(one, asked=True)]
    if settings.in_place and other:
        log.note(f"{' and '.join(other)}: measured out of place, there is no form in place")


class _Sweep:
    def __init__(
        self, group: RankGroup, settings: BenchSettings, hosts: Sequence[str], log: ResultLog, progress: Progress
    ) -> None:
        self._group = group
        self._settings = settings
        self._hosts = hosts
        self._log = log
        self._progress = progress
        self._forecast = Forecast(settings.backend, settings.iterations)
        self._arrivals = BarrierWaits([hosts[rank] for rank in group.ranks])
        self._began_s = time.monotonic()
        self._ends_s: float | None = None
        """When the sweep is expected to end."""

    def take(self, steps: list[Step]) -> list[Step]:
        """Measure the first step, or leave out the rest of its curve. Return the remaining steps."""
        first = steps[0]
        elapsed_s = self._group.agree(time.monotonic() - self._began_s)
        slot = share_out(steps, self._forecast, self._settings.budget_s - elapsed_s)
        reason = self._refuse(first, slot)
        if slot is None or reason:
            return self._leave_out(steps, reason)
        self._ends_s = None if slot.left_s is None else time.monotonic() + slot.left_s
        self._measure(first, slot)
        self._log.arrivals = self._arrivals.summary()
        return steps[1:]

    def _refuse(self, step: Step, slot: TimeSlot | None) -> str:
        needed = needed_bytes(step.cases[0], self._group, most_calls(self._effort()))
        reason = find_free_memory(self._group, self._log.members).refuse(needed)
        if slot is None and not reason:
            return f"the budget of {self._settings.budget_s:g} s is too short"
        return reason

    def _leave_out(self, steps: list[Step], reason: str) -> list[Step]:
        curve = steps[0].curve
        sizes = tuple(step.size_bytes for step in steps if step.curve == curve)
        self._log.left_out.append(
            LeftOut(collective=curve[0], dtype=curve[1], mode=None, sizes_bytes=sizes, reason=reason)
        )
        return [step for step in steps if step.curve != curve]

    def _measure(self, step: Step, slot: TimeSlot) -> None:
        began_s = time.monotonic()
        group, forecast = self._group, self._forecast
        self._come_to("check", step, self._longest_s(step))
        sets = make_sets(group, step.cases[0], most_calls(self._effort()))
        checked = check(group, step.cases[0], sets[0], self._hosts)
        self._log.wrong.extend(checked.wrong)
        timed_s = sum(self._time(step, case, slot, sets, checked) for case in step.cases)
        forecast.see_rest(step, group.agree(time.monotonic() - began_s - timed_s))

    def _time(self, step: Step, case: Case, slot: TimeSlot, sets: Sequence[Buffers], checked: Checked) -> float:
        """Measure one mode, and return how long the timed calls took on this rank."""
        self._come_to("measure", step, max(slot.seconds[case.mode], self._longest_s(step)))
        measured = measure(self._group, case, self._effort(slot.seconds[case.mode]), sets)
        result = replace(measured.measurement, wrong=sum(one.count for one in checked.wrong))
        if case == step.cases[0]:
            # The check made the first call, which opens connections and warms up.
            result = replace(result, first_us=checked.first_us)
        self._log.results.append(result)
        self._arrivals.add(measured.waits_us)
        if measured.note:
            self._log.note(f"{name_step(step)}: {measured.note}")
        self._forecast.see_call(step, case.mode, self._group.agree(measured.timed_s / result.iterations))
        return measured.timed_s

    def _come_to(self, phase: str, step: Step, allowance_s: float) -> None:
        self._group.tracker.at(phase, name_step(step), allowance_s=allowance_s)
        now_s = time.monotonic()
        elapsed_s = now_s - self._began_s
        left_s = None if self._ends_s is None else max(0.0, self._ends_s - now_s)
        whole_s = max(elapsed_s, self._settings.budget_s) if left_s is None else elapsed_s + left_s
        self._progress(name_step(step), elapsed_s / whole_s if whole_s else 0.0, left_s)

    def _longest_s(self, step: Step) -> float:
        """Return how long a call may take before it looks like a hang."""
        if self._forecast.knows(step):
            return self._forecast.rest_s(step)
        return step.size_bytes / (SLOWEST_GB_S * 1e9)

    def _effort(self, seconds: float = 0.0) -> Effort:
        asked = self._settings
        return Effort(warmup=asked.warmup, iterations=asked.iterations, seconds=seconds, cold=asked.cold)


def name_step(step: Step) -> str:
    """Return "all_reduce float32 1 MiB"."""
    collective, dtype = step.curve
    return f"{collective.value} {dtype} {format_size(step.size_bytes)}"
