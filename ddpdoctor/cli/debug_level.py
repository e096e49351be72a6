"""Chooses what TORCH_DISTRIBUTED_DEBUG is for a job."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from ddpdoctor.launch.processes.starting import DEBUG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command.options import ChosenLevel

MIN_FILES = 128
"""Ours: DETAIL opens five descriptors a rank and group more, and twice that with each further rank."""
MIN_ADDRESS_SPACE_BYTES = 16 * 2**30
"""Ours: DETAIL takes 150 MiB more a group (Gloo's threads, each with a stack and an arena of malloc's)."""


NOTES: dict[str, str] = {
    "AUTO": "over Gloo, torch compares every collective over all ranks first (TORCH_DISTRIBUTED_DEBUG=DETAIL), which "
    "makes small steps slower: --debug-level OFF turns that off; over NCCL it is off already",
    "DETAIL": "torch compares every collective over all ranks first (TORCH_DISTRIBUTED_DEBUG=DETAIL), which makes "
    "small steps slower; over NCCL the host then waits for all ranks before each one, 0.3 to 1 ms on one host and more "
    "with more ranks, so that steps may take twice as long; --debug-level OFF turns that off",
}
"""What a level costs, in one line before the start. Of NCCL an estimate: see docs/wrap.md."""


def choose_debug_level(
    asked: ChosenLevel | None, env: Mapping[str, str], *, has_room: bool = True
) -> ChosenLevel | None:
    """DETAIL over Gloo where nobody asked for anything and there is room; None leaves what the environment says."""
    if asked is not None:
        return asked
    return None if env.get(DEBUG_VARIABLE) or not has_room else "AUTO"


def debug_note(chosen: ChosenLevel | None, env: Mapping[str, str]) -> str | None:
    """Return what the job pays for its debug level, chosen or set in the environment; None where it pays nothing."""
    return NOTES.get(chosen or env.get(DEBUG_VARIABLE, "").upper())


def has_room_for_detail() -> bool:
    """Return whether the limits of this process, which its ranks inherit, leave room for what DETAIL takes."""
    return _is_above(resource.RLIMIT_NOFILE, MIN_FILES) and _is_above(resource.RLIMIT_AS, MIN_ADDRESS_SPACE_BYTES)


def _is_above(limit: int, least: int) -> bool:
    soft, _ = resource.getrlimit(limit)
    return soft == resource.RLIM_INFINITY or soft >= least
