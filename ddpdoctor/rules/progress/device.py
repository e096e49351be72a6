"""Collectives that every rank has queued on its device: which devices have reached them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.model.facts import DeviceState
from ddpdoctor.model.rank_words import rank_list

from .closed import stalled_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .groups import Position
    from .scene import Scene

TIMING = "TORCH_NCCL_ENABLE_TIMING=1"


def has_begun(scene: Scene, stalled: Iterable[Position]) -> bool:
    """Return whether all ranks are surely inside: each kernel has started, or the host itself waits in the call."""
    return all(state in (None, DeviceState.STARTED) for state in _device_states(scene, stalled).values())


def queued_behind(scene: Scene) -> tuple[int, ...]:
    """Return the ranks whose device still runs earlier work while another rank's device waits in the collective."""
    found = []
    for position in stalled_in(scene):
        states = _device_states(scene, (position,))
        if DeviceState.STARTED in states.values():
            found += [number for number, state in states.items() if state is DeviceState.SCHEDULED]
    return tuple(sorted(found))


def device_words(scene: Scene, stalled: Iterable[Position]) -> list[str]:
    """Return what is not known about the devices, and how to find out the next time."""
    unknown = [n for n, state in _device_states(scene, stalled).items() if state is DeviceState.UNKNOWN]
    if not unknown:
        return []
    who = rank_list(unknown)
    return [f"whether the kernels of {who} have started, or wait for a slow one, is not known: {TIMING} has torch tell"]


def _device_states(scene: Scene, stalled: Iterable[Position]) -> dict[int, DeviceState | None]:
    """Return, by rank of the stalled groups, how far its device has come with the call that it waits in."""
    groups = {position.group for position in stalled}
    inside = (n for n, position in sorted(scene.positions.items()) if position.group in groups)
    calls = ((number, scene.states[number].call) for number in inside)
    return {number: call.device_state for number, call in calls if call is not None}
