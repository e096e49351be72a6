"""Chooses the value of TORCH_DISTRIBUTED_DEBUG for a job."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

from ddpdoctor.launch.starting import DEBUG_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.launch.command_line import ChosenLevel

MIN_FILES = 128
"""Our choice: DETAIL opens five more descriptors per rank and group, and twice that with each further rank."""
MIN_ADDRESS_SPACE_BYTES = 16 * 2**30
"""Our choice: DETAIL takes 150 MiB more per group, because each of Gloo's threads has a stack and a malloc arena."""


NOTES: dict[str, str] = {
    "AUTO": "a job on Gloo alone runs with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch checks that all ranks make the same "
    "collectives, which slows down small steps. Over NCCL it stays off. --debug-level OFF turns it off",
    "DETAIL": "TORCH_DISTRIBUTED_DEBUG=DETAIL is on: torch checks that all ranks make the same collectives. Over NCCL, "
    "the host then waits for all ranks before each one: 0.3 to 1 ms on one host, more with more ranks. Steps may take "
    "twice as long. --debug-level OFF turns it off",
}
"""The cost of a level, printed in one line before the start. For NCCL it is an estimate: see docs/what-it-costs.md."""


def choose_debug_level(
    asked: ChosenLevel | None, env: Mapping[str, str], *, has_space: bool = True, for_speed: bool = False
) -> ChosenLevel | None:
    """Choose DETAIL over Gloo ("AUTO") if nothing is set and there is room. None keeps the environment's setting.

    ``for_speed``: steps are timed, and DETAIL would make small collectives take twice as long.
    """
    if asked is not None:
        return asked
    if env.get(DEBUG_VARIABLE) or not has_space:
        return None
    return "OFF" if for_speed else "AUTO"


def debug_note(chosen: ChosenLevel | None, env: Mapping[str, str]) -> str | None:
    """Return the cost of the debug level, chosen or set in the environment, or None if there is no cost."""
    return NOTES.get(chosen or env.get(DEBUG_VARIABLE, "").upper())


def has_memory_for_detail() -> bool:
    """Return whether the limits of this process, which its ranks inherit, leave room for DETAIL."""
    return _is_above(resource.RLIMIT_NOFILE, MIN_FILES) and _is_above(resource.RLIMIT_AS, MIN_ADDRESS_SPACE_BYTES)


def _is_above(limit: int, least: int) -> bool:
    soft, _ = resource.getrlimit(limit)
    return soft == resource.RLIM_INFINITY or soft >= least
