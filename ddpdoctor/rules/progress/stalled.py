"""Jobs that wait only for themselves: who waits, in which collectives, and whether devices have reached them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import DeviceState
from ddpdoctor.model.words import grouped, rank_list

from ddpdoctor.rules.progress.job_state import Cause
from ddpdoctor.rules.progress.limits import find_late
from ddpdoctor.rules.progress.states import Activity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpdoctor.rules.progress.groups import CallPosition
    from ddpdoctor.rules.progress.job_state import JobState


def closed(job: JobState) -> tuple[int, ...] | None:
    """Return the waiting ranks if none waits for anybody outside and nothing else explains the wait, else None."""
    waits = job.waits
    if job.cause is not Cause.HANG or not waits.waiters or waits.blockers or (waits.absent and job.sees_all):
        return None
    frozen = any(state.doing is Activity.STOPPED for state in job.states.values())
    return None if frozen or find_late(job) else waits.waiters


def stalled_in(job: JobState) -> tuple[CallPosition, ...]:
    """Return the pending collectives that all ranks of their group have come to: the earliest one of each group.

    A rank may be done with it and wait in a later one: the root of a broadcast returns before the data have arrived.
    """
    positions = sorted(job.positions.items())
    by_group = grouped((one.group, number) for number, one in positions if number in one.group.members)
    found = []
    for group, inside in by_group.items():
        waited_in = {job.positions[number] for number in inside}
        if len(inside) == len(group.members) and (len(waited_in) == 1 or _numbered(job, inside)):
            found.append(min(waited_in, key=lambda position: position.seq or 0))
    return tuple(found)


def _numbered(job: JobState, numbers: Iterable[int]) -> bool:
    """Return whether it is certain in which collective each rank is; the counter of C++ may be off by one."""
    positions, states = job.positions, job.states
    return all(positions[n].seq is not None and states[n].doing is Activity.COLLECTIVE for n in numbers)


TIMING = "TORCH_NCCL_ENABLE_TIMING=1"


def has_begun(job: JobState, stalled: Iterable[CallPosition]) -> bool:
    """Return whether all ranks are surely inside: each kernel has started, or the host itself waits in the call."""
    return all(state in (None, DeviceState.STARTED) for state in _device_states(job, stalled).values())


def queued_behind(job: JobState) -> tuple[int, ...]:
    """Return the ranks whose device still runs earlier work while another rank's device waits in the collective."""
    found = []
    for position in stalled_in(job):
        states = _device_states(job, (position,))
        if DeviceState.STARTED in states.values():
            found += [number for number, state in states.items() if state is DeviceState.SCHEDULED]
    return tuple(sorted(found))


def device_words(job: JobState, stalled: Iterable[CallPosition]) -> list[str]:
    """Return what is not known about the devices, and how to find out the next time."""
    unknown = [n for n, state in _device_states(job, stalled).items() if state is DeviceState.UNKNOWN]
    if not unknown:
        return []
    who = rank_list(unknown)
    return [f"it is unknown whether the kernels of {who} have started: set {TIMING} to find out"]


def _device_states(job: JobState, stalled: Iterable[CallPosition]) -> dict[int, DeviceState | None]:
    """Return, by rank of the stalled groups, how far its device has come with the call that it waits in."""
    groups = {position.group for position in stalled}
    inside = (n for n, position in sorted(job.positions.items()) if position.group in groups)
    calls = ((number, job.states[number].call) for number in inside)
    return {number: call.device_state for number, call in calls if call is not None}
