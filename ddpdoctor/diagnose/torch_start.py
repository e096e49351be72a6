"""Starts the import of torch in a child process early, because it takes longest and can run in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.collect.bounded import start_torch_child

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpdoctor.collect.bounded import ChildProcess

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")


def start_torch_early(env: Mapping[str, str]) -> ChildProcess | None:
    """Start the child if this process will read the machine: it is alone or first on its node. Else return None."""
    first = all(env.get(name, "0") == "0" for name in LOCAL_RANKS)
    if not first:
        return None
    try:
        return start_torch_child(env)
    except OSError:
        return None  # the collector tries again and reports the problem
